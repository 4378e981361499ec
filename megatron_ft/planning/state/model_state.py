"""The state of a model, and the part of it that every rank of a parallel layout must have.

The same function gives the needs of the next layout and the holdings of the former one: holdings are the needs of the
layout that has just committed an iteration.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.state.holdings import Holdings, Medium, Needs
from megatron_ft.planning.state.optimizer_shards import BufferLayout, cut_evenly
from megatron_ft.planning.state.owners import assign_owners
from megatron_ft.planning.state.parallel_layout import ParallelLayout
from megatron_ft.planning.state.tensors import Column, StateTensor, TensorIndex

WEIGHT = "weight"
"""Kind of the compute weights."""
ADAM_KINDS = (("adam", 12),)
"""State that a mixed-precision AdamW updates, with its bytes per element: ``master``, ``exp_avg`` and ``exp_avg_sq``.
All three are in the same place on every rank, so they are planned as one kind and moved as three tensors. Step counts
are the same for all elements and belong to the host state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a model chunk."""

    name: str
    """Global name."""
    operator: OperatorId
    num_elements: int
    """Elements of one tensor-parallel part."""
    is_split: bool
    """Whether tensor parallelism (that of experts, for experts) splits it; otherwise every part is the whole
    parameter."""
    dtype: str = "bfloat16"
    """Type of the compute weight; each type has separate buffers."""
    weight_bytes: int = 2
    is_shared_embedding: bool = False
    """Whether two stages hold it; it then has a separate bucket."""


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Parameters of every stage's chunks, and the kinds of state that an optimizer adds to them."""

    chunks: tuple[tuple[tuple[Parameter, ...], ...], ...]
    """``[stage][chunk]``: parameters in the order of the module, with all experts of a layer."""
    num_experts: int
    """Per layer; 0 for a dense model."""
    tensor_size: int = 1
    expert_tensor_size: int = 1
    optimizer_kinds: tuple[tuple[str, int], ...] = ADAM_KINDS

    @cached_property
    def index(self) -> TensorIndex:
        """Every tensor of the model."""
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


BufferKey = tuple[int, int, bool, str]
"""Stage, chunk, whether the parameters belong to experts, dtype of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Division of state over the ranks of a stage."""

    is_distributed: bool = True
    """Whether the distributed optimizer cuts optimizer state over data-parallel ranks; otherwise every rank has all of
    it."""
    bucket_size: int | None = None
    """Elements of a bucket in the first chunk of the first stage; all others have one bucket, as in Megatron."""
    padded_for_lanes: tuple[int, ...] = ()
    """Further numbers of lanes for which buckets can be cut; buffers then do not change with the number of lanes."""
    buffers: Mapping[BufferKey, BufferLayout] | None = None
    """Layouts read from living buffers; missing ones are computed."""
    expert_parallel_size: int = 1
    """Megatron's EP, if there are no ``placements``."""
    placements: tuple[PlacementPlan, ...] | None = None
    """Placement of each stage over its ranks: experts in slots, with replicas."""
    num_state_copies: int = 1
    """Owners of every optimizer shard, on distinct failure domains."""
    cuts_replicas: bool = True
    """Whether the replicas of an expert share its optimizer state, with ``num_state_copies`` owners of each part;
    otherwise each has all of it."""


def state_needs(
    model: ModelState,
    layout: ParallelLayout,
    sharding: Sharding,
    *,
    iteration: int,
    domain_of: Mapping[int, str],
    has_copies: bool = True,
) -> Needs:
    """List the needs of every rank of ``layout`` to train after ``iteration``.

    Args:
        has_copies: include the copies that ranks keep for others; training need not wait for those.

    Raises:
        ConfigError: sizes that do not divide each other, or fewer failure domains than copies.
    """
    rows = _Rows(model, iteration)
    rows.add_layout(layout, sharding, domain_of)
    return Needs.concatenate(model.index, rows.live + (rows.copies if has_copies else []))


def state_holdings(
    model: ModelState, layout: ParallelLayout, sharding: Sharding, *, iteration: int, domain_of: Mapping[int, str]
) -> Holdings:
    """List the holdings of every rank of ``layout`` after it has committed ``iteration``, lost ranks included."""
    rows = _Rows(model, iteration)
    rows.add_layout(layout, sharding, domain_of)
    live = Holdings.of_needs(Needs.concatenate(model.index, rows.live), domain_of)
    copies = Needs.concatenate(model.index, rows.copies)
    return live.and_also(Holdings.of_needs(copies, domain_of, Medium.STATE_COPY))


class _Rows:
    """Columns under construction: state with which ranks train, and copies of others' optimizer state."""

    def __init__(self, model: ModelState, iteration: int) -> None:
        self.model, self.iteration = model, iteration
        self.live: list[dict[str, Column]] = []
        self.copies: list[dict[str, Column]] = []

    def add_layout(self, layout: ParallelLayout, sharding: Sharding, domain_of: Mapping[int, str]) -> None:
        layout.validate()
        if len(self.model.chunks) != layout.num_stages or self.model.tensor_size != layout.tensor_size:
            raise ConfigError.of(
                "layout", layout.summary(), "must have as many stages and the same TP degree as the model"
            )
        num_groups = layout.num_stages * layout.tensor_size
        for stage, chunks in enumerate(self.model.chunks):
            ranks = layout.stage_array(stage)
            lanes = ranks.reshape(layout.num_lanes, layout.context_size, layout.tensor_size)
            for chunk, parameters in enumerate(chunks):
                dense = [p for p in parameters if p.operator.kind != "expert"]
                experts = [p for p in parameters if p.operator.kind == "expert"]
                for part in range(layout.tensor_size):
                    # Every group has hot spares of its own, so that none keeps more than others.
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
                f"must divide {self.model.num_experts} experts; {parts} times it must divide the {ranks.size} "
                "ranks of a stage"
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
                # The turn spreads the copies of different experts over different ranks.
                others = _of_other_domains(ranks, plan.ranks, domain_of, missing, turn=layer + expert)
                owners = assign_owners(ranks, domain_of, sharding.num_state_copies, others)
                shards = cut_evenly([parameter.num_elements for parameter in parameters], len(ranks))
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
        # Rows of every shard for its owners: the first trains with it, the others keep a copy.
        for copy in range(owners.shape[1]):
            rows = self._columns(owners[shard, copy], tensor, start, stop)
            (self.copies if copy else self.live).append(rows)

    def _columns(self, rank: Column, tensor: Column, start: Column, stop: Column) -> dict[str, Column]:
        iteration = np.full(len(rank), self.iteration, dtype=np.int64)
        return {"rank": rank, "tensor": tensor, "start": start, "stop": stop, "iteration": iteration}


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers of one stage's chunk, of dense parameters or of experts."""

    sharding: Sharding
    where: tuple[int, int, bool]
    sizes: set[int]
    """Data-parallel sizes for which the buffers are padded."""

    def layout(self, parameters: Sequence[Parameter], dtype: str) -> BufferLayout:
        """Return the layout of the buffer of ``parameters``, in the order of the module."""
        given = (self.sharding.buffers or {}).get((*self.where, dtype))
        if given is not None:
            return given
        # Megatron cuts only here: communication of other stages and chunks is not on the critical path.
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
    # One rank of each of ``count`` domains without a holder; which ones moves with ``turn``.
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
