"""Lists the parts of a model's state that every rank of a parallel layout must have.

The same function computes the needs of the next layout and the holdings of the previous one, because after a committed
iteration every rank holds exactly what its layout needs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.state.holdings import Holdings, Medium, Needs
from megatron_ft.planning.state.optimizer_shards import BufferLayout, ShardRanges
from megatron_ft.planning.state.owners import assign_owners
from megatron_ft.planning.state.parallel_layout import ParallelLayout
from megatron_ft.planning.state.tensors import Column, StateTensor, TensorIndex

WEIGHT = "weight"
"""Kind of the compute weights."""
ADAM_KINDS = (("adam", 12),)
"""Optimizer state of a mixed-precision AdamW, with its bytes per element. The tensors ``master``, ``exp_avg`` and
``exp_avg_sq`` are always on the same ranks, so they are planned as one kind, but moved as three tensors. Step counts
are not included: they are the same for all elements and belong to the host state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a model chunk."""

    name: str
    """Name of the parameter in the whole model."""
    operator: OperatorId
    num_elements: int
    """Number of elements of one tensor-parallel part."""
    is_split: bool
    """Whether tensor parallelism (for an expert: expert tensor parallelism) splits the parameter; otherwise every
    tensor-parallel rank has the whole parameter."""
    dtype: str = "bfloat16"
    """Type of the compute weight; Megatron has separate buffers for each type."""
    weight_bytes: int = 2
    is_shared_embedding: bool = False
    """Whether two stages share the parameter as their embedding; it then has a separate bucket."""


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Parameters in the model chunks of every pipeline stage, and the kinds of optimizer state of a parameter."""

    chunks: tuple[tuple[tuple[Parameter, ...], ...], ...]
    """Parameters ``[stage][chunk]`` in the order of the module; a layer lists all of its experts, not one rank's."""
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
        """List the elements that every rank of ``layout``, also a rank that is now lost, has after ``iteration``."""
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
"""Pipeline stage, chunk, whether the parameters belong to experts, and dtype of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Division of state over the ranks of a stage."""

    is_distributed: bool = True
    """Whether the distributed optimizer divides optimizer state over data-parallel ranks; otherwise every rank has the
    whole optimizer state of its parameters."""
    bucket_size: int | None = None
    """Number of elements at which a bucket of the first stage's first chunk is full. Every other chunk has one bucket,
    as in Megatron."""
    padded_for_lanes: tuple[int, ...] = ()
    """Further numbers of lanes for which buckets are padded, so that a change to such a number leaves buffers as they
    are."""
    buffers: Mapping[BufferKey, BufferLayout] | None = None
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
    """Collects the state with which ranks train (``live``) and their copies of other ranks' state (``copies``)."""

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
                f"must have PP{len(self.model.chunks)} and TP{self.model.tensor_size}, as the model",
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
        # Parameters are gathered before an iteration is complete: at its boundary every rank has the whole weights.
        self._add_whole(parameters, part, ranks, (WEIGHT,))
        if not buffers.sharding.is_distributed:
            self._add_whole(parameters, part, ranks, self._kinds)
            return
        owners = assign_owners(ranks.tolist(), domain_of, buffers.sharding.num_state_copies, spares)
        # Megatron keeps one buffer for each dtype, whose buckets are cut independently.
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
                owners = assign_owners(ranks, domain_of, sharding.num_state_copies, others)
                shards = ShardRanges.even([parameter.num_elements for parameter in parameters], len(ranks))
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

    def layout(self, parameters: Sequence[Parameter], dtype: str) -> BufferLayout:
        """Return the layout of the buffer with ``parameters``, which are in the order of the module."""
        given = (self.sharding.buffers or {}).get((*self.where, dtype))
        if given is not None:
            return given
        # Megatron divides only this buffer into buckets: communication of other chunks is not on the critical path.
        is_first = self.where[:2] == (0, 0)
        return BufferLayout.of(
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
