"""``RecoveryTimes``: predicts the seconds from a failure until the ranks train again, from measured constants.

A prediction includes the time to detect the failure, to form process groups or start new processes, to send state
between ranks, and to run iterations again. It does not include reading from storage, because no configuration key
states the speed of storage. The detection time applies if the end of a process or node closes its connections. A
machine that vanishes without closing them is detected later, after ``detector.vanished_seconds``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryWork:
    """Amount of work in a recovery, from which ``RecoveryTimes`` predicts the duration of the recovery."""

    num_ranks: int
    """Number of ranks after the recovery."""
    state_bytes: int
    """Largest size in bytes of the state (model and optimizer, without activations) that a rank builds again."""
    restarts_processes: bool
    """Whether all ranks start again in new processes."""
    tries_processes: bool = False
    """Whether the remaining ranks first try to continue in their processes. The ranks end when they find that state is
    missing. All ranks then start again in new processes."""
    num_replaced_nodes: int = 0
    """Number of lost nodes that other nodes replace while the remaining ranks wait. If nodes are on different machines,
    they start at the same time, so they count as one."""
    starts_ranks: bool = False
    """Whether new processes on the same nodes replace the ranks that died, while the remaining ranks wait."""
    sent_bytes: int | None
    """Largest number of bytes that any rank sends or receives; None if the transfers are not planned."""
    again_iterations: int | None
    """Number of iterations that run again; None if it is not known."""
    again_unknown: tuple[str, ...] = ()
    """Inputs without which ``again_iterations`` cannot be computed; empty if it is known."""
    again_share: float = 1.0
    """Duration of an iteration that runs again, divided by the duration of an iteration of the whole job; less than 1
    if only some pipeline stages run it again (see ``RecoveryTimes.share_of``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted duration of a recovery, or the inputs that are missing for a prediction."""

    seconds: float | None
    """Seconds from the failure until ranks train the iteration that follows the newest committed one."""
    unknown: tuple[str, ...] = ()
    """Missing inputs, e.g. ``snapshot.iteration_seconds=null``; empty if ``seconds`` is known."""

    def validate(self) -> None:
        """Assert that either the seconds or the missing inputs are given."""
        assert (self.seconds is None) == bool(self.unknown), f"seconds={self.seconds} with unknown={self.unknown}"

    def summary(self) -> str:
        """Describe the prediction in one line."""
        return f"{self.seconds:.2g} s" if self.seconds is not None else f"not known: {', '.join(self.unknown)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Measured constants for predictions, from CPUs. The comments name the results in ``benchmarks/results``."""

    # kill-to-commit_cpu_2026-11-23: median of the time from the kill to the next commit (0.76 s), less an iteration
    # (0.33 s) and the forming of the membership.
    detection_seconds: float = 0.14
    """Seconds from the end of a process until the remaining ranks report their progress."""
    # benchmarks/recovery_times.py on 2026-11-28: median of 30 losses at a load up to 2.0.
    forming_seconds: float = 0.244
    """Seconds to form process groups of a few ranks and to build a small model."""
    # control-plane-scale_cpu_2026-11-22: 0.87 s until the last agent of 1,024 ranks knows the next membership.
    forming_rank_seconds: float = 0.00085
    """Seconds to add to ``forming_seconds`` for each rank that trains after the recovery."""
    # faults-from-outside_cpu_2026-11-23: ranks with 475 MB of state form a membership in 1.23 s instead of 0.31 s.
    built_bytes_per_second: float = 5e8
    """Speed at which a rank builds its model and optimizer again, in bytes of state per second."""
    # benchmarks/recovery_times.py on 2026-11-28: median of 30 losses at a load up to 2.0.
    replacement_seconds: float = 0.337
    """Additional seconds for each lost node that a spare or restarted node replaces."""
    # benchmarks/recovery_times.py on 2026-11-28: median of 30 losses at a load up to 2.0.
    rank_start_seconds: float = 0.0
    """Additional seconds if a new process on the same node replaces a rank that died."""
    # benchmarks/recovery_times.py on 2026-11-28: median of 30 losses at a load up to 2.0.
    restart_seconds: float = 0.673
    """Seconds from the start of new processes for all ranks until they train."""
    # benchmarks/recovery_times.py on 2026-11-28: median of 30 losses at a load up to 2.0.
    abandon_seconds: float = 0.82
    """Additional seconds if remaining ranks first try to continue in their processes, and all ranks then restart."""
    # recovery-speed_cpu_2026-11-21: median of the time of the replay of one stage, divided by that of all stages.
    localized_share: float = 0.72
    """Duration of an iteration that only some stages run again, divided by its duration if all stages run it. This is
    used if stages are on different machines."""

    def share_of(self, num_stages: int, of_stages: int, *, shares_machine: bool) -> float:
        """Return the duration of an iteration that only ``num_stages`` of ``of_stages`` pipeline stages run again,
        divided by its duration on all stages. With ``shares_machine``, all ranks compute on one machine's cores."""
        if num_stages in (0, of_stages):
            return 1.0
        return num_stages / of_stages if shares_machine else self.localized_share

    def predict(
        self, work: RecoveryWork, *, link_bytes_per_second: float | None, iteration_seconds: float | None
    ) -> Prediction:
        """Predict the time of ``work``. If an input is missing, the result has no time and lists the missing inputs."""
        unknown: list[str] = []
        sent = _quotient(work.sent_bytes, link_bytes_per_second)
        if sent is None:
            is_planned = work.sent_bytes is not None
            unknown.append("topology.link_bytes_per_second=null" if is_planned else "the transfers are not planned")
        again = None if work.again_iterations is None else 0.0 if work.again_iterations == 0 else iteration_seconds
        if work.again_iterations is None:
            unknown += work.again_unknown
        elif again is None:
            unknown.append("snapshot.iteration_seconds=null")
        if unknown:
            return Prediction(seconds=None, unknown=tuple(unknown))
        assert sent is not None and again is not None and work.again_iterations is not None, "inputs are known"
        return Prediction(seconds=self._fixed(work) + sent + work.again_iterations * again * work.again_share)

    def _fixed(self, work: RecoveryWork) -> float:
        built = work.state_bytes / self.built_bytes_per_second
        forming = self.forming_seconds + self.forming_rank_seconds * work.num_ranks
        start = self.restart_seconds if work.restarts_processes else 0.0
        filled = self.replacement_seconds * work.num_replaced_nodes + self.rank_start_seconds * work.starts_ranks
        start += self.abandon_seconds * work.tries_processes
        return self.detection_seconds + forming + built + start + filled


def _quotient(num_bytes: int | None, speed: float | None) -> float | None:
    if num_bytes == 0:
        return 0.0
    return None if num_bytes is None or speed is None else num_bytes / speed
