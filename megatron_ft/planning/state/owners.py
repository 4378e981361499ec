"""Chooses the owners of each optimizer shard so that every shard has an owner left after losses of failure domains."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.tensors import Column


def assign_owners(
    members: Sequence[int], domain_of: Mapping[int, str], num_copies: int, others: Sequence[int] = ()
) -> Column:
    """Return the owners of each member's shard: the member, and ``num_copies - 1`` ranks on other failure domains.

    Ranks are arranged in a row, domain by domain. The copies of a shard are on ranks at a fixed distance, which is the
    size of the largest domain. So no two owners of a shard share a domain, and no rank keeps more than ``num_copies -
    1`` shards of others; without ``others``, every member keeps as many. If one domain has more than ``1 / num_copies``
    of all ranks, this is impossible; then each copy goes to the rank that keeps least. Domains are in the order of
    their first members, so if a node takes the place of another one, no copy of other shards moves.

    Args:
        members: ranks with a shard each, in the order of the shards.
        domain_of: failure domain by rank.
        others: ranks without a shard that also keep copies: hot spares, or further ranks if there are too few holders.

    Returns:
        ``[shards, num_copies]``: ranks on distinct failure domains; the first is the member.

    Raises:
        ConfigError: fewer failure domains than copies.
    """
    ranks = [*members, *others]
    sizes = Counter(domain_of[rank] for rank in ranks)
    if not 1 <= num_copies <= max(1, len(sizes)):
        raise ConfigError.of("num_state_copies", num_copies, f"must lie between 1 and {len(sizes)} failure domains")
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
            # The heap has the least busy rank of each domain. Every domain that is taken off it returns afterwards.
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
