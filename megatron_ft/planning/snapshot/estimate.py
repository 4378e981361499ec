"""Estimate of a ``Demand`` from a configuration, by parameter counts, before there is a model."""

from collections.abc import Iterable, Iterator, Sequence

from megatron_ft.config.job import JobConfig
from megatron_ft.operator_state import Component, StateShard
from megatron_ft.operators import Operator, operators_of
from megatron_ft.planning.cost.memory import BYTES_PER_VALUE, FP32_BYTES
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.topology import Topology

Span = tuple[Operator, int, int]
"""Elements [start, stop) of the concatenated parameters of an operator."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MIN_BUCKET = 40_000_000
_MIN_BUCKET_PER_RANK = 1_000_000
"""Smallest size of Megatron's gradient buckets, in parameters, where reduction overlaps the backward pass."""


def estimate_demand(config: JobConfig, topology: Topology, tokenizer_vocab_size: int | None = None) -> Demand:
    """Estimate one shard for every operator and rank that captures a part of it; the operator's name is its parameter.

    Every parameter is counted once. With the distributed optimizer a rank captures its part of each gradient bucket, in
    the order of Megatron's buffers; buckets are assumed to end with operators, not with parameters. Otherwise operators
    are split evenly over the ranks that hold them, and experts with replica slots over all ranks of the stage. A tied
    embedding is split over the first and the last stage.
    """
    operators = operators_of(config.model, tokenizer_vocab_size)
    components = _components(config.precision.params_dtype)
    shards: list[list[StateShard]] = [[] for _ in range(topology.world_size)]
    for ranks, spans in _groups(config, topology, operators):
        for rank, (operator, start, stop) in _deal(config, ranks, spans):
            shards[rank].append(_shard(operator, start, stop, components))
    return Demand(shards_by_rank=tuple(tuple(of_rank) for of_rank in shards))


def _components(params_dtype: str) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    names = ("master", "exp_avg", "exp_avg_sq")
    full = tuple(Component(name=name, dtype="float32", item_bytes=FP32_BYTES) for name in names)
    step = Component(name="step", dtype="float32", item_bytes=FP32_BYTES, per_element=False)
    weight = Component(name="weight", dtype=_DTYPES[params_dtype], item_bytes=BYTES_PER_VALUE[params_dtype])
    return (*full, step), (weight,)


def _shard(
    operator: Operator, start: int, stop: int, components: tuple[tuple[Component, ...], tuple[Component, ...]]
) -> StateShard:
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
            # Buckets are cut at other places where experts and dense parameters share a buffer.
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
    for ep in range(num_groups):
        held = [span for span in experts if (span[0].id.expert or 0) // per_group == ep]
        in_group = [rank for rank in ranks if topology.coordinates(rank).ep == ep]
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
    # Both stages hold the whole matrix, and state that several ranks hold is divided among them.
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
    # Bounds may lie inside operators, as those of the distributed optimizer do.
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
