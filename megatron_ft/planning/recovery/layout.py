"""Chooses the layout of the living processes after a loss. Only the number of lanes (model replicas) can change.

A process has the same number in every membership. A number that the former layout does not contain belongs to a process
that has joined since.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of, derive_placement
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.parallel_layout import Group, ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """Numbers of lanes (model replicas) that a job may have."""

    most: int
    """Largest number of lanes, which is the number in the configuration."""
    multiple: int = 1
    """Number that must divide the number of lanes. Without expert slots, it is the number of lanes that one
    expert-parallel group of Megatron spans."""
    fewest: int = 1
    """Smallest number of lanes with a slot for every expert."""
    num_expert_ranks: int | None = None
    """EP times expert TP; None if experts are placed in slots. Ranks of a stage hold the same experts if their numbers
    differ by a multiple of this product."""
    optimizer_bytes: tuple[int, int] = (1, 1)
    """Bytes of a stage's optimizer state: non-expert, expert. Lanes are assigned so that few of these bytes move."""

    @classmethod
    def of(
        cls,
        layout: ParallelLayout,
        most: int,
        *,
        num_expert_ranks: int = 1,
        num_experts: int = 0,
        num_slots_per_rank: int | None = None,
        optimizer_bytes: tuple[int, int] = (1, 1),
    ) -> "LaneLimits":
        """Return the limits for the number of lanes of a job whose TP·CP groups are as large as in ``layout``.

        Args:
            num_expert_ranks: EP times expert TP; used only if ``num_slots_per_rank`` is None.
            num_slots_per_rank: number of expert slots of a rank; None if experts are not placed in slots.
        """
        size = layout.group_size
        if num_slots_per_rank is None:
            return cls(
                most=most,
                multiple=num_expert_ranks // gcd(num_expert_ranks, size),
                num_expert_ranks=num_expert_ranks,
                optimizer_bytes=optimizer_bytes,
            )
        return cls(most=most, fewest=max(1, -(-num_experts // (num_slots_per_rank * size))))


@dataclass(frozen=True)  # no slots, for ``cached_property``
class MembershipLayout:
    """Processes that have a rank in a membership, in the order of ranks, and processes that wait as hot spares.

    A process has the number ``node * ranks_per_node + local_rank`` during its whole life.
    """

    nodes: tuple[int, ...]
    """All nodes of the membership."""
    processes: tuple[int, ...]
    """Process of each rank."""
    spares: tuple[int, ...]
    """Processes on ``nodes`` that have no rank."""
    ranks_per_node: int

    @classmethod
    def of(cls, nodes: Sequence[int], processes: Sequence[int], ranks_per_node: int) -> "MembershipLayout":
        """Return the layout of a membership of ``nodes``. ``processes`` contains the process of each rank, in order."""
        every = {process for node in nodes for process in range(node * ranks_per_node, (node + 1) * ranks_per_node)}
        spares = tuple(sorted(every - set(processes)))
        return cls(nodes=tuple(nodes), processes=tuple(processes), spares=spares, ranks_per_node=ranks_per_node)

    @property
    def rank_nodes(self) -> tuple[int, ...]:
        """Node of each rank."""
        return tuple(process // self.ranks_per_node for process in self.processes)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Index of each rank's process on its node, from 0."""
        return tuple(process % self.ranks_per_node for process in self.processes)

    def rank_of(self, process: int) -> int | None:
        """Return the rank of a process; None if the process has no rank."""
        return self._ranks.get(process)

    def processes_without(self, lost: frozenset[int]) -> frozenset[int]:
        """Return the processes that have a rank and are not on the nodes ``lost``. The result is cached, because this
        method is called for every report of a rank."""
        if lost not in self._living:
            living = (process for process in self.processes if process // self.ranks_per_node not in lost)
            self._living[lost] = frozenset(living)
        return self._living[lost]

    @cached_property
    def _living(self) -> dict[frozenset[int], frozenset[int]]:
        return {}

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {process: rank for rank, process in enumerate(self.processes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayouts:
    """Determines the layout of every membership of a job.

    A layout depends only on the nodes and on the *base*, the newest layout whose ranks all had received their state.
    Memberships that were abandoned while they were formed have no influence. So the layout is the same whether nodes
    were lost or left according to ``testing.membership_schedule``. A TP·CP group moves to another stage only if its own
    stage has more groups than lanes. So if all ranks of a node are in one stage, the loss of this node takes no state
    from other stages.
    """

    num_nodes: int
    """Number of nodes with which the job starts."""
    ranks_per_node: int
    tensor_size: int = 1
    context_size: int = 1
    num_stages: int = 1
    keeps_layout: bool = False
    """Whether a membership of ``num_nodes`` nodes may have the initial layout. If so, the i-th node in the argument of
    ``on`` gets the ranks that node i has in the initial layout."""
    limits: LaneLimits = LaneLimits(most=1)
    fewest_expert_ranks: int = 1
    """Smallest number of ranks with a slot for every expert."""

    @classmethod
    def of(cls, config: JobConfig) -> "JobLayouts":
        """Return the layouts of a job that starts with ``config``."""
        launch, parallel = config.launch, config.parallel
        tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        stages = parallel.pipeline_model_parallel_size
        most = config.most_members * launch.ranks_per_node // (tensor * context * stages)
        num_experts = config.model.num_moe_experts or 0
        num_slots = derive_placement(config).placement.num_slots_per_rank or max(1, num_experts)
        return cls(
            num_nodes=launch.num_nodes,
            ranks_per_node=launch.ranks_per_node,
            tensor_size=tensor,
            context_size=context,
            num_stages=stages,
            keeps_layout=config.recovery.keep_layout,
            limits=LaneLimits.of(
                ParallelLayout(tensor_size=tensor, context_size=context, stages=()),
                max(1, most),
                num_experts=num_experts,
                num_slots_per_rank=num_slots,
            ),
            fewest_expert_ranks=-(-num_experts // num_slots),
        )

    def on(
        self, nodes: Iterable[int], base: MembershipLayout | None = None, *, in_place: bool | None = None
    ) -> MembershipLayout | Declined:
        """Return the layout of a membership of ``nodes``; ``Declined`` if there are too few nodes.

        Args:
            base: the newest layout whose ranks all had received their state; None at the start of a job.
            in_place: whether nodes may take the places of lost nodes in the initial layout. It must be false after a
                membership with another layout. None means true if ``nodes`` and ``base`` have ``num_nodes`` nodes each,
                and false otherwise.
        """
        # With ``keeps_layout``, ``nodes`` are not sorted: their order can determine the ranks and the order of sums.
        nodes = tuple(nodes if self.keeps_layout else sorted(nodes))
        if in_place is None:
            in_place = len(nodes) == self.num_nodes and (base is None or len(base.nodes) == self.num_nodes)
        return _layout_on(self, nodes, base, in_place and self.keeps_layout)

    def history(
        self, memberships: Iterable[Iterable[int]], first: Iterable[int] | None = None
    ) -> list[MembershipLayout | Declined]:
        """Return the layouts of consecutive memberships, assuming that all ranks of each membership receive their
        state. The first membership has the nodes ``first`` (None for all); ``memberships`` lists the nodes of all later
        memberships."""
        every = [tuple(nodes) for nodes in (range(self.num_nodes) if first is None else first, *memberships)]
        found: list[MembershipLayout | Declined] = []
        base: MembershipLayout | None = None
        in_place = True
        for nodes in every:
            in_place = in_place and len(nodes) == self.num_nodes  # once the layout has changed, it is not kept again
            found.append(self.on(nodes, base, in_place=in_place))
            base = found[-1] if isinstance(found[-1], MembershipLayout) else base
        return found

    def why_not_without(self, now: MembershipLayout, leaving: Collection[int]) -> str:
        """Return the reason why the nodes ``leaving`` cannot leave the membership ``now`` on request; empty if they
        can.

        The processes that keep a rank must have all state before others leave: the weights of each model part, and
        slots for all experts of each stage.
        """
        after = self.on([node for node in now.nodes if node not in leaving], now)
        if isinstance(after, Declined):
            return after.reason
        staying = set(after.processes)
        size = len(now.processes) // self.num_stages
        for stage in range(self.num_stages):
            of_stage = now.processes[stage * size : (stage + 1) * size]
            for part in range(self.tensor_size):
                if not staying.intersection(of_stage[part :: self.tensor_size]):
                    return f"no rank with the weights of pipeline stage {stage}, tensor part {part} would remain"
            left = len(staying.intersection(of_stage))
            if left < self.fewest_expert_ranks:
                return (
                    f"ranks of pipeline stage {stage} that would remain: {left}; the slots for its experts need "
                    f"{self.fewest_expert_ranks}"
                )
        return ""

    def initial(self, processes: Sequence[int]) -> ParallelLayout:
        """Return Megatron's usual layout, in which ``processes`` have the ranks 0, 1, ... in the given order."""
        regular = ParallelLayout.regular(
            len(processes), tensor_size=self.tensor_size, num_stages=self.num_stages, context_size=self.context_size
        )
        stages = tuple(tuple(tuple(processes[rank] for rank in group) for group in stage) for stage in regular.stages)
        return replace(regular, stages=stages)


@lru_cache(maxsize=64)
def _layout_on(
    job: JobLayouts, nodes: tuple[int, ...], base: MembershipLayout | None, in_place: bool
) -> MembershipLayout | Declined:
    size = job.ranks_per_node

    def processes_of(chosen: Iterable[int]) -> list[int]:
        return [process for node in chosen for process in range(node * size, (node + 1) * size)]

    living, start = processes_of(nodes), range(job.num_nodes)
    is_initial = base is None and nodes == tuple(start)
    if is_initial or in_place or job.tensor_size * job.context_size * job.num_stages == 1:
        if not living:
            return Declined(reason="no node is left")
        layout = job.initial(living)
    else:
        former = job.initial(processes_of(start) if base is None else base.processes)
        node_of = {process: process // size for process in {*former.ranks, *living}}
        found = choose_layout(former, living, node_of, job.limits)
        if isinstance(found, Declined):
            return found
        layout = found
    return MembershipLayout(nodes=nodes, processes=layout.ranks, spares=layout.spares, ranks_per_node=size)


def config_on(job: JobConfig, nodes: Iterable[int]) -> JobConfig | Declined:
    """Return the configuration ``job``, changed for a membership of ``nodes``; ``Declined`` if these are too few."""
    layout = JobLayouts.of(job).on(nodes)
    return layout if isinstance(layout, Declined) else config_of(job, layout.rank_nodes)


@dataclass(frozen=True, slots=True)
class _Group:
    """A complete TP·CP group, and the stage and lane whose state it has. Without state, the stage is None and
    the lane is -1."""

    ranks: Group
    stage: int | None = None
    lane: int = -1


def choose_layout(
    former: ParallelLayout, living: Collection[int], node_of: Mapping[int, int], limits: LaneLimits
) -> ParallelLayout | Declined:
    """Choose the layout with which the ``living`` processes continue.

    If there are enough hot spares, they replace the lost processes, and the layout does not change. Otherwise the
    number of lanes is the largest with enough complete groups. A group is complete if all of its members are
    living; other living processes of one node form new groups. If possible, a group keeps its stage and gets a lane
    with the same experts. Groups get lanes in the order of their former lanes, so that most optimizer state need not
    move. Processes of incomplete and surplus groups become hot spares.

    Args:
        former: the layout that committed the newest iteration.
        living: processes that continue: members of ``former``, its spares and new processes, but not leaving ones.
        node_of: node of every process, including lost processes.
    """
    # Everything below depends on sorted numbers only: each rank computes the layout by itself, and all must agree.
    alive = set(living)
    free = sorted(alive - set(former.ranks), key=lambda rank: (node_of[rank], rank))
    groups = [
        [_Group(group, stage, lane) for lane, group in enumerate(in_stage)]
        for stage, in_stage in enumerate(former.stages)
    ]
    substitutes = _substitutes(former, alive, free, node_of)
    whole = []
    for group in (group for in_stage in groups for group in in_stage):
        filled = tuple(rank if rank in alive else substitutes.get(rank, -1) for rank in group.ranks)
        if -1 not in filled:
            whole.append(replace(group, ranks=filled))
    placed = {rank for group in whole for rank in group.ranks}
    left = [rank for rank in alive if rank not in placed]
    whole += _formed(former, left, node_of)
    possible = min(limits.most, len(whole) // former.num_stages)
    # If the number of lanes were not a multiple of ``limits.multiple``, one expert-parallel group would lack experts.
    num_lanes = possible - possible % limits.multiple
    if num_lanes < max(1, limits.fewest):
        return Declined(reason=_too_few(former, len(whole), len(alive), limits))
    return _arranged(former, whole, num_lanes, limits, alive)


def _too_few(former: ParallelLayout, num_groups: int, num_alive: int, limits: LaneLimits) -> str:
    fewest = -(-max(1, limits.fewest) // limits.multiple) * limits.multiple
    return (
        f"complete groups of TP * CP = {former.group_size} ranks among {num_alive} living ranks: {num_groups}; needed: "
        f"{fewest * former.num_stages}, one for each of {former.num_stages} pipeline stages in at least {fewest} lanes"
    )


def _substitutes(
    former: ParallelLayout, alive: Collection[int], free: Sequence[int], node_of: Mapping[int, int]
) -> dict[int, int]:
    """Choose a free process to replace each lost rank, if possible a process on the same node. If there are fewer
    free processes than lost ranks, none on other nodes is used. If possible, one spare node replaces one lost node."""
    lost = sorted((rank for rank in former.ranks if rank not in alive), key=lambda rank: (node_of[rank], rank))
    by_node: dict[int, list[int]] = {}
    for rank in free:
        by_node.setdefault(node_of[rank], []).append(rank)
    found = {}
    for rank in lost:
        if by_node.get(node_of[rank]):
            found[rank] = by_node[node_of[rank]].pop(0)
    # Too few processes: the layout changes, so spare nodes form complete groups instead of filling gaps in others.
    if len(free) < len(lost):
        return found
    lost_by_node: dict[int, list[int]] = {}
    for rank in lost:
        if rank not in found:
            lost_by_node.setdefault(node_of[rank], []).append(rank)
    for ranks in lost_by_node.values():
        # One spare node replaces one lost node, so that groups within one node remain within one node.
        wide = (node for node, spares in sorted(by_node.items()) if len(spares) >= len(ranks))
        chosen = next(wide, None)
        pool = by_node[chosen] if chosen is not None else [rank for spares in by_node.values() for rank in spares]
        for rank, spare in zip(ranks, list(pool), strict=False):
            found[rank] = spare
            by_node[node_of[spare]].remove(spare)
    return found


def _formed(former: ParallelLayout, left: Iterable[int], node_of: Mapping[int, int]) -> list[_Group]:
    places = former.places()
    size = former.group_size
    per_node: dict[int, int] = {}
    for node in node_of.values():
        per_node[node] = per_node.get(node, 0) + 1
    by_node: dict[int, list[int]] = {}
    for rank in sorted(left, key=lambda rank: (node_of[rank], rank)):
        # Groups stay within one node, unless a group is larger than every node.
        by_node.setdefault(node_of[rank] if size <= max(per_node.values()) else 0, []).append(rank)
    found = []
    for ranks in by_node.values():
        by_place: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            if rank in places:
                stage, _, place = places[rank]
                by_place.setdefault((stage, place), []).append(rank)
        rest = set(ranks)
        for stage in range(former.num_stages):  # the remaining ranks of a stage form groups with its weights
            for members in zip(*(by_place.get((stage, place), []) for place in range(size)), strict=False):
                found.append(_Group(members, stage, places[members[0]][1]))
                rest -= set(members)
        blank = sorted(rest)
        found += [_Group(tuple(blank[i : i + size])) for i in range(0, len(blank) - size + 1, size)]
    return found


def _arranged(
    former: ParallelLayout, groups: Sequence[_Group], num_lanes: int, limits: LaneLimits, alive: Collection[int]
) -> ParallelLayout:
    """Assign a stage and a lane to each TP·CP group: its former stage and lane if possible, otherwise free ones."""
    stages: list[list[Group | None]] = []
    pool = [group for group in groups if group.stage is None]
    surplus: list[_Group] = []
    for stage in range(former.num_stages):
        members = sorted((g for g in groups if g.stage == stage), key=lambda group: (group.lane, group.ranks))
        lanes, left = _lanes_of(members, _Overlap(former.num_lanes, num_lanes, former.group_size, limits))
        stages.append(lanes)
        surplus += left
    pool = sorted(pool, key=lambda group: group.ranks) + surplus
    fillers = iter(pool)
    filled = tuple(tuple(next(fillers).ranks if group is None else group for group in lanes) for lanes in stages)
    placed = {rank for lanes in filled for group in lanes for rank in group}
    result = replace(former, stages=filled, spares=tuple(sorted(set(alive) - placed)))
    result.validate()
    return result


def _lanes_of(members: Sequence[_Group], overlap: "_Overlap") -> tuple[list[Group | None], list[_Group]]:
    """Assign lanes to the former TP·CP groups of a stage. Return the group of each lane, and the groups without a lane.

    Lanes whose numbers differ by a multiple of ``LaneLimits.multiple`` have the same experts. Weights of experts have
    more bytes than shards of optimizer state, so a group gets a lane with the experts that it already has, if possible.
    """
    num_lanes, period = overlap.num_lanes, overlap.limits.multiple
    lanes: list[Group | None] = [None] * num_lanes
    left: list[_Group] = []
    for offset in range(period):
        alike = [group for group in members if group.lane % period == offset]
        chosen = _in_order([group.lane for group in alike], overlap, offset)
        for place, lane in chosen.items():
            lanes[lane] = alike[place].ranks
        others = [group for place, group in enumerate(alike) if place not in chosen]
        empty = [lane for lane in range(offset, num_lanes, period) if lanes[lane] is None]
        for lane, group in zip(empty, others, strict=False):
            lanes[lane] = group.ranks
        left += others[len(empty) :]
    empty = [lane for lane in range(num_lanes) if lanes[lane] is None]
    for lane, group in zip(empty, left, strict=False):
        lanes[lane] = group.ranks
    return lanes, left[len(empty) :]


def _in_order(before: Sequence[int], overlap: "_Overlap", offset: int) -> dict[int, int]:
    """Assign new lanes to groups with the former lanes ``before``. The order of groups stays the same, and the least
    optimizer state moves. Return the new lane for each position in ``before``; groups without a new lane are left out.

    The optimizer shard of a lane is a fraction of each bucket, so lanes share state if their fractions overlap. Each
    former lane overlaps with few new lanes. The assignment with the most shared state is found in O(n log n).
    """
    num_before, num_lanes, period = overlap.num_before, overlap.num_lanes, overlap.limits.multiple
    best = _PrefixMaximum(num_lanes)
    chains: list[tuple[int, int, int]] = []  # (index in before, new lane, index of the chain before)
    for place, lane in enumerate(before):
        first = lane * num_lanes // num_before - period
        last = -(-(lane + 1) * num_lanes // num_before) + period
        found = []
        for new in range(max(0, first), min(num_lanes, last)):
            weight = overlap.weight(lane, new) if new % period == offset else 0
            if weight:
                # New lanes ascend with former lanes, so ``new`` can only follow a chain that ends below it.
                total, chain = best.below(new)
                found.append((total + weight, new, chain))
        for total, new, chain in found:  # after the loop above, because a group gets at most one lane
            chains.append((place, new, chain))
            best.raise_to(new, total, len(chains) - 1)
    chosen = {}
    _, chain = best.below(num_lanes)
    while chain >= 0:
        place, lane, chain = chains[chain]
        chosen[place] = lane
    return chosen


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Computes how much of its optimizer shards a TP·CP group keeps if it moves from a former lane to a new lane."""

    num_before: int
    num_lanes: int
    group_size: int
    limits: LaneLimits

    def weight(self, lane: int, new: int) -> int:
        """Return the bytes of state that the two lanes have in common, times a factor that is equal for all pairs."""
        dense_bytes, expert_bytes = self.limits.optimizer_bytes
        dense = _shared(lane, self.num_before, new, self.num_lanes)
        every = self.limits.num_expert_ranks
        if every is None:
            return dense
        before, after = self.num_before * self.group_size // every, self.num_lanes * self.group_size // every
        expert = 0
        for place in range(self.group_size):
            (block, part), (new_block, new_part) = (divmod(at * self.group_size + place, every) for at in (lane, new))
            expert += _shared(block, before, new_block, after) if part == new_part else 0
        # ``dense`` has the unit 1 / (num_before * num_lanes), ``expert`` 1 / (before * after * every): make them equal.
        return dense * dense_bytes * before * after * every + expert * expert_bytes * self.num_before * self.num_lanes


def _shared(part: int, num_parts: int, other: int, num_others: int) -> int:
    low, high = max(part * num_others, other * num_parts), min((part + 1) * num_others, (other + 1) * num_parts)
    return max(0, high - low)


class _PrefixMaximum:
    """Finds in O(log n) the largest value at an index below a given index. Stored values ascend with their indices."""

    def __init__(self, size: int) -> None:
        self._places: list[int] = []
        self._values: list[tuple[int, int]] = []
        self._size = size

    def below(self, place: int) -> tuple[int, int]:
        """Return the largest value that is stored below index ``place``, and the ``source`` that was stored with it;
        (0, -1) if no value is stored there."""
        found = bisect_left(self._places, place)
        return self._values[found - 1] if found else (0, -1)

    def raise_to(self, place: int, value: int, source: int) -> None:
        """Store ``value`` at index ``place`` if it is larger than all values up to this index; remove later values that
        are not larger than ``value``."""
        assert 0 <= place < self._size, f"index {place} must be from 0 to {self._size - 1}"
        at = bisect_left(self._places, place + 1)
        if at and self._values[at - 1][0] >= value:
            return
        end = at
        start = at - 1 if at and self._places[at - 1] == place else at
        while end < len(self._places) and self._values[end][0] <= value:
            end += 1
        self._places[start:end] = [place]
        self._values[start:end] = [(value, source)]
