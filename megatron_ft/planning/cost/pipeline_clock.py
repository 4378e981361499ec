"""Computes the duration of a pipeline's iteration by simulation. Each stage has one device.

A stage runs its passes in the order of ``planning.pipeline.order``. A pass starts as soon as the stage is free and the
input has arrived. If only some stages replay, they read the tensors of other stages from logs, and do not wait for
these stages. If all stages replay, the pipeline fills and drains as in training (MoEvement, 3.4, figure 9).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from megatron_ft.planning.pipeline import Direction, Pass, PipelineShape, order, receives

Place = tuple[int, int]
"""Pipeline stage, and chunk (group of adjacent layers on the stage), in which a pass runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Time of the forward and backward pass of one microbatch in one chunk (group of layers) of a stage."""

    forward_seconds: float
    backward_seconds: float
    """Time of the backward pass, without weight gradients if a replay does not compute them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Compute times of one pipeline stage."""

    chunks: tuple[PassSeconds, ...]
    update_seconds: float = 0.0
    """Time of the gradient reduction and the optimizer step that follow the last pass of an iteration."""

    def busy_seconds(self, num_microbatches: int) -> float:
        """Return the compute time of the stage in an iteration with ``num_microbatches`` microbatches."""
        passes = sum(chunk.forward_seconds + chunk.backward_seconds for chunk in self.chunks)
        return num_microbatches * passes + self.update_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSeconds:
    """Simulated times of one iteration. In a replay, only some stages run the iteration."""

    makespan_seconds: float
    """Time from the start of the iteration until the last stage has updated its weights."""
    busy_seconds: float
    """Compute time of the iteration, summed over the stages that run it."""
    num_executions: int
    """Number of microbatches times number of stages that run them. The forward and backward passes of a microbatch
    through all chunks of a stage count as one execution."""

    def __add__(self, other: "IterationSeconds") -> "IterationSeconds":
        # Stages synchronize at the end of each replayed iteration, so iterations do not overlap.
        return IterationSeconds(
            makespan_seconds=self.makespan_seconds + other.makespan_seconds,
            busy_seconds=self.busy_seconds + other.busy_seconds,
            num_executions=self.num_executions + other.num_executions,
        )

    @classmethod
    def of(
        cls,
        shape: PipelineShape,
        stages: Sequence[StageSeconds],
        *,
        replayed: Collection[int] | None = None,
        send_seconds: float = 0.0,
    ) -> "IterationSeconds":
        """Simulate one iteration of the stages ``replayed``. None simulates all stages, as in training.

        Args:
            stages: times of every stage of the pipeline.
            replayed: stages that run. They send tensors to each other. Tensors of other stages come from logs; the
                tensors of a log arrive one after another, beginning at the start of the iteration.
            send_seconds: time from the end of a pass until its tensor arrives, and time between two tensors of a log.
        """
        own = sorted(range(shape.num_stages) if replayed is None else set(replayed))
        assert own and own[0] >= 0 and own[-1] < shape.num_stages, (
            f"replayed={own}: must be from 0 to {shape.num_stages - 1}"
        )
        assert len(stages) == shape.num_stages, (
            f"{len(stages)} stages have times, but the pipeline has {shape.num_stages} stages"
        )
        for seconds in stages:
            assert len(seconds.chunks) == shape.num_chunks, (
                f"{len(seconds.chunks)} chunks have times, but a stage has {shape.num_chunks} chunks"
            )
        run = _Run(shape, stages, frozenset(own), send_seconds)
        ends = run.to_the_end()
        return cls(
            makespan_seconds=max(ends[stage] + stages[stage].update_seconds for stage in own),
            busy_seconds=sum(stages[stage].busy_seconds(shape.num_microbatches) for stage in own),
            num_executions=len(own) * shape.num_microbatches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCopy:
    """Copy of a snapshot slice by one thread of a stage during an iteration. The copy and the stage's computation share
    one core. While the stage computes, the copy gets half of the core."""

    seconds: float
    """Duration of the copy if nothing else runs."""
    at_once_seconds: float
    """Part of ``seconds`` for bytes that are copied first, even while the stage computes. All other bytes are copied
    while the stage waits for a message or after its last message (``snapshot.copy_in_bubbles``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedIteration:
    """Simulated times of an iteration during which every stage copies a snapshot slice."""

    makespan_seconds: float
    """Time from the start of the iteration until the last stage has updated its weights. A stage finishes the
    copy of its slice before it updates its weights."""
    idle_copy_seconds: tuple[float, ...]
    """Seconds of each stage's copy that ran while the stage waited for messages."""
    late_copy_seconds: tuple[float, ...]
    """Seconds of each stage's copy that were left after the last pass of the stage."""

    @classmethod
    def of(
        cls,
        shape: PipelineShape,
        stages: Sequence[StageSeconds],
        copies: Sequence[StageCopy],
        *,
        send_seconds: float = 0.0,
    ) -> "CopiedIteration":
        """Simulate one training iteration.

        Args:
            stages: times of every stage of the pipeline.
            copies: copy of a snapshot slice by each stage.
            send_seconds: time from the end of a pass until its tensor arrives.
        """
        assert len(copies) == shape.num_stages, f"{len(copies)} copies for a pipeline of {shape.num_stages} stages"
        run = _Run(shape, stages, frozenset(range(shape.num_stages)), send_seconds, copies)
        ends = run.to_the_end()
        late = run.copy_seconds
        return cls(
            makespan_seconds=max(ends[stage] + late[stage] + stages[stage].update_seconds for stage in ends),
            idle_copy_seconds=tuple(run.idle_copy_seconds),
            late_copy_seconds=tuple(late),
        )


Wait = tuple[float, float]
"""Start and end of a stage's wait for a message, in seconds since the start of the iteration."""


def receive_waits(
    shape: PipelineShape, stages: Sequence[StageSeconds], *, send_seconds: float = 0.0
) -> tuple[tuple[Wait, ...], ...]:
    """Simulate one training iteration. Return, for each stage, the intervals in which it waits for a message.

    The time after the last pass of a stage is not part of the result, because the stage then receives no message.

    Args:
        stages: times of every stage of the pipeline.
        send_seconds: time from the end of a pass until its tensor arrives.
    """
    run = _Run(shape, stages, frozenset(range(shape.num_stages)), send_seconds)
    run.to_the_end()
    return tuple(tuple(run.waits[stage]) for stage in range(shape.num_stages))


class _Run:
    def __init__(
        self,
        shape: PipelineShape,
        stages: Sequence[StageSeconds],
        own: frozenset[int],
        send_seconds: float,
        copies: Sequence[StageCopy] = (),
    ) -> None:
        self._shape, self._stages, self._own, self._send_seconds = shape, stages, own, send_seconds
        self._sent: dict[tuple[Direction, int, Place], float] = {}
        """Arrival time of the output of each pass."""
        self.waits: dict[int, list[Wait]] = {stage: [] for stage in own}
        """Intervals in which each stage waits for the input of a pass."""
        self.copy_seconds = [copy.seconds for copy in copies]
        """Seconds of each stage's copy that have not run yet."""
        self.idle_copy_seconds = [0.0 for _ in copies]
        self._at_once = [copy.at_once_seconds for copy in copies]
        self._last_received = [self._last_received_pass(stage) for stage, _ in enumerate(copies)]
        self._logged = dict(self._log())

    def to_the_end(self) -> dict[int, float]:
        """Simulate all passes and return the end time of each stage."""
        waiting = {stage: list(reversed(order(self._shape, stage))) for stage in self._own}
        free = dict.fromkeys(self._own, 0.0)
        while any(waiting.values()):
            before = sum(map(len, waiting.values()))
            for stage, passes in waiting.items():
                while passes and (there := self._arrival(stage, passes[-1])) is not None:
                    if there > free[stage]:
                        self.waits[stage].append((free[stage], there))
                        self._copy_while_idle(stage, there - free[stage])
                    free[stage] = self._compute(stage, passes.pop(), max(free[stage], there))
            # If no pass runs in a round, stages wait for each other: Megatron could not run this order of passes.
            assert sum(map(len, waiting.values())) < before, (
                f"stages {sorted(self._own)} wait for each other in a cycle"
            )
        return free

    def _compute(self, stage: int, one: Pass, start: float) -> float:
        direction, microbatch, chunk = one
        seconds = self._stages[stage].chunks[chunk]
        took = seconds.forward_seconds if direction == "forward" else seconds.backward_seconds
        end = start + took + self._copy_while_busy(stage, one, took)
        self._sent[direction, microbatch, (stage, chunk)] = end + self._send_seconds
        return end

    def _copy_while_idle(self, stage: int, seconds: float) -> None:
        if self.copy_seconds:
            copied = min(self.copy_seconds[stage], seconds)
            self.copy_seconds[stage] -= copied
            self.idle_copy_seconds[stage] += copied

    def _copy_while_busy(self, stage: int, one: Pass, seconds: float) -> float:
        # Returns by how much the copy prolongs the pass ``one``, which takes ``seconds`` if nothing is copied.
        if not self.copy_seconds:
            return 0.0
        if one == self._last_received[stage]:
            self._at_once[stage] = self.copy_seconds[stage]
        copied = min(self._at_once[stage], self.copy_seconds[stage], seconds)
        self._at_once[stage] -= copied
        self.copy_seconds[stage] -= copied
        return copied

    def _last_received_pass(self, stage: int) -> Pass | None:
        received = [one for one in order(self._shape, stage) if self._shape.origin(stage, one[2], one[0]) is not None]
        return received[-1] if received else None

    def _arrival(self, stage: int, one: Pass) -> float | None:
        # Arrival time of the input of a pass; None while it is not known.
        direction, microbatch, chunk = one
        source = self._shape.origin(stage, chunk, direction)
        if source is None:
            return 0.0
        if source[0] in self._own:
            return self._sent.get((direction, microbatch, source))
        # A healthy stage has all of its tensors in its log, so it sends them without waiting for the replay.
        return self._logged[direction, microbatch, (stage, chunk)]

    def _log(self) -> Iterator[tuple[tuple[Direction, int, Place], float]]:
        # Yields each pass that needs a logged tensor and the tensor's arrival time; each neighbour sends its own log.
        directions: tuple[Direction, ...] = ("forward", "backward")
        for stage in self._own:
            for direction in directions:
                for place, (microbatch, chunk) in enumerate(receives(self._shape, stage, direction), start=1):
                    yield (direction, microbatch, (stage, chunk)), place * self._send_seconds
