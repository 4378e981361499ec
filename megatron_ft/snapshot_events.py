"""Events of snapshots and upstream logs; ``events.py`` has all events."""

from dataclasses import dataclass

from megatron_ft.formatting import seconds, size
from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlanned(Record):
    """The windows that are captured from now on."""

    iteration: int
    """Last iteration before the plan is in force."""
    window_iterations: int
    """Iterations that together capture every operator once (W)."""
    interval_iterations: int
    """Iterations from the start of a window to the start of the next."""
    window_bytes: int
    """Bytes of a window on the rank that captures most."""
    dense_bytes: int
    """Bytes of the whole state on that rank, captured at once."""
    host_bytes: int
    """Memory that windows and peers' copies take on the node that needs most."""
    reason: str
    """Reason for this size and order of the window."""

    def describe(self) -> Note:
        return Note(
            "info", f"snapshots: window of {self.window_iterations} iterations, {size(self.window_bytes)} a rank"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCommitted(Record):
    """Every rank's window is in the memory of as many other failure domains as configured."""

    iteration: int
    """Iteration whose vote contained it."""
    start_iteration: int
    """State the window's first slice was taken from."""
    num_iterations: int
    """Slices of the window."""
    stalled_seconds: float
    """Seconds that training waited for its capture on this rank, the first of the job."""
    captured_bytes: int | None = None
    """Bytes that this rank captured since the previous committed window."""
    replicated_bytes: int | None = None
    """Bytes that this rank's snapshot server has sent to peers since then, each peer counted."""
    persisted_bytes: int | None = None
    """Bytes that this rank's snapshot server has written to storage since then."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDelayed(Record):
    """No buffer was free for the next window on some rank: peers or storage are behind. Training continues."""

    iteration: int
    """Iteration after which the window should have started."""
    replicating_bytes: int
    """Bytes that wait to be replicated on this rank's node."""

    def describe(self) -> Note:
        behind = size(self.replicating_bytes)
        return Note("warning", f"window after iteration {self.iteration} waits for peers, {behind} behind")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotProblem(Record):
    """An operation on a window failed on a node; training continues."""

    iteration: int
    """Last committed iteration when it was noticed."""
    node: int
    """Node it happened on."""
    what: str
    """The operation: ``replicate``, ``persist``..."""
    error: str
    """The error."""

    def describe(self) -> Note:
        return Note("bad", f"snapshot problem on node {self.node} ({self.what}): {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogPlanned(Record):
    """Memory was allocated for the tensors that ranks send over pipeline boundaries; it contains the earlier log."""

    iteration: int
    """Last iteration before it was allocated."""
    iterations_kept: int
    """Most iterations whose tensors are kept at once."""
    log_bytes: int
    """Memory of the log on the rank that keeps most."""
    node_bytes: int
    """Memory of logs on the node that keeps most."""

    def describe(self) -> Note:
        return Note("info", f"upstream log: {self.iterations_kept} iterations, {size(self.log_bytes)} a rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogFull(Record):
    """The log had no space for the tensors of an iteration: the next window is late. Training continues.

    A stage that is lost before a window that begins after the gap is committed cannot replay alone.
    """

    iteration: int
    """First iteration that is not in the log, and perhaps others after it."""
    iterations_kept: int
    """Iterations whose tensors are kept."""

    def describe(self) -> Note:
        effect = "no stage can replay alone until a later window is committed"
        return Note("warning", f"upstream log is full from iteration {self.iteration} on: {effect}")


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
