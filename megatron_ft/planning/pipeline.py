"""Who sends what to whom in a pipeline, in which order: Megatron's 1F1B schedules as sequences, without running them.

A *chunk* is one of the parts of the model that a stage holds (one without interleaving), counted from 0. Microbatches
and stages count from 0 too. Source: ``megatron.core.pipeline_parallel.schedules`` of Megatron-Core 0.16.1; Narayanan
et al., 2021, section 2.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron_ft.errors import ConfigError

Direction = Literal["forward", "backward"]
"""``forward``: activations, to the next stage. ``backward``: their gradients, to the previous one."""
Pass = tuple[Direction, int, int]
"""Direction, microbatch and chunk of what a stage computes at once."""
_MICROBATCHES = "microbatches per rank (training.global_batch_size)"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LogKey:
    """Names one boundary tensor that a stage sent, on the rank that sent it."""

    iteration: int
    """The iteration that computed it, counted from 1."""
    microbatch: int
    chunk: int
    """The sender's chunk."""
    direction: Direction
    generation: int
    """The membership in which it was sent last; another one may ask for it as long as the iteration is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """All that the order of a pipeline's passes depends on."""

    num_stages: int
    num_microbatches: int
    """Of one data-parallel rank and iteration, padding included."""
    num_chunks: int = 1
    """Chunks per stage (VPP); more than one interleaves."""
    microbatch_group_size: int | None = None
    """Microbatches that run through a chunk before the next chunk's turn, with interleaving
    (Megatron's ``microbatch_group_size_per_vp_stage``); None for the number of stages, its default."""

    @property
    def group_size(self) -> int:
        """``microbatch_group_size``, with its default filled in."""
        return self.num_stages if self.microbatch_group_size is None else self.microbatch_group_size

    def validate(self) -> None:
        """What Megatron's schedules demand.

        Raises:
            ConfigError: a size below 1, chunks without stages, or groups that leave dependency bubbles.
        """
        for key, value in (
            ("parallel.pipeline_model_parallel_size", self.num_stages),
            ("parallel.virtual_pipeline_model_parallel_size", self.num_chunks),
            (_MICROBATCHES, self.num_microbatches),
        ):
            if value < 1:
                raise ConfigError.of(key, value, "must be at least 1")
        if self.num_chunks > 1:
            self._validate_interleaving()

    def _validate_interleaving(self) -> None:
        if self.num_stages == 1:
            key = "parallel.virtual_pipeline_model_parallel_size"
            raise ConfigError.of(key, self.num_chunks, "needs parallel.pipeline_model_parallel_size of 2 or more")
        remainder = self.num_microbatches % self.group_size
        fits = self.num_stages <= self.group_size <= self.num_microbatches
        if not fits or 0 < remainder < self.num_stages:
            raise ConfigError.of(
                _MICROBATCHES,
                self.num_microbatches,
                f"must be groups of {self.group_size}, at least one and none (the last one included) smaller than "
                f"the {self.num_stages} stages",
            )


def destination(shape: PipelineShape, stage: int, chunk: int, direction: Direction) -> tuple[int, int] | None:
    """Stage and chunk that receive what a stage's chunk computes; None at the end of the model (its start, backward).

    The last stage's chunk is followed by the next chunk of the first stage.
    """
    step = 1 if direction == "forward" else -1
    place = chunk * shape.num_stages + stage + step
    if not 0 <= place < shape.num_stages * shape.num_chunks:
        return None
    chunk, stage = divmod(place, shape.num_stages)
    return stage, chunk


def origin(shape: PipelineShape, stage: int, chunk: int, direction: Direction) -> tuple[int, int] | None:
    """Stage and chunk that send what a stage's chunk computes from; None where it reads samples or labels."""
    return destination(shape, stage, chunk, "backward" if direction == "forward" else "forward")


@cache
def order(shape: PipelineShape, stage: int) -> tuple[Pass, ...]:
    """Every pass of one iteration in the order in which a stage computes them: warm-up, steady state, cool-down."""
    shape.validate()
    assert 0 <= stage < shape.num_stages, f"stage {stage} is outside a pipeline of {shape.num_stages}"
    forward, backward = _forward_passes(shape), _backward_passes(shape)
    num_warmup = min(_num_warmup_passes(shape, stage), len(forward))
    steady = zip(forward[num_warmup:], backward, strict=False)
    return (
        *forward[:num_warmup],
        *(computed for pair in steady for computed in pair),
        *backward[len(forward) - num_warmup :],
    )


@cache
def sends(shape: PipelineShape, stage: int, direction: Direction) -> tuple[tuple[int, int], ...]:
    """(microbatch, own chunk) of each tensor a stage sends in one iteration in one direction, in the order of sending.

    Forward, all but the last stage's last chunk send; backward, all but the first stage's first. The last stage sends
    forward to the first one (and the first backward to the last) where chunks are interleaved. A pipeline of one
    stage sends nothing.
    """
    return tuple(
        (microbatch, chunk)
        for computed, microbatch, chunk in order(shape, stage)
        if computed == direction and destination(shape, stage, chunk, direction) is not None
    )


@cache
def receives(shape: PipelineShape, stage: int, direction: Direction) -> tuple[tuple[int, int], ...]:
    """(microbatch, own chunk) of each tensor a stage receives in one iteration in one direction, in that order.

    What its neighbour sends, named by the chunk that computes from it. It is the order of computing too.
    """
    neighbour = (stage - 1 if direction == "forward" else stage + 1) % shape.num_stages
    received = []
    for microbatch, chunk in sends(shape, neighbour, direction):
        target = destination(shape, neighbour, chunk, direction)
        assert target is not None and target[0] == stage, f"stage {neighbour} sends to {target}, not to stage {stage}"
        received.append((microbatch, target[1]))
    return tuple(received)


def _forward_passes(shape: PipelineShape) -> list[Pass]:
    """Groups of microbatches in turn, each through all chunks: Megatron's schedule table."""
    return [("forward", microbatch, chunk) for microbatch, chunk in _table(shape)]


def _backward_passes(shape: PipelineShape) -> list[Pass]:
    """The same with the last chunk first."""
    return [("backward", microbatch, shape.num_chunks - 1 - chunk) for microbatch, chunk in _table(shape)]


def _table(shape: PipelineShape) -> Iterator[tuple[int, int]]:
    size, total = shape.group_size, shape.num_microbatches
    for first in range(0, total, size):
        for chunk in range(shape.num_chunks):
            for microbatch in range(first, min(first + size, total)):
                yield microbatch, chunk


def _num_warmup_passes(shape: PipelineShape, stage: int) -> int:
    """Forward passes before the first backward one is due."""
    behind = shape.num_stages - stage - 1
    if shape.num_chunks == 1:
        return behind
    return 2 * behind + (shape.num_chunks - 1) * shape.group_size
