"""Estimates a job's snapshots before the job runs: size of the window, bytes, and host memory of every node."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.model import PrecisionConfig
from megatron_ft.config.serialize import build_policy
from megatron_ft.operators import Component, Operator, StateShard, operators_of
from megatron_ft.planning.cost.memory import BYTES_PER_VALUE, FP32_BYTES, STATE_DTYPES
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.memory import NodeMemory, PeerAssignment, check_limit, host_bytes
from megatron_ft.planning.snapshot.partial_experts import ExpertBytes, ExpertPolicy
from megatron_ft.planning.snapshot.plan import WindowPlan, batch_bytes, window_bytes_by_rank
from megatron_ft.planning.snapshot.policy import SnapshotContext, SnapshotPolicy
from megatron_ft.topology import Topology

Span = tuple[Operator, int, int]
"""An operator and elements [start, stop) of its concatenated parameters."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MIN_BUCKET = 40_000_000
_MIN_BUCKET_PER_RANK = 1_000_000
"""Smallest number of parameters per data-parallel rank in a gradient bucket of Megatron, if the gradient reduction
overlaps the backward pass. A bucket also has at least ``_MIN_BUCKET`` parameters in total."""


def estimate_demand(config: JobConfig, topology: Topology, tokenizer_vocab_size: int | None = None) -> Demand:
    """Estimate the state that each rank has to capture, with one shard for each operator of the rank.

    A shard has the id of its operator, not the names of parameters. Every parameter is counted once. With the
    distributed optimizer, a rank captures its part of each gradient bucket, in the order of Megatron's buffers; buckets
    are assumed to end where operators end. Other optimizers split operators evenly over the ranks that have them.
    Experts in replica slots are split over all ranks of the stage, and a tied embedding over the first and last stage.
    """
    operators = operators_of(config.model, tokenizer_vocab_size)
    precision = config.precision
    has_fp8_weights = precision.regime is not None and precision.fp8 is not None
    components = {is_fp8: _components(precision, is_fp8=is_fp8) for is_fp8 in (False, True)}
    shards: list[list[StateShard]] = [[] for _ in range(topology.world_size)]
    for ranks, spans in _groups(config, topology, operators):
        for rank, (operator, start, stop) in _deal(config, ranks, spans):
            # Router, embedding and output layer have no FP8 weights. Norms have none either, but are small.
            is_fp8 = has_fp8_weights and operator.id.kind in ("expert", "non_expert")
            shards[rank].append(_shard(operator, start, stop, components[is_fp8]))
    return Demand(shards_by_rank=tuple(tuple(of_rank) for of_rank in shards))


_Components = tuple[tuple[Component, ...], tuple[Component, ...]]
"""State components of an operator: those of its full state, and those of its compute weights alone."""


def _components(precision: PrecisionConfig, *, is_fp8: bool) -> _Components:
    """Return the state components of an operator. ``is_fp8`` means that the operator's weights are FP8 values."""
    formats = zip(("master", "exp_avg", "exp_avg_sq"), precision.optimizer_formats or ("fp32",) * 3, strict=True)
    full = [part for name, found in formats for part in _scaled(name, *STATE_DTYPES[found], found != "fp32")]
    step = Component(name="step", dtype="float32", item_bytes=FP32_BYTES, per_element=False)
    weight = (_DTYPES[precision.params_dtype], BYTES_PER_VALUE[precision.params_dtype])
    frozen = _scaled("weight", *(STATE_DTYPES["fp8"] if is_fp8 else weight), is_fp8)
    return (*full, step), tuple(frozen)


def _scaled(name: str, dtype: str, item_bytes: int, has_scales: bool) -> list[Component]:
    found = [Component(name=name, dtype=dtype, item_bytes=item_bytes)]
    if has_scales:
        found.append(Component(name=f"{name}_scales", dtype="uint8", item_bytes=1, per_block=True))
    return found


def _shard(operator: Operator, start: int, stop: int, components: _Components) -> StateShard:
    full, frozen = components
    return StateShard(
        operator=operator.id,
        parameter=str(operator.id),
        tensor_part=0,
        start=start,
        stop=stop,
        full=full,
        frozen=frozen,
    )


def _groups(
    config: JobConfig, topology: Topology, operators: Sequence[Operator]
) -> Iterator[tuple[Sequence[int], list[Span]]]:
    for stage in range(topology.pipeline_model_parallel_size):
        ranks = topology.stage_ranks(stage)
        for chunk in range(topology.virtual_pipeline_model_parallel_size):
            spans = _spans_of_chunk(config, topology, operators, stage, chunk)
            dense = [span for span in spans if span[0].id.expert is None]
            experts = [span for span in spans if span[0].id.expert is not None]
            # Experts and dense parameters in one buffer also share buckets, so both must be divided together.
            if _in_one_buffer(config, topology):
                dense, experts = spans, []
            size = topology.tensor_model_parallel_size
            for tp in range(size):
                yield [rank for rank in ranks if topology.coordinates(rank).tp == tp], _part(dense, tp, size)
            if config.placement.algorithm is not None:
                yield ranks, experts
            else:
                yield from _expert_groups(config, topology, ranks, experts)


def _expert_groups(
    config: JobConfig, topology: Topology, ranks: range, experts: Sequence[Span]
) -> Iterator[tuple[list[int], list[Span]]]:
    size, num_groups = topology.expert_tensor_parallel_size, topology.expert_model_parallel_size
    per_group = (config.model.num_moe_experts or 0) // num_groups
    held_by_group: list[list[Span]] = [[] for _ in range(num_groups)]
    for span in experts:
        held_by_group[(span[0].id.expert or 0) // per_group].append(span)
    for held, in_group in zip(held_by_group, topology.expert_parallel_ranks(ranks), strict=True):
        for tp in range(size):
            yield [rank for rank in in_group if (rank - ranks[0]) % size == tp], _part(held, tp, size)


def _in_one_buffer(config: JobConfig, topology: Topology) -> bool:
    same_cut = topology.expert_tensor_parallel_size == topology.tensor_model_parallel_size
    return config.placement.algorithm is None and topology.expert_model_parallel_size == 1 and same_cut


def _spans_of_chunk(
    config: JobConfig, topology: Topology, operators: Sequence[Operator], stage: int, chunk: int
) -> list[Span]:
    model = config.model
    last_stage, last_chunk = (
        topology.pipeline_model_parallel_size - 1,
        topology.virtual_pipeline_model_parallel_size - 1,
    )
    layers = set(topology.chunk_layers(model.num_layers, stage, chunk))
    is_first, is_last = (stage, chunk) == (0, 0), (stage, chunk) == (last_stage, last_chunk)
    layers |= {0} if is_first else set()
    layers |= {model.num_layers + 1} if is_last else set()
    spans = [(operator, 0, operator.num_parameters) for operator in operators if operator.id.layer in layers]
    is_tied = not model.untie_embeddings_and_output_weights and last_stage > 0
    # Both stages have the whole matrix, and ranks with the same state divide it among themselves.
    if is_tied and is_first:
        spans[0] = (operators[0], operators[0].num_split_parameters // 2, operators[0].num_parameters)
    if is_tied and is_last:
        spans.append((operators[0], 0, operators[0].num_split_parameters // 2))
    # Megatron fills buffers in the order in which a backward pass completes gradients.
    return spans[::-1]


def _part(spans: Iterable[Span], part: int, num_parts: int) -> list[Span]:
    return [
        (operator, start + (stop - start) * part // num_parts, start + (stop - start) * (part + 1) // num_parts)
        for operator, start, stop in spans
    ]


def _deal(config: JobConfig, ranks: Sequence[int], spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    if config.parallel.use_distributed_optimizer:
        bucket_size = sum(stop - start for _, start, stop in spans)
        if config.parallel.overlap_grad_reduce:
            bucket_size = min(bucket_size, max(_MIN_BUCKET, _MIN_BUCKET_PER_RANK * len(ranks)))
        buckets = _buckets(spans, bucket_size)
    else:
        buckets = ([span] for span in spans)
    for bucket in buckets:
        yield from _cut_evenly(ranks, bucket)


def _buckets(spans: Sequence[Span], bucket_size: int) -> Iterator[list[Span]]:
    bucket: list[Span] = []
    size = 0
    for operator, start, stop in spans:
        bucket.append((operator, start, stop))
        size += stop - start
        if size >= bucket_size:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _cut_evenly(ranks: Sequence[int], bucket: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    total = sum(stop - start for _, start, stop in bucket)
    # The distributed optimizer cuts a bucket without regard to operators, so a bound may be inside an operator.
    bounds = [total * place // len(ranks) for place in range(len(ranks) + 1)]
    place = position = 0
    for operator, start, stop in bucket:
        while start < stop:
            while bounds[place + 1] <= position:
                place += 1
            end = min(stop, start + bounds[place + 1] - position)
            yield ranks[place], (operator, start, end)
            position += end - start
            start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    """Estimate of a job's snapshots, which ``dry_run`` prints. The event ``snapshot_planned`` has the actual plan."""

    policy: str
    window_iterations: int | None
    """Number of iterations of a window (W). It is None if it depends on a bandwidth and an iteration time that are not
    measured. In this case ``window_bytes`` and ``nodes`` describe a dense window."""
    interval_iterations: int | None
    window_bytes: int
    """Bytes of a window on the rank where the window is largest."""
    dense_bytes: int
    """Bytes of a dense snapshot on the rank where the snapshot is largest."""
    restore_bytes: int
    """Largest device memory that a rank needs, in addition to its state, while it restores a window."""
    num_peer_copies: int
    peers: tuple[tuple[int, ...], ...]
    """Nodes that store copies of each node's windows."""
    nodes: tuple[NodeMemory, ...]
    host_memory_limit_bytes: int | None
    reason: str
    leaves_out_experts: bool = False
    """Whether a recovery from a window loses updates of experts."""
    captured_experts: int | None = None
    """Number of experts of each layer that a window captures. None if windows leave out no experts, or if bandwidth or
    iteration time is not measured."""
    captured_bytes: int | None = None
    """Largest number of bytes that a window with ``captured_experts`` experts captures on any rank; None if
    ``captured_experts`` is None."""
    stored_experts: int | None = None
    """Number of experts of each layer whose state a window's file updates, compared with the previous file. None if all
    experts of the window are written, or if no window is written during training."""
    stored_bytes: int | None = None
    """Largest number of bytes that any rank writes for a window's file; None if ``stored_experts`` is None."""
    update_loss: str = ""
    """Text that states a bound of the updates that a recovery from a window loses; empty if it loses none."""

    @property
    def host_bytes(self) -> int:
        """Largest host memory that windows and peer copies need on any node."""
        return max(node.total_bytes for node in self.nodes)

    def validate(self) -> None:
        """Check the memory limit of the configuration.

        Raises:
            ConfigError: a node needs more than ``host_memory_limit_bytes``.
        """
        check_limit(self.host_bytes, self.host_memory_limit_bytes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "host_bytes": self.host_bytes}

    @classmethod
    def of(cls, config: JobConfig, tokenizer_vocab_size: int | None) -> "SnapshotReport | None":
        """Estimate the snapshots of a job; return None if ``config`` has no snapshots.

        Raises:
            ConfigError: the policy cannot be built or cannot plan this job, or its windows exceed the memory limit.
        """
        snapshot = config.snapshot
        if snapshot.policy is None:
            return None
        topology = Topology.of(config.parallel, config.world_size)
        # The demand is estimated from parameter counts. The policy then plans with it in the same way as on the ranks.
        demand = estimate_demand(config, topology, tokenizer_vocab_size)
        policy: SnapshotPolicy = build_policy("snapshot.policy", snapshot.policy)
        dense = WindowPlan.dense(tuple(shard for shards in demand.shards_by_rank for shard in shards))
        plan, is_known = dense, False
        if snapshot.bandwidth_bytes_per_second is not None and snapshot.iteration_seconds is not None:
            context = SnapshotContext(
                bandwidth_bytes_per_second=snapshot.bandwidth_bytes_per_second,
                iteration_seconds=snapshot.iteration_seconds,
                storage_bytes_per_second=snapshot.storage_bandwidth_bytes_per_second,
                windows_per_file=snapshot.windows_per_file,
            )
            plan, is_known = policy.plan(demand, context), True
        elif isinstance(policy, ExpertPolicy):
            plan, is_known = policy.plan_unmeasured(demand), True
        update_loss = ""
        if isinstance(policy, ExpertPolicy):
            planned = None
            if snapshot.storage_bandwidth_bytes_per_second is not None:
                # The number of experts of a file may not be known yet. At least one is always written.
                planned = (plan.partial and plan.partial.num_persisted_experts) or 1
            update_loss = policy.update_loss(config.model.num_moe_experts or 0, snapshot.windows_per_file, planned)
        stored, stored_bytes = _stored(plan, demand)
        assignment = PeerAssignment.of(config.member_domains, snapshot.num_peer_copies)
        plans_again = snapshot.replan_interval_windows > 0
        dense_bytes = window_bytes_by_rank(dense, demand.shards_by_rank)
        planned_bytes = dense_bytes if plan is dense else window_bytes_by_rank(plan, demand.shards_by_rank)
        report = cls(
            policy=type(policy).__name__,
            window_iterations=plan.num_iterations if is_known else None,
            interval_iterations=plan.interval_iterations if is_known else None,
            window_bytes=max(planned_bytes),
            dense_bytes=max(dense_bytes),
            restore_bytes=_restore_bytes(topology, max(dense_bytes)),
            num_peer_copies=snapshot.num_peer_copies,
            peers=assignment.peers,
            nodes=host_bytes(planned_bytes, config.rank_places, assignment, plans_again=plans_again),
            host_memory_limit_bytes=snapshot.host_memory_limit_bytes,
            leaves_out_experts=bool(update_loss),
            captured_experts=None if plan.partial is None else plan.partial.num_experts,
            captured_bytes=None if plan.partial is None else plan.partial.captured_bytes,
            stored_experts=stored,
            stored_bytes=stored_bytes,
            update_loss=update_loss,
            reason=plan.reason if is_known else "unknown until bandwidth and iteration time are measured",
        )
        report.validate()
        return report


def _stored(plan: WindowPlan, demand: Demand) -> tuple[int | None, int | None]:
    if plan.partial is None or plan.partial.num_persisted_experts is None:
        return None, None
    state = ExpertBytes.of(demand, plan.partial.components)
    stored = min(plan.partial.num_persisted_experts, state.num_experts)
    return stored, state.most_captured(stored)


def _restore_bytes(topology: Topology, dense_bytes: int) -> int:
    # The first window after a recovery has one slice with the whole state. When a slice is restored, a rank sends its
    # part of each batch to all ranks that have the same tensors.
    num_equal = topology.data_parallel_size * topology.context_parallel_size
    return 2 * num_equal * batch_bytes(dense_bytes)
