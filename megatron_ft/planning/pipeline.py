"""Megatron's 1F1B pipeline schedules as sequences: the order in which stages compute, send and receive.

A *chunk* is a group of adjacent layers on a stage. Without interleaving, a stage has one chunk. Chunks, microbatches
and stages are numbered from 0. Sources: ``megatron.core.pipeline_parallel.schedules`` of Megatron-Core 0.16.1;
Narayanan et al., 2021, section 2.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron_ft.errors import ConfigError

Direction = Literal["forward", "backward"]
"""``forward``: activations are sent to the next stage. ``backward``: gradients are sent to the previous stage."""
Pass = tuple[Direction, int, int]
"""Direction, microbatch and chunk of one pass of a stage."""
_MICROBATCHES = "microbatches per rank (training.global_batch_size)"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LogKey:
    """Key of a tensor in the upstream log, in which a rank keeps the tensors that it sent to other stages."""

    iteration: int
    """Iteration, from 1."""
    microbatch: int
    chunk: int
    """Chunk (group of layers) of the sending stage."""
    direction: Direction
    generation: int
    """Generation (index of the membership) in which the tensor was last sent. Later memberships may use the tensor if
    its iteration is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """Sizes that determine the order of a pipeline's passes."""

    num_stages: int
    num_microbatches: int
    """Number of microbatches per data-parallel rank and iteration, including padding."""
    num_chunks: int = 1
    """Number of chunks per stage (VPP); the schedule is interleaved if there are several."""
    microbatch_group_size: int | None = None
    """Number of microbatches that a stage runs through a chunk before the next chunk, if the schedule is interleaved
    (``microbatch_group_size_per_vp_stage`` in Megatron); None for Megatron's default, the number of stages."""

    @property
    def group_size(self) -> int:
        """Value of ``microbatch_group_size``, or the number of stages if that is None."""
        return self.num_stages if self.microbatch_group_size is None else self.microbatch_group_size

    def validate(self) -> None:
        """Check the requirements of Megatron's schedules.

        Raises:
            ConfigError: a size is below 1, a single stage has several chunks, or the last group of microbatches is too
                small.
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
            raise ConfigError.of(key, self.num_chunks, "must be null with parallel.pipeline_model_parallel_size=1")
        remainder = self.num_microbatches % self.group_size
        fits = self.num_stages <= self.group_size <= self.num_microbatches
        if not fits or 0 < remainder < self.num_stages:
            raise ConfigError.of(
                _MICROBATCHES,
                self.num_microbatches,
                f"must consist of one or more groups of {self.group_size} microbatches. One smaller group may follow, "
                f"but every group needs at least {self.num_stages} microbatches (the number of stages)",
            )

    def origin(self, stage: int, chunk: int, direction: Direction) -> tuple[int, int] | None:
        """Return the stage and chunk that send the input of a pass; None if the input is a sample or the loss."""
        return self.destination(stage, chunk, "backward" if direction == "forward" else "forward")

    def destination(self, stage: int, chunk: int, direction: Direction) -> tuple[int, int] | None:
        """Return the stage and chunk that receive the output of a pass of ``chunk`` on ``stage``.

        Return None for the forward output of the model's last chunk and the backward output of its first chunk. The
        last stage sends forward to the next chunk of the first stage.
        """
        step = 1 if direction == "forward" else -1
        place = chunk * self.num_stages + stage + step
        if not 0 <= place < self.num_stages * self.num_chunks:
            return None
        chunk, stage = divmod(place, self.num_stages)
        return stage, chunk


@cache
def order(shape: PipelineShape, stage: int) -> tuple[Pass, ...]:
    """Return an iteration's passes in the order in which a stage computes them: warm-up, steady state, cool-down."""
    shape.validate()
    assert 0 <= stage < shape.num_stages, f"stage {stage} is not in a pipeline of {shape.num_stages} stages"
    forward, backward = _forward_passes(shape), _backward_passes(shape)
    num_warmup = min(_num_warmup_passes(shape, stage), len(forward))
    # In the steady state, one forward and one backward pass alternate. The remaining backward passes are the cool-down.
    steady = zip(forward[num_warmup:], backward, strict=False)
    return (
        *forward[:num_warmup],
        *(computed for pair in steady for computed in pair),
        *backward[len(forward) - num_warmup :],
    )


@cache
def sends(shape: PipelineShape, stage: int, direction: Direction) -> tuple[tuple[int, int], ...]:
    """Return (microbatch, chunk) of each tensor that a stage sends in one iteration and direction, in order.

    The last chunk of the model sends nothing forward, and the first chunk sends nothing backward. With interleaving,
    the last stage sends activations to the first, which sends gradients back. One stage alone sends nothing.
    """
    return tuple(
        (microbatch, chunk)
        for computed, microbatch, chunk in order(shape, stage)
        if computed == direction and shape.destination(stage, chunk, direction) is not None
    )


@cache
def receives(shape: PipelineShape, stage: int, direction: Direction) -> tuple[tuple[int, int], ...]:
    """Return (microbatch, chunk) of each tensor that a stage receives in one iteration and direction, in order.

    The chunk is a chunk of the receiving stage. The stage uses the tensors in the order in which it receives them.
    """
    neighbour = (stage - 1 if direction == "forward" else stage + 1) % shape.num_stages
    received = []
    for microbatch, chunk in sends(shape, neighbour, direction):
        target = shape.destination(neighbour, chunk, direction)
        assert target is not None and target[0] == stage, (
            f"stage {neighbour} sends to {target} instead of stage {stage}"
        )
        received.append((microbatch, target[1]))
    return tuple(received)


def _forward_passes(shape: PipelineShape) -> list[Pass]:
    return [("forward", microbatch, chunk) for microbatch, chunk in _table(shape)]


def _backward_passes(shape: PipelineShape) -> list[Pass]:
    return [("backward", microbatch, shape.num_chunks - 1 - chunk) for microbatch, chunk in _table(shape)]


def _table(shape: PipelineShape) -> Iterator[tuple[int, int]]:
    # The last group of microbatches may be smaller, as in Megatron's table of microbatches and chunks.
    size, total = shape.group_size, shape.num_microbatches
    for first in range(0, total, size):
        for chunk in range(shape.num_chunks):
            for microbatch in range(first, min(first + size, total)):
                yield microbatch, chunk


def _num_warmup_passes(shape: PipelineShape, stage: int) -> int:
    behind = shape.num_stages - stage - 1
    # Formulas of Megatron's ``get_pp_rank_microbatches``: with another order, a replay would get wrong logged tensors.
    if shape.num_chunks == 1:
        return behind
    return 2 * behind + (shape.num_chunks - 1) * shape.group_size
