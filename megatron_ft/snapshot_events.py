"""Events of snapshots and upstream logs; ``events.py`` has all events."""

from dataclasses import dataclass

from megatron_ft.formatting import counted, seconds, size
from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlanned(Record):
    """A new plan of snapshots is in force. It divides the capture of the state over the iterations of a window."""

    iteration: int
    """Newest iteration when the plan was made. The next iteration is the first that uses the plan."""
    window_iterations: int
    """Number of iterations over which the capture of a window is divided (W)."""
    interval_iterations: int
    """Number of iterations from the start of one window to the start of the next window."""
    window_bytes: int
    """Bytes of one window on the rank with the largest window."""
    dense_bytes: int
    """Bytes of a window that captures the whole state in one iteration, on the rank with the largest state."""
    host_bytes: int
    """Bytes of host memory for the node's windows and for copies of other nodes' windows, on the node with the most."""
    reason: str
    """Reason why the window has this number of iterations and this order of operators."""
    captured_bytes: int | None = None
    """Most bytes that any rank captures for one window, if windows leave out experts; otherwise None."""
    cause: str = ""
    """Reason why an earlier plan was replaced; empty for the first plan of a job."""

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
    """A snapshot window was committed: all its slices are replicated to the configured number of failure domains."""

    iteration: int
    """Iteration whose commit vote committed the window."""
    start_iteration: int
    """Iteration after which the first slice of the window was captured."""
    num_iterations: int
    """Number of slices of the window; one slice is captured per iteration."""
    stalled_seconds: float
    """Seconds that training on rank 0 waited for captures since the previous committed window."""
    captured_bytes: int | None = None
    """Bytes that rank 0 has captured since the previous committed window."""
    replicated_bytes: int | None = None
    """Bytes that the snapshot server of rank 0's node has sent to all peers since the previous committed window."""
    persisted_bytes: int | None = None
    """Bytes that the snapshot server of rank 0's node has written to storage since the previous committed window."""
    idle_copied_bytes: int | None = None
    """Bytes of ``captured_bytes`` that were copied while rank 0 waited for messages of another pipeline stage. None if
    ``snapshot.copy_in_bubbles`` is off."""
    at_risk_share: float | None = None
    """Share of the whole training's tokens whose expert updates would be lost if a recovery used this window; mean over
    MoE layers. None if windows contain all experts."""
    lost_share: float | None = None
    """Share of all training tokens whose expert updates were lost so far (PLT). None if windows have all experts."""
    owed_share: float | None = None
    """Share of the whole training's tokens that are lost and not repaid: experts have not yet processed additional
    tokens in their place. A part of ``lost_share``. None without ``snapshot.repay_capacity_share``."""
    stored_at_risk_share: float | None = None
    """Share of the whole training's tokens whose expert updates would be lost if a recovery used the newest window on
    storage. Only present if windows on storage have fewer experts than windows in memory
    (``snapshot.policy.num_persisted_experts`` or ``snapshot.storage_bandwidth_bytes_per_second``)."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDelayed(Record):
    """A snapshot window could not start, as a rank had no free buffer (slow peers or storage). Training continues."""

    iteration: int
    """Iteration after which the window should have started."""
    replicating_bytes: int
    """Bytes of the windows of rank 0's node that peers have not received yet."""

    def describe(self) -> Note:
        behind = f"{size(self.replicating_bytes)} have not been replicated to peers yet"
        return Note("warning", f"no snapshot window could start after iteration {self.iteration}: {behind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotProblem(Record):
    """An operation on a snapshot window failed on a node. Training continues."""

    iteration: int
    """Newest committed iteration when the failure was noticed."""
    node: int
    """Node on which the operation failed."""
    what: str
    """Name of the failed operation, for example ``replicate`` or ``persist``."""
    error: str
    """Text of the error."""

    def describe(self) -> Note:
        return Note("bad", f"a snapshot operation failed on node {self.node} ({self.what}): {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogPlanned(Record):
    """Memory was allocated for the upstream log, which stores tensors that ranks send to adjacent pipeline stages."""

    iteration: int
    """Newest iteration when the memory was allocated."""
    iterations_kept: int
    """Largest number of iterations whose tensors fit into the log."""
    log_bytes: int
    """Bytes of the log on the rank with the largest log."""
    node_bytes: int
    """Bytes of the logs of all ranks of a node, on the node with the largest sum."""

    def describe(self) -> Note:
        largest = f"at most {size(self.log_bytes)} per rank"
        return Note("info", f"upstream log: space for {self.iterations_kept} iterations, {largest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogFull(Record):
    """The upstream log has no space for an iteration, because the next window is late. Training continues.

    Until a window that starts after the missing iterations is committed, a lost stage cannot replay alone.
    """

    iteration: int
    """First iteration that is missing from the log; later iterations may also be missing."""
    iterations_kept: int
    """Number of iterations whose tensors fit into the log."""

    def describe(self) -> Note:
        effect = "no stage can replay alone until a later window is committed"
        return Note("warning", f"the upstream log has no space for iteration {self.iteration}: {effect}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUpdatesLost(Record):
    """A recovery lost the newest updates of some experts, because it used a window that leaves out these experts."""

    iteration: int
    """Iteration after which the job continued."""
    num_experts: int
    """Number of experts, over all layers, that continue with the state of an earlier iteration."""
    num_tokens: int
    """Number of tokens whose expert updates were lost in this recovery, summed over all layers."""
    num_stored_tokens: int = 0
    """Part of ``num_tokens`` that was lost by experts whose state was read from storage. All other tokens were lost by
    experts whose state was in memory."""
    num_memory_experts: int = 0
    """Number of experts, over all layers, whose state came from memory although a window on storage was used."""
    lost_share: float
    """Tokens whose updates were lost so far, as a share of the whole training's tokens; mean over MoE layers (PLT)."""
    momentary_lost_tokens: float
    """Momentary lost tokens (MLT) of this recovery: the sum over all MoE layers of the layer's lost tokens divided by
    the tokens that the layer has processed so far. It can exceed 1."""

    def describe(self) -> Note:
        lost = f"updates of {self.num_tokens} tokens are lost; lost so far: {self.lost_share:.2%} of the whole training"
        return Note("warning", f"{self.num_experts} experts continue from an earlier state: {lost}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReplayed(Record):
    """Iterations of a window were replayed. In the resulting (dense) state, all operators are at one iteration."""

    iteration: int
    """Last iteration that is part of the state after the replay."""
    start_iteration: int
    """Iteration after which the first slice of the window was captured."""
    num_iterations: int
    """Number of replayed iterations."""
    seconds: float
    """Seconds to load the window and to replay its iterations."""

    def describe(self) -> Note:
        duration = seconds(self.seconds)
        if not self.num_iterations:
            return Note("good", f"loaded the window of iteration {self.iteration} in {duration}")
        return Note(
            "good", f"replayed {counted(self.num_iterations, 'iteration')} up to {self.iteration} in {duration}"
        )
