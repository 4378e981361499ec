"""Plans copies of optimizer state: every shard has owners in distinct failure domains.

The optimizer state of an operator is cut into one shard for each computing rank, and every shard has f owners in f
distinct failure domains. The owners are chosen cyclically, so any number of ranks is possible. In a job, every rank
with a replica of an expert has the whole state of the expert; only owners without a replica keep copies of it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.plan import PlacementPlan

NON_EXPERT = -1
"""Value of ``_OperatorCopies.expert`` for the non-expert part of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OperatorCopies:
    """Owners of one operator's optimizer state."""

    layer_number: int
    """Layer number in Megatron, from 1; 0 for parameters outside of layers."""
    expert: int
    """Expert id, or ``NON_EXPERT``."""
    num_bytes: int
    """Bytes of one copy of the optimizer state of the whole operator."""
    owners: tuple[tuple[int, ...], ...]
    """Ranks that own each shard; the sizes of shards differ by at most one byte."""

    def shard_range(self, shard: int, length: int) -> tuple[int, int]:
        """Return the range (start, stop) of a shard if the operator's state has ``length`` elements or bytes."""
        return length * shard // len(self.owners), length * (shard + 1) // len(self.owners)

    def shard_bytes(self, shard: int) -> int:
        """Return the bytes of one copy of an optimizer shard."""
        first, last = self.shard_range(shard, self.num_bytes)
        return last - first


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopyPlan:
    """Owners of each shard of the optimizer state, for every operator."""

    num_state_copies: int | None
    """Number of copies of every shard; None if each computing rank has the whole state of its operators."""
    ranks: tuple[int, ...]
    domains: tuple[str, ...]
    """Failure domain of each rank."""
    operators: tuple[_OperatorCopies, ...]

    def validate(self) -> None:
        """Check that the copies of every shard are in distinct failure domains.

        Raises:
            ConfigError: two copies of a shard are in one domain, or copies are missing; the message names the shard.
        """
        domain_of = dict(zip(self.ranks, self.domains, strict=True))
        for operator in self.operators:
            for shard, owners in enumerate(operator.owners):
                distinct = {domain_of[rank] for rank in owners}
                wanted = 1 if self.num_state_copies is None else self.num_state_copies
                whole = self.num_state_copies is None or len(owners) == len(distinct)
                if len(distinct) < wanted or not whole:
                    part = "non-expert part" if operator.expert == NON_EXPERT else f"expert {operator.expert}"
                    where = f"failure domains of the owners of layer {operator.layer_number}, {part}, shard {shard}"
                    constraint = f"must be at least {wanted}" + (", all different" if self.num_state_copies else "")
                    raise ConfigError.of(where, [domain_of[rank] for rank in owners], constraint)

    def bytes_per_rank(self) -> dict[int, int]:
        """Return the bytes of optimizer state that each rank owns."""
        sums = dict.fromkeys(self.ranks, 0)
        for operator in self.operators:
            for shard, owners in enumerate(operator.owners):
                for rank in owners:
                    sums[rank] += operator.shard_bytes(shard)
        return sums

    @property
    def digest(self) -> str:
        """Digest of the owners of all shards: plans with equal digests assign copies to the same ranks."""
        owners = [(operator.layer_number, operator.expert, operator.owners) for operator in self.operators]
        return hashlib.blake2b(repr(owners).encode(), digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Total bytes of optimizer state on all ranks."""
        return sum(self.bytes_per_rank().values())

    def summary(self) -> str:
        per_rank = self.bytes_per_rank().values()
        computing = "every rank that computes with the expert"
        copies = f"on {computing}" if self.num_state_copies is None else f"in {self.num_state_copies} failure domains"
        return f"optimizer state {copies}: {self.num_bytes:,} bytes, at most {max(per_rank):,} on one rank"

    @classmethod
    def of(
        cls,
        plan: PlacementPlan,
        num_state_copies: int | None,
        *,
        expert_bytes: int,
        non_expert_bytes: Sequence[tuple[int, int]] = (),
    ) -> "StateCopyPlan":
        """Assign owners to the optimizer state of every expert and every non-expert part.

        A shard's first owner is a rank that computes with the operator. Each such rank is first owner of one shard.
        Failure domains form a cycle, those of computing ranks first; the other owners of the shard are in the domains
        that follow the domain of the first owner. So after the loss of any ``num_state_copies - 1`` domains, every
        shard still has an owner, even if fewer ranks compute with the operator.

        Args:
            plan: placement of experts.
            num_state_copies: number of copies of every shard, in distinct failure domains. If it is None, every
                computing rank owns the whole state, as in Lazarus.
            expert_bytes: bytes of the optimizer state of one expert.
            non_expert_bytes: (layer number, bytes) of each non-expert part, which all ranks of ``plan`` hold.

        Raises:
            ConfigError: ``num_state_copies`` is below 1 or above the number of failure domains.
        """
        ring = _Ring(plan.ranks, plan.domains, num_state_copies)
        operators = []
        for turn, (layer, size) in enumerate(non_expert_bytes):
            operators.append(ring.operator(layer, NON_EXPERT, size, list(range(len(plan.ranks))), turn))
        for layer, by_rank in zip(plan.layer_numbers, plan.slots, strict=True):
            for expert in range(plan.num_experts):
                holders = [position for position, experts in enumerate(by_rank) if expert in experts]
                operators.append(ring.operator(layer, expert, expert_bytes, holders, expert))
        result = cls(
            num_state_copies=num_state_copies, ranks=plan.ranks, domains=plan.domains, operators=tuple(operators)
        )
        result.validate()
        return result

    @classmethod
    def of_shards(
        cls, ranks: Sequence[int], domains: Sequence[str], num_state_copies: int, *, num_bytes: int
    ) -> "StateCopyPlan":
        """Assign owners to the shards of a stage's distributed optimizer in a job without replica slots. A rank's shard
        also contains the state of its experts, so the plan has a single operator, ``NON_EXPERT``.

        Args:
            ranks: ranks of the stage.
            domains: failure domain of each rank.
            num_state_copies: number of copies of every shard, in distinct failure domains.
            num_bytes: bytes of one copy of the optimizer state of the whole stage.

        Raises:
            ConfigError: ``num_state_copies`` is below 1 or above the number of failure domains.
        """
        ring = _Ring(ranks, domains, num_state_copies)
        shards = ring.operator(0, NON_EXPERT, num_bytes, list(range(len(ranks))), 0)
        result = cls(num_state_copies=num_state_copies, ranks=tuple(ranks), domains=tuple(domains), operators=(shards,))
        result.validate()
        return result


class _Ring:
    """Chooses owners of shards cyclically from a stage's ranks. Raises ConfigError if failure domains are too few."""

    def __init__(self, ranks: Sequence[int], domains: Sequence[str], num_copies: int | None) -> None:
        self.ranks, self.domains, self.num_copies = ranks, domains, num_copies
        self.members: dict[str, list[int]] = {}
        for position, name in enumerate(domains):
            self.members.setdefault(name, []).append(position)
        if num_copies is not None and not 1 <= num_copies <= len(self.members):
            raise ConfigError.of(
                "num_state_copies", num_copies, f"must be from 1 to {len(self.members)}, the number of failure domains"
            )

    def operator(self, layer: int, expert: int, num_bytes: int, holders: list[int], turn: int) -> _OperatorCopies:
        if self.num_copies is None:
            owners: tuple[tuple[int, ...], ...] = (tuple(self.ranks[position] for position in holders),)
        else:
            cycle = self._cycle(holders, turn)
            owners = tuple(
                self._owners(holder, shard, cycle, set(holders), turn) for shard, holder in enumerate(holders)
            )
        return _OperatorCopies(layer_number=layer, expert=expert, num_bytes=num_bytes, owners=owners)

    def _cycle(self, holders: list[int], turn: int) -> list[str]:
        # Returns the domains of holders and, if they are too few, further domains, rotated by ``turn``.
        assert self.num_copies is not None
        # Computing ranks come first: they already have the state, so their copies need no transfer.
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
            # If all ranks hold the operator, owners have equal positions in their domains, so that all own equal parts.
            place = (
                self.members[self.domains[holder]].index(holder) if len(holders) == len(self.ranks) else turn + shard
            )
            chosen.append(self.ranks[candidates[place % len(candidates)]])
        return tuple(chosen)
