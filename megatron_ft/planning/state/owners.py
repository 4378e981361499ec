"""Chooses the owners of each optimizer shard in distinct failure domains, so that shards survive their loss."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.tensors import Column


def assign_owners(
    members: Sequence[int], domain_of: Mapping[int, str], num_copies: int, others: Sequence[int] = ()
) -> Column:
    """Return the owners of each member's shard: the member, and ``num_copies - 1`` ranks in other failure domains.

    Ranks are arranged in a row, domain by domain. The owners of a shard follow each other in this row at a fixed
    distance, which is the size of the largest domain. So no two owners of a shard are in one domain, and a rank stores
    at most ``num_copies - 1`` shards of other members; without ``others``, every member stores exactly this number. The
    arrangement is impossible if one domain has more than ``1 / num_copies`` of all ranks. In this case each copy goes
    to the rank with the fewest copies. Domains are in the order of their first members, so that copies of other shards
    do not move if one node replaces another.

    Args:
        members: ranks that have one shard each, in the order of the shards.
        domain_of: failure domain of each rank.
        others: ranks without a shard that can also store copies: hot spares, or ranks in further domains.

    Returns:
        Owners ``[shards, num_copies]`` of each shard, in distinct failure domains; the first one is the member.

    Raises:
        ConfigError: there are fewer failure domains than ``num_copies``.
    """
    ranks = [*members, *others]
    sizes = Counter(domain_of[rank] for rank in ranks)
    if not 1 <= num_copies <= max(1, len(sizes)):
        raise ConfigError.of(
            "num_state_copies", num_copies, f"must be from 1 to {len(sizes)}, the number of failure domains"
        )
    if num_copies == 1 or not members:
        return np.array(members, dtype=np.int64).reshape(-1, 1)
    # A shorter step could stay inside the largest domain.
    step = max(sizes.values())
    if step * num_copies > len(ranks):
        return np.array(_least_first(members, ranks, domain_of, num_copies), dtype=np.int64)
    order = {name: number for number, name in enumerate(sizes)}
    row = sorted(ranks, key=lambda rank: order[domain_of[rank]])
    place_of = {rank: place for place, rank in enumerate(row)}
    places = np.array([place_of[rank] for rank in members], dtype=np.int64)
    steps = step * np.arange(num_copies, dtype=np.int64)
    owners: Column = np.array(row, dtype=np.int64)[(places[:, None] + steps) % len(row)]
    return owners


def _least_first(
    members: Sequence[int], ranks: Sequence[int], domain_of: Mapping[int, str], num_copies: int
) -> list[list[int]]:
    by_domain: dict[str, list[tuple[int, int]]] = {}
    for rank in sorted(ranks):
        by_domain.setdefault(domain_of[rank], []).append((0, rank))
    domains = [(queue[0], name) for name, queue in sorted(by_domain.items())]
    heapq.heapify(domains)
    found = []
    for member in members:
        owners, taken, aside = [member], {domain_of[member]}, []
        while len(owners) < num_copies:
            # The heap has the least busy rank of each domain. Every domain that is popped is pushed back afterwards.
            (load, rank), name = heapq.heappop(domains)
            if name not in taken:
                heapq.heapreplace(by_domain[name], (load + 1, rank))
                owners.append(rank)
                taken.add(name)
            aside.append((by_domain[name][0], name))
        for entry in aside:
            heapq.heappush(domains, entry)
        found.append(owners)
    return found
