"""Interface of snapshot policies. They make the same ``WindowPlan`` on every rank from measurements and state sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.plan import Activations, PlanBasis, ReorderTrigger, Unit, WindowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContext:
    """Measurements of the job, reduced over all ranks, because every rank must plan with the same values."""

    bandwidth_bytes_per_second: float
    """Bytes that the slowest rank can capture per second."""
    iteration_seconds: float
    """Time of an iteration, during which a slice is captured."""
    activations: Activations | None = None
    """Token counts of experts; None if tokens have not been counted yet."""
    previous: WindowPlan | None = None
    """Plan that is in use; None if there is no plan yet."""
    storage_bytes_per_second: float | None = None
    """Bytes that a rank can write to storage per second; None if the number of experts in files does not depend on this
    value."""
    windows_per_file: int = 1
    """Number of windows from one window on storage to the next; 1 if every window is written."""
    policy: str | None = None
    """``snapshot.policy`` of the job, as JSON text, for ``PlanBasis.policy``."""

    def file_budget_bytes(self, interval_iterations: int) -> int | None:
        """Return the bytes that a rank can write until its next file is due, if a window begins every
        ``interval_iterations`` iterations; None if ``storage_bytes_per_second`` is None."""
        if self.storage_bytes_per_second is None:
            return None
        return int(self.storage_bytes_per_second * self.iteration_seconds * interval_iterations * self.windows_per_file)

    @property
    def budget_bytes(self) -> int:
        """Bytes that a rank can capture within one iteration."""
        return int(self.bandwidth_bytes_per_second * self.iteration_seconds)

    def stall_seconds(self, num_bytes: int) -> float:
        """Return the time that training waits for a slice of ``num_bytes``."""
        # Compared in integers, as in the packing: a slice of exactly the budget must not stall by a rounding error.
        if num_bytes <= self.budget_bytes:
            return 0.0
        return max(0.0, num_bytes / self.bandwidth_bytes_per_second - self.iteration_seconds)

    def validate(self) -> None:
        """Check the measurements.

        Raises:
            ConfigError: a bandwidth or a time is not above 0, or an iteration is too short for one byte.
        """
        for name in ("bandwidth_bytes_per_second", "iteration_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError.of(f"snapshot.{name}", getattr(self, name), "must be above 0 and finite")
        if self.budget_bytes < 1:
            raise ConfigError.of(
                "snapshot.bandwidth_bytes_per_second",
                self.bandwidth_bytes_per_second,
                f"must allow at least one byte in an iteration of {self.iteration_seconds} s",
            )


class SnapshotPolicy(Protocol):
    """Protocol of a snapshot policy: a frozen dataclass, built from ``snapshot.policy``, that plans the windows."""

    @property
    def replan_drift(self) -> float:
        """Relative change of ``budget_bytes`` or of the largest slice above which ``replan`` makes another plan."""

    @property
    def trigger(self) -> ReorderTrigger | None:
        """Changes of token counts above which ``replan`` orders operators again; None if no counts are used."""

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan windows that capture every operator of ``demand`` once.

        Raises:
            ConfigError: the context or the fields of the policy are out of range.
        """


def replan(policy: SnapshotPolicy, demand: Demand, context: SnapshotContext, previous: WindowPlan) -> WindowPlan:
    """Return ``previous``, or a new plan if ``previous`` is outdated; the ``reason`` of a new plan states the cause.

    A plan is outdated if it has other operators than ``demand``, if ``budget_bytes`` or the largest slice has changed
    by more than the policy's ``replan_drift``, or if the policy's ``trigger`` fires.
    """
    why = why_outdated(policy, demand, context, previous)
    if why is None:
        return previous
    made = policy.plan(demand, context)
    return replace(made, reason=f"{why}; {made.reason}")


def make_plan(
    demand: Demand,
    context: SnapshotContext,
    slices: Sequence[Sequence[Unit]],
    *,
    interval_iterations: int,
    reason: str,
    activations: Activations | None = None,
) -> WindowPlan:
    """Create a plan with ``slices`` and validate it. Its ``reason`` states the largest slice and the stall."""
    bare = WindowPlan(slices=tuple(tuple(units) for units in slices), interval_iterations=interval_iterations)
    bare.validate(demand.operators)
    by_slice = demand.slice_bytes(bare).max(axis=1)
    peak = int(by_slice.max())
    stall = sum(context.stall_seconds(int(num_bytes)) for num_bytes in by_slice)
    fits = (
        f"stalls {stall:.3g} s every {interval_iterations} iterations of {context.iteration_seconds:.3g} s"
        if stall
        else "no stall"
    )
    largest = f"largest slice {peak:,} bytes, budget {context.budget_bytes:,} bytes"
    return WindowPlan(
        slices=bare.slices,
        interval_iterations=interval_iterations,
        reason=f"{reason}; {largest}, {fits}",
        basis=PlanBasis(
            budget_bytes=context.budget_bytes,
            peak_bytes=peak,
            # The plan is in the manifest of every window, so it has the totals and not all records of activations.
            activations=None if activations is None else activations.collapsed(),
            policy=context.policy,
        ),
    )


def why_outdated(policy: SnapshotPolicy, demand: Demand, context: SnapshotContext, previous: WindowPlan) -> str | None:
    """Return the reason why ``replan`` makes a new plan instead of ``previous``; None if it keeps ``previous``."""
    if {unit.operator for units in previous.slices for unit in units} != set(demand.operators):
        return "the operators have changed"
    # Compared with the inputs of the present plan, not with those of the last check, so that slow changes add up.
    basis = previous.basis
    if basis is None:
        return "the inputs of the present plan are not known"
    budget_before = basis.budget_bytes
    if budget_before is not None and _drift(context.budget_bytes, budget_before) > policy.replan_drift:
        return f"the budget of an iteration changed from {budget_before:,} to {context.budget_bytes:,} bytes"
    partial = previous.partial
    if partial is not None and partial.num_persisted_experts is None and context.storage_bytes_per_second is not None:
        return "the number of experts of a file has not been chosen yet"
    peak = int(demand.slice_bytes(previous).max())
    if _drift(peak, basis.peak_bytes) > policy.replan_drift:
        return f"the largest slice changed from {basis.peak_bytes:,} to {peak:,} bytes"
    if policy.trigger is not None and policy.trigger.fires(basis.activations, context.activations):
        return "the activation frequencies of experts have changed"
    return None


def _drift(now: int, before: int) -> float:
    return abs(now - before) / max(before, 1)
