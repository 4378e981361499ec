"""Events of ranks, nodes and controllers that go and come; ``events.py`` lists them with the others."""

from dataclasses import dataclass

from megatron_ft.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecided(Record):
    """Which rung of the ladder a membership continues on: the nearest one that serves."""

    generation: int
    """Number of the membership that begins."""
    rung: str
    """``replicas`` (living ranks), ``localized`` (stages that lost a rank went back), ``window``, ``checkpoint`` or
    ``nothing``."""
    iteration: int
    """Newest iteration of the state that it begins with."""
    declined: tuple[str, ...] = ()
    """What was not used, each with its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChanged(Record):
    """Nodes have gone or come, and the ranks that stay train on in their processes."""

    generation: int
    """Number of the membership that begins, counted from 0."""
    world_size: int
    """Its ranks."""
    nodes: tuple[int, ...]
    """Its nodes, by the numbers they have had since the job began."""
    reason: str
    """Why the one before ended."""
    iteration: int
    """Newest iteration of the state that it begins with."""
    seconds: float
    """Seconds from the decision until its first rank was ready."""
    joining: tuple[int, ...] = ()
    """Those of its nodes whose ranks had no state of the run, or none that the others went on from: they were given it.
    A node that was lost and started again before one iteration is among them."""
    schedule: tuple[str, ...] = ()
    """Entries of ``launch.membership_schedule`` that lead to it from the membership that committed ``iteration``, one
    for each that formed on the way. They take the place of those of earlier memberships of the same iteration. Empty
    with ``launch.keep_layout``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecovery(Record):
    """What a rank did while the stages that had lost ranks were brought back from their neighbours' logs."""

    generation: int
    """Number of the membership that begins."""
    rank: int
    """The rank."""
    stage: int
    """Its pipeline stage, counted from 0."""
    role: str
    """``replays`` (its stage went back and computes again), ``serves`` (sends what it has logged) or ``waits``."""
    start_iteration: int
    """Newest iteration of the state that its stage went back to; the target where it did not go back."""
    iteration: int
    """The target: newest iteration of the state that all ranks go on with."""
    num_iterations: int
    """Iterations that this rank replayed; 0 unless it replays."""
    num_forward_passes: int
    """Forward passes that this rank computed: microbatches times its model chunks, over all iterations replayed."""
    bytes_moved: int
    """Bytes of the upstream log that this rank sent or received."""
    began_unix_seconds: float
    """When it began, in seconds since 1970 by the wall clock of its node."""
    seconds: float
    """Seconds it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(Record):
    """A rank died or raised."""

    rank: int
    """The rank."""
    node: int | None = None
    """Its node."""
    exit_code: int | None = None
    """Its exit code, if it ended by itself."""
    signal: str | None = None
    """The signal that ended it, e.g. ``SIGKILL``."""
    first: bool = False
    """Whether it was the first of the job to fail."""
    phase: str | None = None
    """Phase it last reported."""
    iteration: int | None = None
    """Iteration it last reported."""
    error: str | None = None
    """Last line of its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Record):
    """A node was lost whole: its process ended or fell silent."""

    node: int
    """The node, by the number it has had since it first came."""
    reason: str
    """How that was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStartFailed(Record):
    """A node that was started while the job ran did not join it: its process or a rank ended, or was late."""

    node: int
    """The node, by the number it has had since it first came."""
    reason: str
    """What became of it: exit code and last words of its process, or which rank ended how."""
    starts_again: bool
    """Whether the node is started once more, see ``launch.max_node_restarts``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRestarted(Record):
    """Ranks failed, and all ranks are started again; they continue the run."""

    generation: int
    """The one that begins: how often ranks have been started again or have gone on without lost nodes."""
    reason: str
    """What ended the generation before."""
    failed_ranks: tuple[int, ...]
    """Ranks that failed, the first one first; without those that were ended because of them."""
    iteration: int
    """Iteration in which the first of them failed; 0 before the first iteration."""
    num_restarts_left: int
    """Restarts left if the job gets no further; ``launch.max_restarts`` again as soon as it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerWaits(Record):
    """The disk has no room for what the controller has to write before it acts: no loss is dealt with meanwhile."""

    problem: str
    """What the disk says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerGoesOn(Record):
    """There is room again, and the controller deals with what has happened."""

    seconds: float
    """Seconds it waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolderMissing(Record):
    """The run's folder was deleted or moved away while the job runs."""

    path: str
    """Where it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReplaced(Record):
    """The job's controller ended or gave no sign; another one takes over where it stood."""

    reason: str
    """What became of it."""
