"""Copies of optimizer state: who owns which shard, so that losses of failure domains leave every shard an owner.

How many ranks compute with an operator and how many keep its optimizer state are two numbers. Here each operator's
state is cut into one shard per holder, and every shard has f owners on f distinct failure domains. Any number of ranks
works: ownership is cyclic, nothing has to divide anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.plan import PlacementPlan

NON_EXPERT = -1
"""Stands for a layer's non-expert part in ``OperatorCopies.expert``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCopies:
    """Owners of one operator's optimizer state."""

    layer_number: int
    """Megatron's number, counted from 1; 0 for what belongs to no layer."""
    expert: int
    """Expert id, or ``NON_EXPERT``."""
    num_bytes: int
    """Optimizer state of the whole operator, one copy."""
    owners: tuple[tuple[int, ...], ...]
    """Ranks that own each shard; all shards are equal but for a remainder."""

    def shard_range(self, shard: int, length: int) -> tuple[int, int]:
        """First and past-the-last of the ``length`` elements (or bytes) that belong to a shard: even to within one."""
        return length * shard // len(self.owners), length * (shard + 1) // len(self.owners)

    def shard_bytes(self, shard: int) -> int:
        """Bytes of one copy of a shard."""
        first, last = self.shard_range(shard, self.num_bytes)
        return last - first


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopyPlan:
    """Owners of all optimizer state."""

    num_state_copies: int | None
    """Copies of every shard; None keeps one with every holder."""
    ranks: tuple[int, ...]
    domains: tuple[str, ...]
    """Failure domain of each rank."""
    operators: tuple[OperatorCopies, ...]

    def validate(self) -> None:
        """Every shard has its copies, each on a failure domain of its own (holders may share one in the mode of all).

        Raises:
            ConfigError: naming layer, expert and shard.
        """
        domain_of = dict(zip(self.ranks, self.domains, strict=True))
        for operator in self.operators:
            for shard, owners in enumerate(operator.owners):
                distinct = {domain_of[rank] for rank in owners}
                wanted = 1 if self.num_state_copies is None else self.num_state_copies
                whole = self.num_state_copies is None or len(owners) == len(distinct)
                if len(distinct) < wanted or not whole:
                    where = f"owners of layer {operator.layer_number}, expert {operator.expert}, shard {shard}"
                    raise ConfigError.of(where, list(owners), f"must lie on {wanted} distinct failure domains")


    def bytes_per_rank(self) -> dict[int, int]:
        """Optimizer bytes each rank owns."""
        sums = dict.fromkeys(self.ranks, 0)
        for operator in self.operators:
            for shard, owners in enumerate(operator.owners):
                for rank in owners:
                    sums[rank] += operator.shard_bytes(shard)
        return sums

    @property
    def num_bytes(self) -> int:
        """Optimizer bytes over all ranks."""
        return sum(self.bytes_per_rank().values())

    def summary(self) -> str:
        """One log line."""
        per_rank = self.bytes_per_rank().values()
        copies = "every holder" if self.num_state_copies is None else f"{self.num_state_copies} failure domains"
        return f"optimizer state on {copies}: {self.num_bytes:,} bytes, at most {max(per_rank):,} on one rank"



def plan_copies(
    plan: PlacementPlan,
    num_state_copies: int | None,
    *,
    expert_bytes: int,
    non_expert_bytes: Sequence[tuple[int, int]] = (),
) -> StateCopyPlan:
    """Owners of every expert's and every non-expert part's optimizer state.

    A shard's first owner is one holder of the operator (non-expert parts: each rank in turn); the others sit on the
    failure domains that follow in a cycle, domains of holders before others, so that losses of any
    ``num_state_copies - 1`` domains leave an owner even where fewer ranks compute. With None every holder owns
    everything: the mode of Lazarus, where copies and replicas are the same number.

    Args:
        plan: who computes what.
        num_state_copies: copies of every shard, on as many failure domains.
        expert_bytes: optimizer state of one expert.
        non_expert_bytes: (layer number, bytes) of each part that all of the plan's ranks hold.

    Raises:
        ConfigError: more copies than failure domains.
    """
    num_domains = len(set(plan.domains))
    if num_state_copies is not None and not 1 <= num_state_copies <= num_domains:
        raise ConfigError.of(
            "num_state_copies", num_state_copies, f"must lie between 1 and {num_domains} failure domains"
        )
    ring = _Ring(plan, num_state_copies)
    operators = []
    for turn, (layer, size) in enumerate(non_expert_bytes):
        operators.append(ring.operator(layer, NON_EXPERT, size, list(range(len(plan.ranks))), turn))
    for layer, by_rank in zip(plan.layer_numbers, plan.slots, strict=True):
        for expert in range(plan.num_experts):
            holders = [position for position, experts in enumerate(by_rank) if expert in experts]
            operators.append(ring.operator(layer, expert, expert_bytes, holders, expert))
    result = StateCopyPlan(
        num_state_copies=num_state_copies, ranks=plan.ranks, domains=plan.domains, operators=tuple(operators)
    )
    result.validate()
    return result


class _Ring:
    """Cyclic choice of owners over the ranks of a plan."""

    def __init__(self, plan: PlacementPlan, num_copies: int | None) -> None:
        self.ranks, self.domains, self.num_copies = plan.ranks, plan.domains, num_copies
        self.members: dict[str, list[int]] = {}
        for position, name in enumerate(plan.domains):
            self.members.setdefault(name, []).append(position)

    def operator(self, layer: int, expert: int, num_bytes: int, holders: list[int], turn: int) -> OperatorCopies:
        if self.num_copies is None:
            owners: tuple[tuple[int, ...], ...] = (tuple(self.ranks[position] for position in holders),)
        else:
            cycle = self._cycle(holders, turn)
            owners = tuple(
                self._owners(holder, shard, cycle, set(holders), turn) for shard, holder in enumerate(holders)
            )
        return OperatorCopies(layer_number=layer, expert=expert, num_bytes=num_bytes, owners=owners)

    def _cycle(self, holders: list[int], turn: int) -> list[str]:
        """Domains of holders in order; where they are too few, others, from a place that moves with ``turn``."""
        assert self.num_copies is not None
        own = list(dict.fromkeys(self.domains[position] for position in holders))
        others = [name for name in self.members if name not in own]
        start = turn % len(others) if others else 0
        return own + (others[start:] + others[:start])[: max(0, self.num_copies - len(own))]

    def _owners(self, holder: int, shard: int, cycle: list[str], holders: set[int], turn: int) -> tuple[int, ...]:
        assert self.num_copies is not None
        start = cycle.index(self.domains[holder])
        chosen = [self.ranks[holder]]
        for step in range(1, self.num_copies):
            members = self.members[cycle[(start + step) % len(cycle)]]
            candidates = [position for position in members if position in holders] or members
            place = (
                self.members[self.domains[holder]].index(holder) if len(holders) == len(self.ranks) else turn + shard
            )
            chosen.append(self.ranks[candidates[place % len(candidates)]])
        return tuple(chosen)
