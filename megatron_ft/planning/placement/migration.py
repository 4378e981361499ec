"""Plans the migration from the present placement to a new one: slots of each rank, and experts that move."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Holdings, OtherHoldings
from megatron_ft.planning.placement.plan import PlacementPlan, Slots

Costs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Transfer of the state of one expert from one rank to another."""

    layer_number: int
    expert: int
    source_rank: int
    target_rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """Transfers after which every rank holds the experts of a new placement."""

    placement: PlacementPlan
    """Placement after the migration."""
    transfers: tuple[Transfer, ...]

    @property
    def num_bytes(self) -> int:
        """Total bytes of all transfers."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    @property
    def most_bytes_of_a_rank(self) -> int:
        """Largest number of bytes that any rank sends or receives; sent and received bytes are not added."""
        received: dict[int, int] = {}
        for transfer in self.transfers:
            received[transfer.target_rank] = received.get(transfer.target_rank, 0) + transfer.num_bytes
        return max((*self.sent_bytes().values(), *received.values()), default=0)

    def sent_bytes(self) -> dict[int, int]:
        """Return the bytes that each sending rank sends."""
        sums: dict[int, int] = {}
        for transfer in self.transfers:
            sums[transfer.source_rank] = sums.get(transfer.source_rank, 0) + transfer.num_bytes
        return dict(sorted(sums.items()))

    def validate(self) -> None:
        """Check that each transfer sends an expert that its target rank needs, from another rank, and only once."""
        wanted = set()
        for layer, by_rank in zip(self.placement.layer_numbers, self.placement.slots, strict=True):
            for rank, experts in zip(self.placement.ranks, by_rank, strict=True):
                wanted |= {(layer, expert, rank) for expert in experts}
        seen = set()
        for transfer in self.transfers:
            target = (transfer.layer_number, transfer.expert, transfer.target_rank)
            if target not in wanted or target in seen or transfer.source_rank == transfer.target_rank:
                where = f"expert {transfer.expert} of layer {transfer.layer_number}"
                raise ConfigError.of(
                    "transfer",
                    f"{where} from rank {transfer.source_rank} to rank {transfer.target_rank}",
                    "must send an expert that the target rank needs, must be from another rank and must occur once",
                )
            seen.add(target)

    def summary(self) -> str:
        largest = max(self.sent_bytes().values(), default=0)
        return f"expert transfers: {len(self.transfers)}, {self.num_bytes:,} bytes, at most {largest:,} from one rank"

    @classmethod
    def between(
        cls,
        plan: PlacementPlan,
        held: Holdings,
        expert_bytes: int | Sequence[int],
        others: OtherHoldings | None = None,
    ) -> "MigrationPlan":
        """Plan the transfers of experts to ranks that need but do not have them. The holders of an expert take turns.

        The sender is the holder that has sent this expert least often; ties are resolved by the fewest bytes sent so
        far, then by rank.

        Args:
            plan: new placement, already permuted by ``remap``.
            held: experts that each of ``plan.ranks`` holds, in the order of ranks.
            expert_bytes: bytes of the state of one expert, equal in all layers or one value for each layer.
            others: ranks that have left the stage and still hold experts of it.

        Raises:
            ConfigError: no rank holds an expert that another rank needs.
        """
        sizes = _sizes(plan, expert_bytes)
        elsewhere = sorted((others or {}).items())
        sent = dict.fromkeys((*plan.ranks, *(rank for rank, _ in elsewhere)), 0)
        transfers = []
        for layer, (by_rank, owned, size) in enumerate(zip(plan.slots, held, sizes, strict=True)):
            # Only ranks that held the expert before the migration send it: a receiving rank has nothing to send yet.
            owners: list[list[int]] = [[] for _ in range(plan.num_experts)]
            for rank, has in zip(plan.ranks, owned, strict=True):
                for expert in has:
                    owners[expert].append(rank)
            for rank, by_layer in elsewhere:
                for expert in by_layer[layer]:
                    owners[expert].append(rank)
            served = [dict.fromkeys(ranks, 0) for ranks in owners]
            for rank, experts, has in zip(plan.ranks, by_rank, owned, strict=True):
                for expert in sorted(set(experts) - has):
                    if not owners[expert]:
                        where = f"expert {expert} of layer {plan.layer_numbers[layer]}"
                        raise ConfigError(f"no surviving rank has {where}, which rank {rank} needs")
                    counts = served[expert]
                    source = min(owners[expert], key=lambda owner: (counts[owner], sent[owner], owner))
                    counts[source] += 1
                    sent[source] += size
                    transfers.append(
                        Transfer(
                            layer_number=plan.layer_numbers[layer],
                            expert=expert,
                            source_rank=source,
                            target_rank=rank,
                            num_bytes=size,
                        )
                    )
        result = cls(placement=plan, transfers=tuple(transfers))
        result.validate()
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Transfer of an expert that overwrites another expert of the same layer on the receiving rank."""

    transfer: Transfer
    dropped: int
    """Expert whose state the receiving rank overwrites."""


Step = tuple[Replacement, ...]
"""Replacements that ranks make at the same time: at most one for each receiving rank."""


def replacement_steps(now: PlacementPlan, migration: MigrationPlan) -> list[Step] | None:
    """Divide ``migration`` into steps. In a step, each rank receives at most one expert and sends at most one, so that
    it needs memory for only one more expert.

    An expert is overwritten only if another rank had it before the step, so every expert always has a copy. If
    possible, the rank that ``migration`` names sends an expert. Otherwise another rank with the expert sends it.

    Returns:
        Steps in order. None if such steps do not exist. This happens in two cases: the migration changes the number of
        distinct experts that a rank holds in a layer, or ranks must exchange experts of which no other rank has a copy.
    """
    state = _Replacing.of(now, migration)
    if any(len(experts) != len(state.wanted[key]) for key, experts in state.held.items()):
        return None
    steps = []
    while any(state.open.values()):
        step = state.next_step()
        if not step:
            return None
        state.make(step)
        steps.append(step)
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacing:
    """Experts that ranks hold, and transfers that remain, during a migration that is made in steps."""

    held: dict[tuple[int, int], set[int]]
    """Experts that each rank holds now, by layer number and rank."""
    wanted: dict[tuple[int, int], set[int]]
    """Experts that each rank holds after the migration, by layer number and rank."""
    holders: dict[tuple[int, int], set[int]]
    """Ranks that hold an expert, by layer number and expert."""
    open: dict[int, list[Transfer]]
    """Transfers that have not been made, by receiving rank."""

    @classmethod
    def of(cls, now: PlacementPlan, migration: MigrationPlan) -> "_Replacing":
        held, wanted = (
            {
                (layer, rank): set(experts)
                for layer, by_rank in zip(plan.layer_numbers, plan.slots, strict=True)
                for rank, experts in zip(plan.ranks, by_rank, strict=True)
            }
            for plan in (now, migration.placement)
        )
        holders: dict[tuple[int, int], set[int]] = {}
        for (layer, rank), experts in held.items():
            for expert in experts:
                holders.setdefault((layer, expert), set()).add(rank)
        left: dict[int, list[Transfer]] = {rank: [] for rank in now.ranks}
        for transfer in migration.transfers:
            left[transfer.target_rank].append(transfer)
        return cls(held=held, wanted=wanted, holders=holders, open=left)

    def next_step(self) -> Step:
        """Choose for each receiving rank, if possible, one remaining transfer and the expert that it overwrites."""
        step = []
        senders: set[int] = set()
        overwritten: Counter[tuple[int, int]] = Counter()
        for transfers in self.open.values():
            for transfer in transfers:
                source, dropped = self._sender(transfer, senders), self._dropped(transfer, overwritten)
                if source is not None and dropped is not None:
                    senders.add(source)
                    overwritten[transfer.layer_number, dropped] += 1
                    step.append(Replacement(transfer=replace(transfer, source_rank=source), dropped=dropped))
                    break
        return tuple(step)

    def _sender(self, transfer: Transfer, senders: Collection[int]) -> int | None:
        """Return a rank that holds the expert and is not one of ``senders``, if possible the planned sender."""
        holders = self.holders[transfer.layer_number, transfer.expert]
        if transfer.source_rank in holders and transfer.source_rank not in senders:
            return transfer.source_rank
        return min((rank for rank in holders if rank not in senders), default=None)

    def _dropped(self, transfer: Transfer, overwritten: Mapping[tuple[int, int], int]) -> int | None:
        """Return the expert that the receiving rank overwrites. The rank must not need it after the migration, and
        another rank must keep a copy of it. None if there is no such expert."""
        layer, key = transfer.layer_number, (transfer.layer_number, transfer.target_rank)

        def left(expert: int) -> int:
            return len(self.holders[layer, expert]) - overwritten.get((layer, expert), 0)

        # The expert with the most copies: other ranks may still have to receive a rarer expert from this rank.
        most = max(self.held[key] - self.wanted[key], key=lambda expert: (left(expert), -expert))
        return most if left(most) > 1 else None

    def make(self, step: Step) -> None:
        """Record that the transfers of ``step`` have been made."""
        for replacement in step:
            transfer = replacement.transfer
            rank, layer, expert = transfer.target_rank, transfer.layer_number, transfer.expert
            # The sender of a step may differ from the planned one.
            self.open[rank] = [t for t in self.open[rank] if (t.layer_number, t.expert) != (layer, expert)]
            self.held[layer, rank].remove(replacement.dropped)
            self.held[layer, rank].add(expert)
            self.holders[layer, replacement.dropped].remove(rank)
            self.holders[layer, expert].add(rank)


def holdings(plan: PlacementPlan, previous: Sequence[int | None] | None = None) -> Holdings:
    """Return the experts that ranks hold in each layer under ``plan``.

    Args:
        previous: for each rank of the next membership, its rank in ``plan``; None for a joining rank. By default, all
            ranks keep their numbers.
    """
    position = {rank: index for index, rank in enumerate(plan.ranks)}
    wanted: Sequence[int | None] = plan.ranks if previous is None else previous
    return tuple(
        tuple(frozenset() if rank is None else frozenset(by_rank[position[rank]]) for rank in wanted)
        for by_rank in plan.slots
    )


def remap(plan: PlacementPlan, held: Holdings, expert_bytes: int | Sequence[int] = 1) -> PlacementPlan:
    """Permute the ranks of ``plan`` so that as few bytes as possible move, in all layers together.

    Two kinds of exchanges are made: of ranks within a domain, and of whole domains with equal numbers of ranks. Neither
    exchange changes the survival of experts. Each is solved exactly as a linear assignment problem.
    """
    mapping = _mapping(plan, held, expert_bytes)
    slots: Slots = tuple(tuple(by_rank[part] for part in mapping) for by_rank in plan.slots)
    return plan.replacing(slots)


def _sizes(plan: PlacementPlan, expert_bytes: int | Sequence[int]) -> list[int]:
    sizes = [expert_bytes] * len(plan.slots) if isinstance(expert_bytes, int) else list(expert_bytes)
    if len(sizes) != len(plan.slots):
        raise ConfigError.of("expert_bytes", sizes, f"must have {len(plan.slots)} entries, one for each layer")
    return sizes


def _mapping(plan: PlacementPlan, held: Holdings, expert_bytes: int | Sequence[int]) -> tuple[int, ...]:
    costs = _missing_bytes(plan, held, _sizes(plan, expert_bytes))
    members: dict[str, list[int]] = {}
    for position, name in enumerate(plan.domains):
        members.setdefault(name, []).append(position)
    mapping = [0] * len(plan.ranks)
    # All ranks of a domain get slots of one domain: otherwise a domain could get several replicas of one expert.
    for size in sorted({len(positions) for positions in members.values()}):
        alike = [positions for positions in members.values() if len(positions) == size]
        if size == 1:
            single = [positions[0] for positions in alike]
            for actual, part in _assign(costs[np.ix_(single, single)]):
                mapping[single[actual]] = single[part]
            continue
        inner = [[_inner(costs, actual, part) for part in alike] for actual in alike]
        outer = np.asarray([[cost for cost, _ in row] for row in inner], dtype=np.int64)
        for actual, part in _assign(outer):
            for position, taken in inner[actual][part][1]:
                mapping[position] = taken
    return tuple(mapping)


def _inner(costs: Costs, actual: Sequence[int], part: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """Give each rank in ``actual`` the planned slots of one rank in ``part``, so that the fewest bytes move. Return the
    moved bytes and pairs (rank, rank whose slots it gets). All ranks are given as positions in the plan."""
    block = costs[np.ix_(actual, part)]
    pairs = _assign(block)
    return int(sum(block[row, column] for row, column in pairs)), [(actual[r], part[c]) for r, c in pairs]


def _missing_bytes(plan: PlacementPlan, held: Holdings, sizes: Sequence[int]) -> Costs:
    """Return ``[N, N]``: bytes that the row's rank must receive to hold the experts planned for the column's rank."""
    costs = np.zeros((len(plan.ranks), len(plan.ranks)), dtype=np.int64)
    for by_rank, owned, size in zip(plan.slots, held, sizes, strict=True):
        wants = _incidence(by_rank, plan.num_experts)
        # Floats, because BLAS multiplies only floats; they represent counts of experts exactly.
        has = _incidence(owned, plan.num_experts)
        costs += size * (wants.sum(axis=1)[None, :] - has @ wants.T).astype(np.int64)
    return costs


def _incidence(by_rank: Sequence[Sequence[int] | frozenset[int]], num_experts: int) -> npt.NDArray[np.float64]:
    matrix = np.zeros((len(by_rank), num_experts))
    for position, experts in enumerate(by_rank):
        matrix[position, sorted(set(experts))] = 1
    return matrix


def _assign(costs: Costs) -> list[tuple[int, int]]:
    from scipy.optimize import linear_sum_assignment  # importing it takes a third of a second

    rows, columns = linear_sum_assignment(costs)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
