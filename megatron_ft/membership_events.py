"""Events of ranks, nodes, controllers and recoveries; ``events.py`` has all events."""

from dataclasses import dataclass

from megatron_ft.formatting import seconds
from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStarted(Record):
    """The state from which ranks continue: one event for each recovery and for each job that continues the run."""

    generation: int
    """Number of the membership that begins; 0 for a job that continues the run."""
    strategy: str
    """``replicas`` (living ranks), ``localized`` (stages that lost a rank replay), ``window``, ``checkpoint`` or
    ``nothing``."""
    iteration: int
    """Newest iteration of the state that ranks continue from, once it is dense."""
    source: str | None = None
    """Place of a window: ``memory`` or ``persisted``."""
    declined: tuple[str, ...] = ()
    """Newer or nearer sources that were not used, each with its reason."""

    def describe(self) -> Note:
        generation = f"generation {self.generation} " if self.generation else ""
        strategy = self.strategy if self.source is None else f"{self.strategy} ({self.source})"
        text = f"{generation}continues after iteration {self.iteration}: {strategy}"
        return Note("warning" if self.declined else "info", "; not used: ".join([text, *self.declined]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChanged(Record):
    """Nodes left or joined, and the other ranks continue in their processes."""

    generation: int
    """Number of the membership that begins, counted from 0."""
    world_size: int
    """Number of ranks of the membership."""
    nodes: tuple[int, ...]
    """Nodes of the membership; node numbers never change."""
    reason: str
    """Reason for the end of the previous membership."""
    iteration: int
    """Newest iteration of the state that it begins with."""
    seconds: float
    """Seconds from the decision until the first rank of the membership was ready."""
    joining: tuple[int, ...] = ()
    """Nodes whose ranks received their state, because they had none of the run, or another one than the others. A node
    that was lost and started again within one iteration is among them."""
    schedule: tuple[str, ...] = ()
    """Entries of ``testing.membership_schedule`` that lead to it from the membership that committed ``iteration``, one
    for each that formed on the way. They take the place of those of earlier memberships of the same iteration. Empty
    with ``recovery.keep_layout``."""

    def describe(self) -> Note:
        joining = f", {list(self.joining)} of them joining," if self.joining else ""
        ranks = (
            f"{self.world_size} ranks on nodes {list(self.nodes)}{joining} continue after iteration {self.iteration}"
        )
        return Note("warning", f"{ranks} ({seconds(self.seconds)}): {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecovery(Record):
    """The work of one rank in a localized recovery: stages that lost ranks replay from their neighbours' logs."""

    generation: int
    """Number of the membership that begins."""
    rank: int
    """The rank."""
    stage: int
    """Pipeline stage of the rank, counted from 0."""
    role: str
    """``replays`` (the stage returns to a window and computes again), ``serves`` (sends its log) or ``waits``."""
    start_iteration: int
    """Newest iteration of the state to which the stage returned; the target if the stage keeps its state."""
    iteration: int
    """The target: newest iteration of the state from which all ranks continue."""
    num_iterations: int
    """Number of iterations that this rank replayed; 0 unless it replays."""
    num_forward_passes: int
    """Forward passes that this rank computed: microbatches times its model chunks, over all iterations replayed."""
    bytes_moved: int
    """Bytes of the upstream log that this rank sent or received."""
    began_unix_seconds: float
    """Time of the begin, in seconds since 1970 by the wall clock of the node."""
    seconds: float
    """Duration in seconds."""

    def describe(self) -> Note | None:
        if self.role != "replays":
            return None  # the other ranks compute nothing, and each of them reports this event
        work = (
            f"rank {self.rank} of stage {self.stage} replayed {self.num_iterations} iterations up to {self.iteration}"
        )
        return Note("good", f"{work} in {seconds(self.seconds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(Record):
    """A rank died or raised an error."""

    rank: int
    """The rank."""
    node: int | None = None
    """Node of the rank."""
    exit_code: int | None = None
    """Exit code, if the rank ended by itself."""
    signal: str | None = None
    """The signal that ended the rank, e.g. ``SIGKILL``."""
    first: bool = False
    """Whether it was the first rank of the job to fail."""
    phase: str | None = None
    """Last phase that the rank reported."""
    iteration: int | None = None
    """Last iteration that the rank reported."""
    error: str | None = None
    """Last line of the traceback."""

    @property
    def ending(self) -> str:
        """End of the rank: ``SIGKILL``, ``exit code 1`` or ``lost``."""
        return self.signal or ("lost" if self.exit_code is None else f"exit code {self.exit_code}")

    def describe(self) -> Note:
        node = "" if self.node is None else f" on node {self.node}"
        iteration = "" if self.iteration is None else f" in iteration {self.iteration}"
        first = ", the first to fail" if self.first else ""
        error = f": {self.error}" if self.error else ""
        return Note("bad", f"rank {self.rank}{node} died{iteration} ({self.ending}{first}){error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Record):
    """A node was lost: its agent ended or does not answer."""

    node: int
    """The node; node numbers never change."""
    reason: str
    """The evidence of the loss."""

    def describe(self) -> Note:
        return Note("bad", f"node {self.node} was lost: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStartFailed(Record):
    """A node that was started during the job did not join it: its agent or a rank ended or was late."""

    node: int
    """The node; node numbers never change."""
    reason: str
    """Exit code and last output of its process, or the rank that ended and how."""
    starts_again: bool
    """Whether the node is started again, see ``nodes.max_node_restarts``."""

    def describe(self) -> Note:
        again = "starting it again" if self.starts_again else "it is not started again"
        return Note("bad", f"node {self.node} did not join: {self.reason}; {again}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRestarted(Record):
    """Ranks failed, and all ranks are started again; they continue the run."""

    generation: int
    """Number of the generation that begins: how often ranks have been restarted or have continued without lost
    nodes."""
    reason: str
    """Reason for the end of the previous generation."""
    failed_ranks: tuple[int, ...]
    """Ranks that failed, the first one first, without ranks that ended as a consequence."""
    iteration: int
    """Iteration in which the first rank failed; 0 before the first iteration."""
    num_restarts_left: int
    """Restarts left if the job makes no progress; ``recovery.max_restarts`` again when it does."""

    def describe(self) -> Note:
        where = f" in iteration {self.iteration}" if self.iteration else ""
        left = f"generation {self.generation}; at most {self.num_restarts_left} more restarts without progress"
        return Note("warning", f"starting all ranks again ({left}): {self.reason}{where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerWaits(Record):
    """The disk has no space for what the controller writes before it acts: it handles no loss until space is free."""

    problem: str
    """The error of the disk."""

    def describe(self) -> Note:
        text = f"the controller cannot write to disk ({self.problem}); until space is free it does not react to losses"
        return Note("bad", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerGoesOn(Record):
    """Disk space is free again, and the controller handles what happened meanwhile."""

    seconds: float
    """Duration of the wait in seconds."""

    def describe(self) -> Note:
        return Note("good", f"disk space is free again: the controller continues after {seconds(self.seconds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolderMissing(Record):
    """The run's folder was deleted or moved away during the job."""

    path: str
    """Path of the folder."""

    def describe(self) -> Note:
        text = (
            f"the run's folder {self.path} was deleted or moved away. Nothing more is written, and the next loss "
            "of a rank ends "
        )
        return Note("bad", f"{text}the job: restore the folder, or stop the job")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReplaced(Record):
    """The job's controller ended or does not answer; another one takes over from its journal."""

    reason: str
    """End of the earlier controller."""

    def describe(self) -> Note:
        return Note("warning", f"a new controller takes over: {self.reason}")
