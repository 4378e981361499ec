"""Events of snapshots, of upstream logs and of what a job continues from; ``events.py`` lists them with the others."""

from dataclasses import dataclass

from megatron_ft.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlanned(Record):
    """Which windows are captured from now on."""

    iteration: int
    """Last iteration before the plan is in force."""
    window_iterations: int
    """Iterations that together capture every operator once (W)."""
    interval_iterations: int
    """From the start of a window to the start of the next."""
    window_bytes: int
    """Bytes of a window on the rank that captures most."""
    dense_bytes: int
    """Bytes of the whole state on that rank, captured at once."""
    host_bytes: int
    """Memory that windows and peers' copies take on the node that needs most."""
    reason: str
    """Why the window has this size and order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCommitted(Record):
    """Every rank's window is in the memory of as many other failure domains as configured."""

    iteration: int
    """Iteration whose vote said so."""
    start_iteration: int
    """State the window's first slice was taken from."""
    num_iterations: int
    """Slices of the window."""
    stalled_seconds: float
    """Seconds that training waited for its capture on this rank, the first of the job."""
    captured_bytes: int | None = None
    """Bytes that this rank has captured since the window committed before."""
    replicated_bytes: int | None = None
    """Bytes that this rank's keeper has sent to peers since then, each peer counted."""
    persisted_bytes: int | None = None
    """Bytes that this rank's keeper has written to storage since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDelayed(Record):
    """No buffer was free for the next window on some rank: peers or storage are behind. Training goes on."""

    iteration: int
    """Iteration after which the window should have started."""
    replicating_bytes: int
    """Bytes that wait to be replicated on this rank's node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotProblem(Record):
    """Something about a window went wrong on a node; training goes on."""

    iteration: int
    """Last committed iteration when it was noticed."""
    node: int
    """Node it happened on."""
    what: str
    """What was attempted: ``replicate``, ``persist``..."""
    error: str
    """What went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogPlanned(Record):
    """Memory was taken for what ranks send over pipeline boundaries; what an earlier, smaller log held is in it."""

    iteration: int
    """Last iteration before there was this room."""
    iterations_kept: int
    """Most iterations whose tensors are kept at once."""
    log_bytes: int
    """Memory of the log on the rank that keeps most."""
    node_bytes: int
    """Memory of logs on the node that keeps most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLogFull(Record):
    """No room was free for what an iteration sent: the next window is late. Training goes on, but a stage that is lost
    before one is committed that begins after the gap cannot go back alone."""

    iteration: int
    """First iteration that is not in the log, and perhaps others after it."""
    iterations_kept: int
    """Iterations whose tensors are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryChosen(Record):
    """What a started job continues from, and why not from anything newer or nearer."""

    source: str
    """``memory``, ``persisted``, ``checkpoint`` or ``nothing``."""
    iteration: int
    """Last iteration that the state contains once it is dense."""
    declined: tuple[str, ...] = ()
    """What was not used, each with its reason."""


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
