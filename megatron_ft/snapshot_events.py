"""Events of snapshots and upstream logs; ``events.py`` has all events."""

from dataclasses import dataclass

from megatron_ft.formatting import seconds, size
from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlanned(Record):
    """The windows that are captured from now on."""

    iteration: int
    """Newest iteration before the plan comes into force."""
    window_iterations: int
    """Iterations that together capture every operator once (W)."""
    interval_iterations: int
    """Iterations from the start of a window to the start of the next."""
    window_bytes: int
    """Bytes of a window on the rank that captures most."""
    dense_bytes: int
    """Bytes of the whole state on that rank, captured at once."""
    host_bytes: int
    """Memory of windows and peer copies on the node that needs most."""
    reason: str
    """Reason for this size and order of the window."""

    def describe(self) -> Note:
        return Note(
            "info", f"snapshots: windows of {self.window_iterations} iterations, {size(self.window_bytes)} per rank"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCommitted(Record):
    """A window is committed: every rank's part is in the memory of as many other failure domains as configured."""

    iteration: int
    """Iteration whose vote committed it."""
    start_iteration: int
    """Iteration after which the window's first slice was captured."""
    num_iterations: int
    """Number of slices of the window."""
    stalled_seconds: float
    """Seconds for which training on the first rank of the job waited for its capture."""
    captured_bytes: int | None = None
    """Bytes that this rank captured since the previous committed window."""
    replicated_bytes: int | None = None
    """Bytes that this rank's snapshot server has sent since then, for all peers together."""
    persisted_bytes: int | None = None
    """Bytes that this rank's snapshot server has written to storage since then."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDelayed(Record):
    """Some rank had no free buffer for the next window, because peers or storage are slow. Training continues."""

    iteration: int
    """Iteration after which the window should have started."""
    replicating_bytes: int
    """Bytes that wait to be replicated on this rank's node."""

    def describe(self) -> Note:
        behind = size(self.replicating_bytes)
        return Note(
            "warning", f"a window is delayed after iteration {self.iteration}: {behind} still have to reach peers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotProblem(Record):
    """An operation on a window failed on a node; training continues."""

    iteration: int
    """Newest committed iteration when the problem was noticed."""
    node: int
    """Node of the problem."""
    what: str
    """The operation: ``replicate``, ``persist``..."""
    error: str
    """The error."""

    def describe(self) -> Note:
        return Note("bad", f"snapshot problem on node {self.node} ({self.what}): {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogPlanned(Record):
    """Memory was allocated for the tensors that ranks send to adjacent stages; the earlier log was copied into it."""

    iteration: int
    """Newest iteration before the allocation."""
    iterations_kept: int
    """Largest number of iterations whose tensors are kept at the same time."""
    log_bytes: int
    """Memory of the log on the rank with the largest log."""
    node_bytes: int
    """Memory of logs on the node with the largest logs."""

    def describe(self) -> Note:
        return Note("info", f"upstream log: keeps {self.iterations_kept} iterations, {size(self.log_bytes)} per rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogFull(Record):
    """The log had no space for the tensors of an iteration, because the next window is late. Training continues.

    A stage that is lost cannot replay alone until a window that begins after the gap is committed.
    """

    iteration: int
    """First iteration that is not in the log; later ones may also be missing."""
    iterations_kept: int
    """Number of iterations whose tensors are kept."""

    def describe(self) -> Note:
        effect = "until a later window is committed, no stage can replay alone"
        return Note("warning", f"upstream log is full from iteration {self.iteration} on; {effect}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReplayed(Record):
    """A window was turned into a dense state."""

    iteration: int
    """Last iteration that the state contains."""
    start_iteration: int
    """State the window's first slice was taken from."""
    num_iterations: int
    """Iterations replayed."""
    seconds: float
    """Seconds of loading and replaying."""

    def describe(self) -> Note:
        text = f"replayed {self.num_iterations} iterations up to {self.iteration} in {seconds(self.seconds)}"
        return Note("good", text)
