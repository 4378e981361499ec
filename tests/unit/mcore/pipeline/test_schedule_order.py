"""Compares ``planning.pipeline`` with Megatron's schedules, run for one stage at a time with named tensors."""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.planning.pipeline import Direction, Pass, PipelineShape, order, receives, sends

SHAPES = [
    PipelineShape(num_stages=pp, num_microbatches=microbatches)
    for pp, microbatches in ((1, 3), (2, 1), (2, 5), (3, 4), (4, 3), (4, 9))
] + [
    PipelineShape(num_stages=pp, num_chunks=vpp, num_microbatches=microbatches, microbatch_group_size=size)
    for pp, vpp, microbatches, size in (
        (2, 2, 2, None),
        (2, 2, 4, None),
        (2, 2, 5, 3),
        (2, 3, 6, None),
        (3, 2, 6, None),
        (3, 2, 11, 4),
        (4, 2, 4, None),
        (4, 3, 8, None),
    )
]
Name = tuple[int, int, int]
"""Stage and chunk that made a tensor, and its microbatch."""


class OneOf:
    """Replacement for a process group in which this process is ``place`` of ``size``."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self.number = place, size

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.number


class Witness(P2PCommunicator):
    """Records sent tensors, and returns the tensors that ``receives`` lists."""

    def __init__(self, shape: PipelineShape, stage: int, config: TransformerConfig) -> None:
        self.pp_group: Any = OneOf(stage, shape.num_stages)
        self.config = config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self.sent: dict[Direction, list[Name]] = {"forward": [], "backward": []}
        self.coming = {way: iter(self._names(shape, stage, way)) for way in self.sent}

    def _names(self, shape: PipelineShape, stage: int, way: Direction) -> list[Name]:
        names = []
        for microbatch, chunk in receives(shape, stage, way):
            place = shape.origin(stage, chunk, way)
            assert place is not None
            names.append((*place, microbatch))
        return names

    def _communicate(  # type: ignore[override]
        self, *, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool, **_: Any
    ) -> tuple[Any, Any, Any]:
        for way, tensor in (("forward", tensor_send_next), ("backward", tensor_send_prev)):
            if tensor is not None:
                self.sent[way].append(name_in(tensor))
        received = [
            named(next(self.coming[way])).requires_grad_() if wanted else None
            for way, wanted in (("forward", recv_prev), ("backward", recv_next))
        ]
        handles = {name: Done() for name, wanted in (("recv_prev", recv_prev), ("recv_next", recv_next)) if wanted}
        return *received, handles  # type: ignore[return-value]


class Done:
    """Request that is complete."""

    def wait(self) -> None:
        return


def named(name: Name) -> torch.Tensor:
    """Return a tensor with a name."""
    return torch.tensor([float(part) for part in name])


def name_in(tensor: torch.Tensor) -> Name:
    stage, chunk, microbatch = (int(part) for part in tensor.tolist())
    return stage, chunk, microbatch


class Chunk(torch.nn.Module):
    """Model chunk that computes only names, and records each pass with the name of its input."""

    def __init__(self, config: TransformerConfig, stage: int, chunk: int, record: list[tuple[Pass, Any]]) -> None:
        super().__init__()
        self.config, self.stage, self.chunk, self.record = config, stage, chunk, record
        self.model_type = ModelType.encoder_or_decoder
        self.start = torch.nn.Parameter(torch.zeros(3))
        self.num_forward = 0

    def set_input_tensor(self, tensors: Any) -> None:
        self.given = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self) -> torch.Tensor:
        microbatch, given = self.num_forward, self.given
        self.num_forward += 1
        self.record.append((("forward", microbatch, self.chunk), None if given is None else name_in(given)))
        return Named.apply(self.start if given is None else given, self, microbatch)


class Named(torch.autograd.Function):
    """Autograd function whose output and input gradient have the name of the pass that made them."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, chunk: Chunk, microbatch: int) -> torch.Tensor:
        ctx.chunk, ctx.microbatch = chunk, microbatch
        return named((chunk.stage, chunk.chunk, microbatch))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        chunk, microbatch = ctx.chunk, ctx.microbatch
        given = name_in(gradient) if chunk.gets_gradients else None
        chunk.record.append((("backward", microbatch, chunk.chunk), given))
        return named((chunk.stage, chunk.chunk, microbatch)), None, None


def forward_step(_: Any, chunk: Chunk) -> Any:
    return chunk(), partial(lambda output: (output.sum(), torch.tensor(0, dtype=torch.int), {}))


def run_megatron(shape: PipelineShape, stage: int) -> tuple[list[tuple[Pass, Any]], Witness]:
    """Return the passes that Megatron's schedule runs in a stage in one iteration, and the tensors that it sends."""
    interleaved = shape.num_chunks > 1
    config = TransformerConfig(
        num_layers=shape.num_stages * shape.num_chunks,
        hidden_size=1,
        num_attention_heads=1,
        pipeline_model_parallel_size=shape.num_stages,
        virtual_pipeline_model_parallel_size=shape.num_chunks if interleaved else None,
        microbatch_group_size_per_vp_stage=shape.microbatch_group_size,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
    )
    record: list[tuple[Pass, Any]] = []
    chunks = [Chunk(config, stage, number, record) for number in range(shape.num_chunks)]
    for chunk in chunks:
        chunk.gets_gradients = shape.origin(stage, chunk.chunk, "backward") is not None
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "embd", "pos_embd", "dp_cp"):
        setattr(groups, name, OneOf(0, 1))
    groups.pp = OneOf(stage, shape.num_stages)  # type: ignore[assignment]
    witness = Witness(shape, stage, config)
    schedule = get_forward_backward_func(shape.num_stages, config.virtual_pipeline_model_parallel_size)
    schedule(
        forward_step_func=forward_step,
        data_iterator=[None] * shape.num_chunks,
        model=chunks,
        num_microbatches=shape.num_microbatches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=witness,
        pg_collection=groups,
    )
    return record, witness


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_megatron_computes_and_sends_in_this_order(shape: PipelineShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for stage in range(shape.num_stages):
        record, witness = run_megatron(shape, stage)
        assert [computed for computed, _ in record] == list(order(shape, stage))
        for (way, microbatch, chunk), given in record:
            place = shape.origin(stage, chunk, way)
            assert given == (None if place is None else (*place, microbatch)), "computed from another tensor"
        for way, sent in witness.sent.items():
            expected = [(stage, chunk, microbatch) for microbatch, chunk in sends(shape, stage, way)]
            assert sent == expected and next(witness.coming[way], None) is None


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.num_chunks > 1], ids=str)
def test_the_table_is_megatrons(shape: PipelineShape) -> None:
    table = schedules.get_schedule_table(shape.num_microbatches, shape.num_chunks, shape.group_size)
    for stage in range(shape.num_stages):
        forward = [(microbatch, chunk) for way, microbatch, chunk in order(shape, stage) if way == "forward"]
        assert forward == table
