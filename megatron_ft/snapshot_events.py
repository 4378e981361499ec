"""Events of snapshots and upstream logs; ``events.py`` has all events."""

from dataclasses import dataclass

from megatron_ft.formatting import counted, seconds, size
from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlanned(Record):
    """A new plan of snapshots: the windows that are captured from the next iteration on."""

    iteration: int
    """Newest iteration when the plan was made; the next iteration uses the plan."""
    window_iterations: int
    """Number of iterations in which every operator is captured once (W)."""
    interval_iterations: int
    """Number of iterations from the start of one window to the start of the next."""
    window_bytes: int
    """Size of a window on the rank with the largest window."""
    dense_bytes: int
    """Size of the whole state of the same rank, if it were captured at once."""
    host_bytes: int
    """Host memory for windows and peer copies on the node with the largest need."""
    reason: str
    """Reason for the size of the window and the order of operators in the window."""
    captured_bytes: int | None = None
    """Largest number of bytes that a window captures on any rank, if windows leave out experts; otherwise None."""
    cause: str = ""
    """Reason for another plan, or for the use of the plan with a new layout of the state; empty for a first plan."""

    def describe(self) -> Note:
        windows = f"snapshots: windows of {counted(self.window_iterations, 'iteration')}"
        if self.captured_bytes is None:
            text = f"{windows}, at most {size(self.window_bytes)} per rank"
        else:
            captured = f"{size(self.captured_bytes)} of {size(self.dense_bytes)} on the largest rank"
            text = f"{windows}, which capture {captured}"
        return Note("info", f"{text}; planned again because {self.cause}" if self.cause else text)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCommitted(Record):
    """A window was committed: the configured number of other failure domains now have a copy of it."""

    iteration: int
    """Iteration whose commit vote committed the window."""
    start_iteration: int
    """Iteration after which the window's first slice was captured."""
    num_iterations: int
    """Number of slices of the window."""
    stalled_seconds: float
    """Seconds for which the first rank of the job waited for captures since the previous committed window."""
    captured_bytes: int | None = None
    """Bytes that the first rank of the job has captured since the previous committed window."""
    replicated_bytes: int | None = None
    """Bytes that the snapshot server of the first rank has sent to all peers since the previous committed window."""
    persisted_bytes: int | None = None
    """Bytes that the snapshot server of the first rank has written to storage since the previous committed window."""
    idle_copied_bytes: int | None = None
    """The part of ``captured_bytes`` that was copied while the rank waited for messages of another pipeline stage. None
    without ``snapshot.copy_in_bubbles``."""
    at_risk_share: float | None = None
    """Share of the whole training's tokens whose updates of experts would be lost by a recovery from this window, as a
    mean over MoE layers. None if windows leave out no experts."""
    lost_share: float | None = None
    """Share of the training's tokens whose updates of experts were lost (PLT). None if windows leave out no experts."""
    owed_share: float | None = None
    """The part of ``lost_share`` that extra tokens did not replace. None without ``snapshot.repay_capacity_share``."""
    stored_at_risk_share: float | None = None
    """Share of the whole training's tokens whose updates of experts would be lost by a recovery from the newest file.
    None unless files have fewer experts than windows (``snapshot.policy.num_persisted_experts`` or
    ``snapshot.storage_bandwidth_bytes_per_second``) and a file was written or is being written."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDelayed(Record):
    """A window could not start, because a rank had no free buffer: peers or storage are slow. Training continues."""

    iteration: int
    """Iteration after which the window was planned to start."""
    replicating_bytes: int
    """Bytes on the node of the job's first rank that peers have not received yet."""

    def describe(self) -> Note:
        behind = f"{size(self.replicating_bytes)} have not been replicated to peers yet"
        return Note("warning", f"no window could start after iteration {self.iteration}: {behind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotProblem(Record):
    """An operation on a window failed on a node; training continues."""

    iteration: int
    """Newest committed iteration when the problem was noticed."""
    node: int
    """Node on which the operation failed."""
    what: str
    """Operation that failed: ``replicate``, ``persist``..."""
    error: str
    """Error of the operation."""

    def describe(self) -> Note:
        return Note("bad", f"a snapshot operation failed on node {self.node} ({self.what}): {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogPlanned(Record):
    """Memory was allocated for the upstream log, i.e. tensors that ranks send to adjacent pipeline stages."""

    iteration: int
    """Newest iteration when the memory was allocated."""
    iterations_kept: int
    """Largest number of iterations whose tensors fit into the log."""
    log_bytes: int
    """Memory of the log on the rank with the largest log."""
    node_bytes: int
    """Memory of all logs on the node with the largest logs."""

    def describe(self) -> Note:
        largest = f"at most {size(self.log_bytes)} per rank"
        return Note("info", f"upstream log: space for {self.iterations_kept} iterations, {largest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogFull(Record):
    """The upstream log has no space for an iteration, because the next window is late. Training continues.

    A lost stage cannot replay alone until a window is committed that starts after the iterations missing from the log.
    """

    iteration: int
    """First iteration that is missing from the log; later iterations may also be missing."""
    iterations_kept: int
    """Number of iterations whose tensors are in the log."""

    def describe(self) -> Note:
        effect = "no stage can replay alone until a later window is committed"
        return Note("warning", f"the upstream log has no space for iteration {self.iteration}: {effect}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUpdatesLost(Record):
    """The job continued from a window that leaves out experts, and lost the newest updates of these experts."""

    iteration: int
    """Iteration from which the job continued."""
    num_experts: int
    """Number of experts, over all layers, that were set back to an earlier iteration."""
    num_tokens: int
    """Number of tokens, over all layers, whose updates of experts were lost in this recovery."""
    num_stored_tokens: int = 0
    """The part of ``num_tokens`` that was lost by experts whose state was read from storage. The rest was lost by
    experts whose state was in memory."""
    num_memory_experts: int = 0
    """Number of experts, over all layers, whose state was in memory, although the window was read from storage."""
    lost_share: float
    """Share of the tokens of the whole training whose updates were lost so far, as a mean over MoE layers (PLT)."""
    momentary_lost_tokens: float
    """Sum over MoE layers of (tokens lost now) / (tokens processed so far) in the layer (MLT). It can exceed 1."""

    def describe(self) -> Note:
        lost = f"updates of {self.num_tokens} tokens are lost; lost so far: {self.lost_share:.2%} of the whole training"
        return Note("warning", f"{self.num_experts} experts continue from an earlier state: {lost}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReplayed(Record):
    """Iterations of a window were replayed, so that the state is dense (every operator is at the same iteration)."""

    iteration: int
    """Last iteration that the dense state contains."""
    start_iteration: int
    """Iteration of the state from which the window's first slice was captured."""
    num_iterations: int
    """Number of replayed iterations."""
    seconds: float
    """Seconds for loading the window and replaying."""

    def describe(self) -> Note:
        duration = seconds(self.seconds)
        if not self.num_iterations:
            return Note("good", f"loaded the window of iteration {self.iteration} in {duration}")
        return Note(
            "good", f"replayed {counted(self.num_iterations, 'iteration')} up to {self.iteration} in {duration}"
        )
