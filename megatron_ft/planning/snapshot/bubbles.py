"""Idle time of pipeline stages (bubbles), and the bytes of a snapshot that are copied in it (MoEtion, section 5.3).

A stage is idle while it waits for a message of another stage. A copy during this time does not compete with
computation. The formulas apply to Megatron's 1F1B schedules with equal stages and messages that take no time. For other
pipelines, ``planning.cost.pipeline_clock.receive_waits`` simulates the waits. ``IdleProfile`` contains measured waits.
"""

from dataclasses import dataclass

from megatron_ft.planning.cost.pipeline_clock import PassSeconds
from megatron_ft.planning.pipeline import PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StageIdle:
    """Idle time of one stage in one iteration, in three parts."""

    before_seconds: float
    """Time from the start of the iteration until the stage has its first activation."""
    between_seconds: float
    """Time between the stage's first and last pass in which the stage waits for messages."""
    after_seconds: float
    """Time from the end of the stage's last pass until the first stage has ended its last pass. The stage receives no
    message during this time."""

    @property
    def receive_seconds(self) -> float:
        """Time in which the stage waits for messages, usable for copies that must be complete before the update."""
        return self.before_seconds + self.between_seconds

    @property
    def total_seconds(self) -> float:
        """Idle time of the stage in the iteration. It is the same for all stages."""
        return self.receive_seconds + self.after_seconds

    @classmethod
    def of(cls, shape: PipelineShape, stage: int, passes: PassSeconds) -> "StageIdle":
        """Compute the idle time of ``stage`` in a pipeline whose stages all take the same time.

        The total is (P - 1) (f + b) for P stages and the times f (forward) and b (backward) in ``passes`` (Narayanan et
        al., 2021, section 2.2). It depends neither on the number of microbatches nor on the size of microbatch groups.

        Args:
            passes: times of the forward and the backward pass of one microbatch in one chunk.

        Raises:
            ConfigError: the shape is not valid for Megatron's schedules.
        """
        shape.validate()
        assert 0 <= stage < shape.num_stages, f"stage {stage} is not in a pipeline of {shape.num_stages} stages"
        forward, backward = passes.forward_seconds, passes.backward_seconds
        before, after = stage * forward, stage * backward
        total = (shape.num_stages - 1) * (forward + backward)
        return cls(before_seconds=before, between_seconds=total - before - after, after_seconds=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleProfile:
    """Measured times of one stage in an iteration, and the rates at which the stage copies snapshot slices."""

    idle_seconds: float
    """Time in which the rank waits for messages of adjacent stages."""
    tail_seconds: float
    """Time from the end of the rank's last wait until the copy of a slice must be complete."""
    idle_bytes_per_second: float
    """Bytes per second that the rank copies while it waits for messages."""
    busy_bytes_per_second: float
    """Bytes per second that the rank copies while it computes."""

    def bytes_at_once(self, num_bytes: int) -> int:
        """Return how many of a slice's ``num_bytes`` are copied without waiting for a bubble (idle time of the stage).

        All other bytes fit into the bubbles and into the time after the last bubble. Algorithm 4 of MoEtion divides the
        parameters in the same way, but does not use the time after the last bubble.
        """
        fitting = self.idle_seconds * self.idle_bytes_per_second + self.tail_seconds * self.busy_bytes_per_second
        return max(0, num_bytes - int(fitting))
