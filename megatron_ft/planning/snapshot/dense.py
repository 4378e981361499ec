"""Dense snapshots: every n iterations, one slice captures the whole state. They are baselines for sparse windows."""

import math
from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseInterval:
    """Dense snapshots at a given interval."""

    interval_iterations: int
    """Iterations from one snapshot to the next."""
    replan_drift: float = 0.2
    """Relative change above which a new plan is made: the change of the bytes that an iteration can capture, or of the
    snapshot's bytes."""
    trigger: ClassVar[None] = None

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan dense snapshots at ``interval_iterations``.

        Raises:
            ConfigError: ``interval_iterations`` is below 1, or a measurement is out of range.
        """
        if self.interval_iterations < 1:
            raise ConfigError.of("snapshot.policy.interval_iterations", self.interval_iterations, "must be at least 1")
        context.validate()
        return _dense(demand, context, self.interval_iterations, "dense, fixed interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadBounded:
    """Dense snapshots at the smallest interval with bounded stalls (CheckFreq; MoEvement, section 5.2).

    A snapshot is captured during one iteration; the time by which the capture exceeds this iteration is the stall. The
    interval is the smallest n with ``stall / (n * iteration) <= max_overhead``.
    """

    max_overhead: float = 0.03
    """Largest share of training time that stalls may take."""
    replan_drift: float = 0.2
    """Relative change above which a new plan is made: the change of the bytes that an iteration can capture, or of the
    snapshot's bytes."""
    trigger: ClassVar[None] = None

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan dense snapshots at the smallest interval within ``max_overhead``.

        Raises:
            ConfigError: ``max_overhead`` is not above 0, or a measurement is out of range.
        """
        if not self.max_overhead > 0:
            raise ConfigError.of("snapshot.policy.max_overhead", self.max_overhead, "must be above 0")
        context.validate()
        stall = context.stall_seconds(_peak_bytes(demand))
        interval = max(1, math.ceil(stall / (self.max_overhead * context.iteration_seconds)))
        return _dense(demand, context, interval, f"dense, stalls take at most {self.max_overhead:.1%} of the time")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiStyle:
    """Dense snapshots at the interval with the largest share of useful time for a given MTBF.

    MoEvement, section 2.4: ``ETTR = 1 / (1 + stall / (n * T)) * 1 / (1 + n * T / (2 * MTBF))`` for an interval of n
    iterations of T seconds; a failure costs half an interval on average. The product of the two denominators is convex
    in n with its minimum at ``n = sqrt(2 * stall * MTBF) / T``; the better of the two nearest integers is used. In
    section 5.2 the paper gives Gemini the interval that is best in hindsight; this policy has to choose it in advance.
    """

    mtbf_seconds: float
    """Mean time between failures of the whole job."""
    replan_drift: float = 0.2
    """Relative change above which a new plan is made: the change of the bytes that an iteration can capture, or of the
    snapshot's bytes."""
    trigger: ClassVar[None] = None

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan dense snapshots at the interval with the largest share of useful time.

        Raises:
            ConfigError: ``mtbf_seconds`` is not above 0 and finite, or a measurement is out of range.
        """
        if not 0 < self.mtbf_seconds < math.inf:
            raise ConfigError.of("snapshot.policy.mtbf_seconds", self.mtbf_seconds, "must be above 0 and finite")
        context.validate()
        stall, iteration = context.stall_seconds(_peak_bytes(demand)), context.iteration_seconds
        best = math.sqrt(2 * stall * self.mtbf_seconds) / iteration
        around = (max(1, math.floor(best)), max(1, math.ceil(best)))
        interval = max(around, key=lambda n: _useful_time_ratio(n, stall, iteration, self.mtbf_seconds))
        ratio = _useful_time_ratio(interval, stall, iteration, self.mtbf_seconds)
        reason = f"dense, {ratio:.1%} useful time with a failure every {self.mtbf_seconds:g} s"
        return _dense(demand, context, interval, reason)


def _useful_time_ratio(
    interval_iterations: int, stall_seconds: float, iteration_seconds: float, mtbf_seconds: float
) -> float:
    """Return the share of time that is useful training (ETTR; MoEvement, section 2.4)."""
    seconds = interval_iterations * iteration_seconds
    return 1.0 / ((1.0 + stall_seconds / seconds) * (1.0 + seconds / (2.0 * mtbf_seconds)))


def _peak_bytes(demand: Demand) -> int:
    return int(demand.operator_bytes.full.sum(axis=0).max())


def _dense(demand: Demand, context: SnapshotContext, interval: int, reason: str) -> WindowPlan:
    units = [Unit(operator=operator) for operator in demand.operators]
    return make_plan(demand, context, [units], interval_iterations=interval, reason=reason)
