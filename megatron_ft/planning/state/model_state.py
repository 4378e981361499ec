"""Lists the parts of a model's state that every rank of a parallel layout must have.

The same code computes the needs of the next layout and the holdings of the previous layout. This is possible because,
after a committed iteration, every rank holds exactly the elements that its layout needs.
"""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.state.holdings import Holdings, Medium, Needs
from megatron_ft.planning.state.intervals import distinct
from megatron_ft.planning.state.parallel_layout import ParallelLayout
from megatron_ft.planning.state.tensors import Column, StateTensor, TensorIndex

# A buffer contains parameters in the reverse order of the module. It consists of buckets, and every bucket is cut into
# equal parts, one for each data-parallel rank (``_ParamAndGradBuffer`` and
# ``DistributedOptimizer._build_model_gbuf_range`` of Megatron-Core 0.16.1).

# Values of Megatron: for elements of at least 16 bits, buckets begin at multiples of 256 bytes and parameters at
# multiples of 128 bytes.
BUCKET_MULTIPLE = 128
"""Alignment of bucket sizes in elements. Bucket sizes are also multiples of the number of data-parallel ranks."""
PARAMETER_MULTIPLE = 64
"""Alignment of parameters in a buffer, in elements."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ShardRanges:
    """Ranges of parameter elements that data-parallel ranks update, as columns in the order of the buffer."""

    shard: Column
    """Data-parallel rank that updates the range."""
    parameter: Column
    """Index of the parameter among the buffer's parameters, in the order of the module."""
    start: Column
    """First element of the range in the flattened parameter."""
    stop: Column

    @classmethod
    def even(cls, sizes: Sequence[int], num_shards: int) -> "_ShardRanges":
        """Cut concatenated parameters, which have ``sizes`` elements, into shards whose sizes differ by at most one."""
        stops = np.cumsum(np.array(sizes, dtype=np.int64))
        ranges = np.stack([stops - sizes, stops], axis=1) if len(sizes) else np.zeros((0, 2), dtype=np.int64)
        total = int(stops[-1]) if len(sizes) else 0
        return _cut(ranges, total * np.arange(num_shards, dtype=np.int64) // num_shards, num_shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BufferLayout:
    """Ranges of elements that the parameters and buckets of one buffer occupy.

    A running rank reads both fields from Megatron's buffer: ``ranges`` from ``param_index_map`` in the order of
    ``params``, and ``buckets`` from ``bucket_indices``.
    """

    ranges: tuple[tuple[int, int], ...]
    """Range of each parameter, in the order of the module."""
    buckets: tuple[tuple[int, int], ...]
    """Range of each bucket including its padding; a bucket begins where the previous one ends."""

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        *,
        padded_for: Sequence[int],
        bucket_size: int | None = None,
        alone: Collection[int] = (),
    ) -> "_BufferLayout":
        """Return the layout that Megatron-Core gives to a buffer of parameters.

        Args:
            sizes: number of elements of each parameter, in the order of the module.
            padded_for: data-parallel sizes that must divide every bucket size; Megatron pads only for the current size.
            bucket_size: number of elements at which a bucket is full; None for one bucket.
            alone: indices of the parameters that get a separate bucket, such as embeddings that two stages share.
        """
        # Padding for all of these sizes keeps a buffer unchanged if the number of lanes changes to one of them.
        multiple = math.lcm(*padded_for, BUCKET_MULTIPLE)
        ranges: list[tuple[int, int]] = [(0, 0)] * len(sizes)
        buckets: list[tuple[int, int]] = []
        bucket_start = stop = 0
        is_open = False

        def close(end: int) -> int:
            nonlocal bucket_start, is_open
            buckets.append((bucket_start, _padded(end, multiple)))
            bucket_start, is_open = buckets[-1][1], False
            return bucket_start

        # Reverse order, because the backward pass completes gradients of the last parameters first.
        for place in reversed(range(len(sizes))):
            start = _padded(stop, PARAMETER_MULTIPLE)
            if place in alone and is_open:
                start = close(start)
            stop = start + sizes[place]
            ranges[place], is_open = (start, stop), True
            if place in alone or (bucket_size is not None and stop - bucket_start >= bucket_size):
                stop = close(stop)
        if is_open:
            close(stop)
        return cls(ranges=tuple(ranges), buckets=tuple(buckets))

    def shards(self, num_shards: int) -> _ShardRanges:
        """Cut every bucket into equal parts for ``num_shards`` data-parallel ranks.

        Raises:
            ConfigError: the size of a bucket is not a multiple of ``num_shards``.
        """
        for start, stop in self.buckets:
            if (stop - start) % num_shards:
                raise ConfigError.of(
                    "num_shards", num_shards, f"must divide the size of every bucket; one has {stop - start} elements"
                )
        buckets = np.array(self.buckets, dtype=np.int64).reshape(-1, 2)
        steps = (buckets[:, 1] - buckets[:, 0]) // num_shards
        # Every bucket is cut separately, so that each rank has an equal part of each reduce-scatter.
        edges = (buckets[:, :1] + steps[:, None] * np.arange(num_shards)).ravel()
        return _cut(np.array(self.ranges, dtype=np.int64).reshape(-1, 2), edges, num_shards)


def _cut(ranges: Column, edges: Column, num_shards: int) -> _ShardRanges:
    """Cut the parameter ranges ``[parameters, 2]`` at ``edges``; at edge ``i``, shard ``i % num_shards`` begins."""
    places = np.argsort(ranges[:, 0], kind="stable")
    ranges = ranges[places]
    points = distinct(np.concatenate([edges, ranges.ravel()]))
    starts, stops = points[:-1], points[1:]
    parameter = np.searchsorted(ranges[:, 0], starts, side="right") - 1
    inside = (parameter >= 0) & (starts < ranges[parameter, 1])
    starts, stops, parameter = starts[inside], stops[inside], parameter[inside]
    first = ranges[parameter, 0]
    return _ShardRanges(
        shard=((np.searchsorted(edges, starts, side="right") - 1) % num_shards).astype(np.int64),
        parameter=places[parameter].astype(np.int64),
        start=starts - first,
        stop=stops - first,
    )


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _assign_owners(
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


WEIGHT = "weight"
"""Value of ``StateTensor.kind`` for compute weights."""
ADAM_KINDS = (("adam", 12),)
"""Kinds of optimizer state of a mixed-precision AdamW, with their bytes per element. The tensors ``master``,
``exp_avg`` and ``exp_avg_sq`` are always on the same ranks, so they are planned as one kind, but moved as three
tensors. Step counts are not included: they are the same for all elements and belong to the non-tensor state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a model chunk."""

    name: str
    """Name of the parameter in the whole model."""
    operator: OperatorId
    num_elements: int
    """Number of elements of one tensor-parallel part."""
    is_split: bool
    """Whether tensor parallelism (for the parameters of an expert: expert tensor parallelism) splits the parameter.
    Otherwise every tensor-parallel rank has the whole parameter."""
    dtype: str = "bfloat16"
    """Type of the compute weight; Megatron has separate buffers for each type."""
    weight_bytes: int = 2
    is_shared_embedding: bool = False
    """Whether two stages share the parameter as their embedding. A shared parameter has a separate bucket."""


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Parameters in the model chunks of every pipeline stage, and the kinds of optimizer state of a parameter."""

    chunks: tuple[tuple[tuple[Parameter, ...], ...], ...]
    """Parameters ``[stage][chunk]`` in the order of the module; layers list all experts, not only those of one rank."""
    num_experts: int
    """Number of experts per layer; 0 for a dense model."""
    tensor_size: int = 1
    expert_tensor_size: int = 1
    optimizer_kinds: tuple[tuple[str, int], ...] = ADAM_KINDS

    @cached_property
    def index(self) -> TensorIndex:
        """Index of all tensors of the model's state."""
        return TensorIndex.of(self._tensors())

    def _tensors(self) -> Iterator[StateTensor]:
        for parameter in (p for stage in self.chunks for chunk in stage for p in chunk):
            size = self.tensor_size if parameter.operator.kind != "expert" else self.expert_tensor_size
            for part in range(size if parameter.is_split else 1):
                for kind, item_bytes in ((WEIGHT, parameter.weight_bytes), *self.optimizer_kinds):
                    yield StateTensor(
                        operator=parameter.operator,
                        parameter=parameter.name,
                        tensor_part=part,
                        kind=kind,
                        num_elements=parameter.num_elements,
                        item_bytes=item_bytes,
                    )

    def holdings(
        self, layout: ParallelLayout, sharding: "Sharding", *, iteration: int, domain_of: Mapping[int, str]
    ) -> Holdings:
        """List the elements that each rank of ``layout``, including lost ranks, has after ``iteration``."""
        rows = _Rows(self, iteration)
        rows.add_layout(layout, sharding, domain_of)
        live = Holdings.of_needs(Needs.concatenate(self.index, rows.live), domain_of)
        copies = Needs.concatenate(self.index, rows.copies)
        return live.and_also(Holdings.of_needs(copies, domain_of, Medium.STATE_COPY))

    def needs(
        self,
        layout: ParallelLayout,
        sharding: "Sharding",
        *,
        iteration: int,
        domain_of: Mapping[int, str],
        has_copies: bool = True,
    ) -> Needs:
        """List the elements that every rank of ``layout`` needs so that training can continue after ``iteration``.

        Args:
            has_copies: whether to include copies of other ranks' optimizer shards; training need not wait for these.

        Raises:
            ConfigError: the layout does not match the model, the expert parallel size does not divide the ranks or
                experts, or there are fewer failure domains than ``num_state_copies``.
        """
        rows = _Rows(self, iteration)
        rows.add_layout(layout, sharding, domain_of)
        return Needs.concatenate(self.index, rows.live + (rows.copies if has_copies else []))


BufferKey = tuple[int, int, bool, str]
"""Key of a buffer: pipeline stage, chunk, whether the parameters belong to experts, and dtype of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Rules for the division of state over the ranks of a stage."""

    is_distributed: bool = True
    """Whether the distributed optimizer divides optimizer state over data-parallel ranks; otherwise every rank has the
    whole optimizer state of its parameters."""
    bucket_size: int | None = None
    """Number of elements at which a bucket of the first stage's first chunk is full. Other chunks have one bucket,
    as in Megatron."""
    padded_for_lanes: tuple[int, ...] = ()
    """Other possible lane counts (data-parallel sizes). Buckets are padded for them too, so that the layout of the
    buffers stays the same if the number of lanes changes to one of them."""
    buffers: Mapping[BufferKey, _BufferLayout] | None = None
    """Buffer layouts that were read from running ranks; the layouts of other buffers are computed."""
    expert_parallel_size: int = 1
    """Expert parallel size (EP) of Megatron, used only without ``placements``."""
    placements: tuple[PlacementPlan, ...] | None = None
    """Placement of expert replicas in the slots of each stage's ranks; None for Megatron's expert parallelism."""
    num_state_copies: int = 1
    """Number of owners of each optimizer shard, in distinct failure domains."""
    cuts_replicas: bool = True
    """Whether the optimizer state of an expert is divided over the ranks with its replicas, with ``num_state_copies``
    owners of each part; otherwise every replica has the whole optimizer state."""


class _Rows:
    """Collects the state with which ranks train (``live``) and the copies that ranks store for others (``copies``)."""

    def __init__(self, model: ModelState, iteration: int) -> None:
        self.model, self.iteration = model, iteration
        self.live: list[dict[str, Column]] = []
        self.copies: list[dict[str, Column]] = []

    def add_layout(self, layout: ParallelLayout, sharding: Sharding, domain_of: Mapping[int, str]) -> None:
        layout.validate()
        if len(self.model.chunks) != layout.num_stages or self.model.tensor_size != layout.tensor_size:
            raise ConfigError.of(
                "layout",
                layout.summary(),
                f"must have PP{len(self.model.chunks)} and TP{self.model.tensor_size}, the sizes of the model",
            )
        num_groups = layout.num_stages * layout.tensor_size
        for stage, chunks in enumerate(self.model.chunks):
            ranks = layout.stage_array(stage)
            lanes = ranks.reshape(layout.num_lanes, layout.context_size, layout.tensor_size)
            for chunk, parameters in enumerate(chunks):
                dense = [p for p in parameters if p.operator.kind != "expert"]
                experts = [p for p in parameters if p.operator.kind == "expert"]
                for part in range(layout.tensor_size):
                    # Each group uses different hot spares, so that no spare stores more copies than others.
                    spares = layout.spares[stage * layout.tensor_size + part :: num_groups]
                    sizes = {n * layout.context_size for n in (layout.num_lanes, *sharding.padded_for_lanes)}
                    buffers = _Buffers(sharding, (stage, chunk, False), sizes)
                    self._add_group(dense, part, lanes[:, :, part].ravel(), buffers, domain_of, spares)
                if sharding.placements is not None:
                    self._add_slots(experts, sharding.placements[stage], sharding, domain_of)
                elif experts:
                    self._add_expert_parallel(experts, (stage, chunk), ranks, sharding, domain_of)

    def _add_expert_parallel(
        self,
        experts: Sequence[Parameter],
        where: tuple[int, int],
        ranks: Column,
        sharding: Sharding,
        domain_of: Mapping[int, str],
    ) -> None:
        parts, size = self.model.expert_tensor_size, sharding.expert_parallel_size
        num_local, rest = divmod(self.model.num_experts, size)
        if rest or ranks.size % (parts * size):
            constraint = (
                f"must divide the number of experts ({self.model.num_experts}), and its product with the expert tensor "
                f"parallel size ({parts}) must divide the number of ranks of a stage ({ranks.size})"
            )
            raise ConfigError.of("parallel.expert_model_parallel_size", size, constraint)
        grid = ranks.reshape(-1, size, parts)
        sizes = {n * ranks.shape[1] for n in (len(ranks), *sharding.padded_for_lanes)}
        buffers = _Buffers(sharding, (*where, True), {max(1, n // (parts * size)) for n in sizes})
        for place in range(size):
            mine = [p for p in experts if (p.operator.expert or 0) // num_local == place]
            for part in range(parts):
                self._add_group(mine, part, grid[:, place, part], buffers, domain_of, ())

    def _add_group(
        self,
        parameters: Sequence[Parameter],
        part: int,
        ranks: Column,
        buffers: "_Buffers",
        domain_of: Mapping[int, str],
        spares: Sequence[int],
    ) -> None:
        # Ranks gather parameters before an iteration is complete, so they have the whole weights after the iteration.
        self._add_whole(parameters, part, ranks, (WEIGHT,))
        if not buffers.sharding.is_distributed:
            self._add_whole(parameters, part, ranks, self._kinds)
            return
        owners = _assign_owners(ranks.tolist(), domain_of, buffers.sharding.num_state_copies, spares)
        # Megatron has one buffer for each dtype, and cuts the buckets of each buffer independently.
        for dtype in sorted({parameter.dtype for parameter in parameters}):
            members = [parameter for parameter in parameters if parameter.dtype == dtype]
            shards = buffers.layout(members, dtype).shards(len(ranks))
            for kind in self._kinds:
                tensor = self._numbers(members, part, kind)[shards.parameter]
                self._add_owned(owners, shards.shard, tensor, shards.start, shards.stop)

    def _add_slots(
        self, experts: Sequence[Parameter], plan: PlacementPlan, sharding: Sharding, domain_of: Mapping[int, str]
    ) -> None:
        by_expert: dict[tuple[int, int], list[Parameter]] = {}
        for parameter in experts:
            by_expert.setdefault((parameter.operator.layer, parameter.operator.expert or 0), []).append(parameter)
        for layer, holders in _holders(plan, {layer for layer, _ in by_expert}):
            for expert, ranks in enumerate(holders):
                parameters = by_expert[layer, expert]
                members = np.array(ranks, dtype=np.int64)
                self._add_whole(parameters, 0, members, (WEIGHT,))
                if not (sharding.is_distributed and sharding.cuts_replicas):
                    self._add_whole(parameters, 0, members, self._kinds)
                    continue
                missing = sharding.num_state_copies - len({domain_of[rank] for rank in ranks})
                # A different turn for each expert spreads the copies over different ranks.
                others = _of_other_domains(ranks, plan.ranks, domain_of, missing, turn=layer + expert)
                owners = _assign_owners(ranks, domain_of, sharding.num_state_copies, others)
                shards = _ShardRanges.even([parameter.num_elements for parameter in parameters], len(ranks))
                for kind in self._kinds:
                    tensor = self._numbers(parameters, 0, kind)[shards.parameter]
                    self._add_owned(owners, shards.shard, tensor, shards.start, shards.stop)

    @property
    def _kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind, _ in self.model.optimizer_kinds)

    def _numbers(self, parameters: Sequence[Parameter], part: int, kind: str) -> Column:
        numbers = self.model.index.number_of
        return np.array([numbers[p.name, part if p.is_split else 0, kind] for p in parameters], dtype=np.int64)

    def _add_whole(self, parameters: Sequence[Parameter], part: int, ranks: Column, kinds: Iterable[str]) -> None:
        sizes = np.array([p.num_elements for p in parameters], dtype=np.int64)
        for kind in kinds:
            tensor = np.repeat(self._numbers(parameters, part, kind), len(ranks))
            stop = np.repeat(sizes, len(ranks))
            self.live.append(self._columns(np.tile(ranks, len(parameters)), tensor, np.zeros_like(stop), stop))

    def _add_owned(self, owners: Column, shard: Column, tensor: Column, start: Column, stop: Column) -> None:
        # The first owner of a shard trains with it, the other owners store a copy.
        for copy in range(owners.shape[1]):
            rows = self._columns(owners[shard, copy], tensor, start, stop)
            (self.copies if copy else self.live).append(rows)

    def _columns(self, rank: Column, tensor: Column, start: Column, stop: Column) -> dict[str, Column]:
        iteration = np.full(len(rank), self.iteration, dtype=np.int64)
        return {"rank": rank, "tensor": tensor, "start": start, "stop": stop, "iteration": iteration}


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers of one model chunk, either for its dense parameters or for its experts."""

    sharding: Sharding
    where: tuple[int, int, bool]
    sizes: set[int]
    """Data-parallel sizes for which the buffers are padded."""

    def layout(self, parameters: Sequence[Parameter], dtype: str) -> _BufferLayout:
        """Return the layout of the buffer with ``parameters``, which are in the order of the module."""
        given = (self.sharding.buffers or {}).get((*self.where, dtype))
        if given is not None:
            return given
        # Megatron divides only this buffer into buckets: communication of other chunks is not on the critical path.
        is_first = self.where[:2] == (0, 0)
        return _BufferLayout.of(
            [parameter.num_elements for parameter in parameters],
            padded_for=sorted(self.sizes),
            bucket_size=self.sharding.bucket_size if is_first else None,
            alone={place for place, parameter in enumerate(parameters) if parameter.is_shared_embedding},
        )


def _holders(plan: PlacementPlan, layers: Iterable[int]) -> Iterator[tuple[int, list[list[int]]]]:
    wanted = set(layers)
    for layer, by_rank in zip(plan.layer_numbers, plan.slots, strict=True):
        if layer in wanted:
            holders: list[list[int]] = [[] for _ in range(plan.num_experts)]
            for rank, experts in sorted(zip(plan.ranks, by_rank, strict=True)):
                for expert in set(experts):
                    holders[expert].append(rank)
            yield layer, holders


def _of_other_domains(
    holders: Sequence[int], ranks: Sequence[int], domain_of: Mapping[int, str], count: int, *, turn: int
) -> list[int]:
    # Returns one rank from each of ``count`` domains without a holder; ``turn`` selects the domains and the ranks.
    if count <= 0:
        return []
    taken = {domain_of[rank] for rank in holders}
    by_domain: dict[str, list[int]] = {}
    for rank in ranks:
        if domain_of[rank] not in taken:
            by_domain.setdefault(domain_of[rank], []).append(rank)
    names = sorted(by_domain)
    names = names[turn % len(names) :] + names[: turn % len(names)] if names else []
    return [by_domain[name][turn % len(by_domain[name])] for name in names[:count]]
