"""Events of ranks, nodes, controllers and recoveries; ``events.py`` has all events."""

from dataclasses import dataclass

from megatron_ft.formatting import counted, seconds
from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStarted(Record):
    """Ranks continue from a saved or replicated state, after a recovery or in a job that continues the run."""

    generation: int
    """Generation number of the membership that starts with this state; 0 for a job that continues the run."""
    strategy: str
    """Strategy that restored the state: ``living_state`` (surviving ranks have all of it), ``localized_replay`` (stages
    that lost a rank replay), ``rollback`` (all ranks load a window), ``checkpoint`` or ``start_over``."""
    iteration: int
    """Newest iteration of the restored state, including replayed iterations."""
    source: str | None = None
    """Location of the window if the strategy is ``rollback``: ``memory`` or ``persisted``."""
    declined: tuple[str, ...] = ()
    """States that were preferred to the restored state but were not used, each with the reason."""

    def describe(self) -> Note:
        generation = f"generation {self.generation} " if self.generation else ""
        strategy = self.strategy if self.source is None else f"{self.strategy} ({self.source})"
        text = f"{generation}continues after iteration {self.iteration}: {strategy}"
        return Note("warning" if self.declined else "info", "; not used: ".join([text, *self.declined]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChanged(Record):
    """Nodes left or joined the job, and the remaining ranks continue in their processes."""

    generation: int
    """Generation number of the new membership, counted from 0."""
    world_size: int
    """Number of ranks in the new membership."""
    nodes: tuple[int, ...]
    """Nodes of the new membership; the number of a node never changes."""
    reason: str
    """Reason for the end of the previous membership."""
    iteration: int
    """Newest iteration of the state with which the new membership begins."""
    seconds: float
    """Seconds from the decision to change the membership until the first rank was ready."""
    joining: tuple[int, ...] = ()
    """Nodes whose ranks received their state from other ranks, because these nodes had no state or the state of another
    iteration. This includes a node that was lost and restarted within one iteration."""
    schedule: tuple[str, ...] = ()
    """Entries for ``testing.membership_schedule`` with which another job repeats all membership changes since the
    commit of ``iteration``. They replace the entries of earlier events with the same ``iteration``. Empty with
    ``recovery.keep_layout``."""

    def describe(self) -> Note:
        joining = f", {list(self.joining)} of them joining," if self.joining else ""
        ranks = (
            f"{self.world_size} ranks on nodes {list(self.nodes)}{joining} continue after iteration {self.iteration}"
        )
        return Note("warning", f"{ranks} ({seconds(self.seconds)}): {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecovery(Record):
    """One rank finished its part (``role``) in a recovery that keeps the layout."""

    generation: int
    """Generation number of the membership that this recovery establishes."""
    rank: int
    """Rank that reports this event."""
    stage: int
    """Pipeline stage of the rank, counted from 0."""
    role: str
    """Role of the rank. ``replays``: its stage loads a window and computes iterations again. ``receives``: it gets its
    state from living ranks. ``serves``: it sends its log to a stage that replays, or its state to a rank of its stage.
    ``waits``: none of these."""
    start_iteration: int
    """Newest iteration of the state from which the stage replays, or ``iteration`` if the stage does not replay."""
    iteration: int
    """Newest iteration of the state from which all ranks continue (the target)."""
    num_iterations: int
    """Number of iterations that this rank replayed; 0 if its role is not ``replays``."""
    num_forward_passes: int
    """Number of forward passes of this rank: microbatches times the rank's model chunks, in all replayed iterations."""
    bytes_moved: int
    """Bytes of the upstream log and of state that this rank sent or received, without the bytes of a window."""
    is_kept: bool = False
    """Whether the rank kept its model, gradient buffers and optimizer; false if it had to build them."""
    built: str = ""
    """Parts that the rank had to build. ``kept``: none, because it kept all (see ``is_kept``). ``in_advance``: none,
    because all were built in advance. ``optimizer``: only the optimizer, because the model was built in advance for
    another rank with the same model. ``all``: every part. Empty in files of earlier versions."""
    why_built: str = ""
    """Reason, if ``built`` is ``all``, why the rank used no parts that were built in advance."""
    build_seconds: float = 0.0
    """Seconds that the rank needed to build parts, or to prepare parts that were kept or built in advance."""
    state_bytes: int = 0
    """Bytes of weights, gradients, master weights and moments on the rank."""
    staged_bytes: int = 0
    """Most bytes of temporary copies at one time while state moved; ``state_bytes`` does not include them."""
    began_unix_seconds: float
    """Time at which the recovery began on this rank, in seconds since 1970 by the clock of its node."""
    seconds: float
    """Duration of this rank's part of the recovery in seconds."""

    def describe(self) -> Note | None:
        if self.role == "receives":
            received = f"{self.bytes_moved:,} bytes from living ranks"
            return Note(
                "good", f"rank {self.rank} of stage {self.stage} received {received} in {seconds(self.seconds)}"
            )
        if self.role != "replays":
            return None  # the other ranks compute nothing, and each of them reports this event
        replayed = f"replayed {counted(self.num_iterations, 'iteration')} up to"
        work = replayed if self.num_iterations else "loaded the window of iteration"
        return Note(
            "good", f"rank {self.rank} of stage {self.stage} {work} {self.iteration} in {seconds(self.seconds)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBuilt(Record):
    """A rank of a spare node has built a model, gradient buffers and an optimizer in advance."""

    node: int
    """The spare node."""
    local_rank: int
    """Number of the process on its node."""
    stage: int
    """Pipeline stage that was built, counted from 0."""
    places: tuple[int, ...]
    """Positions, in the layout, of the nodes whose model was built. The rank needs this model if its node replaces one
    of these nodes."""
    state_bytes: int
    """Bytes of weights, gradients, master weights and moments that were allocated."""
    seconds: float
    """Duration of the build in seconds."""

    def describe(self) -> Note:
        built = f"local rank {self.local_rank} of spare node {self.node} has built stage {self.stage} in advance"
        return Note("info", f"{built} in {seconds(self.seconds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(Record):
    """A rank died or raised an error."""

    rank: int
    """Rank that failed."""
    node: int | None = None
    """Node of the rank."""
    exit_code: int | None = None
    """Exit code of the rank's process; absent if a signal ended it."""
    signal: str | None = None
    """Signal that ended the rank's process, e.g. ``SIGKILL``."""
    first: bool = False
    """Whether this rank was the first rank of the job to fail."""
    is_consequence: bool = False
    """Whether another failure has caused the rank's error: the error only states that another rank closed a
    connection."""
    phase: str | None = None
    """Last phase that the rank reported."""
    iteration: int | None = None
    """Last iteration that the rank reported."""
    error: str | None = None
    """Last line of the rank's traceback."""

    @property
    def ending(self) -> str:
        """Cause of the rank's end as text: ``SIGKILL``, ``exit code 1`` or ``lost``."""
        return self.signal or ("lost" if self.exit_code is None else f"exit code {self.exit_code}")

    def describe(self) -> Note:
        node = "" if self.node is None else f" on node {self.node}"
        iteration = "" if self.iteration is None else f" in iteration {self.iteration}"
        if self.is_consequence:
            cause = "another rank closed the connection, a consequence of the first failure"
            return Note("bad", f"rank {self.rank}{node} ended{iteration} ({self.ending}): {cause}")
        first = ", the first to fail" if self.first else ""
        error = f": {self.error}" if self.error else ""
        return Note("bad", f"rank {self.rank}{node} died{iteration} ({self.ending}{first}){error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Record):
    """A node was lost: its agent ended or does not answer."""

    node: int
    """Node that was lost; the number of a node never changes."""
    reason: str
    """Reason why the node counts as lost."""

    def describe(self) -> Note:
        return Note("bad", f"node {self.node} was lost: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStartFailed(Record):
    """A node that was started during the job did not join: its agent or a rank ended or was not ready in time."""

    node: int
    """Node that did not join; the number of a node never changes."""
    reason: str
    """Cause, e.g. the agent's exit code and last output, or the rank that ended and its exit code or signal."""
    starts_again: bool
    """Whether the node is started again (``nodes.max_node_restarts``)."""

    def describe(self) -> Note:
        again = "starting it again" if self.starts_again else "it is not started again"
        return Note("bad", f"node {self.node} did not join: {self.reason}; {again}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRestarted(Record):
    """All ranks were started again after a failure, and continue the run."""

    generation: int
    """Number of the new generation, counted from 0. Each restart and each change of the membership adds 1."""
    reason: str
    """Reason for the end of the previous generation."""
    failed_ranks: tuple[int, ...]
    """Ranks that failed, in the order of failures. Ranks that ended because of these failures are left out."""
    iteration: int
    """Iteration in which the first rank failed; if a node was lost, the latest iteration of any rank. 0 before the
    first iteration."""
    num_restarts_left: int
    """Number of restarts that are still allowed without progress. Progress resets it to ``recovery.max_restarts``."""
    nodes: tuple[int, ...] = ()
    """Nodes of the new generation, in the order of their ranks."""

    def describe(self) -> Note:
        where = f" in iteration {self.iteration}" if self.iteration else ""
        left = f"generation {self.generation}; restarts left without progress: {self.num_restarts_left}"
        if self.nodes != tuple(range(len(self.nodes))):
            left = f"nodes {', '.join(map(str, self.nodes))}; {left}"
        return Note("warning", f"starting all ranks again ({left}): {self.reason}{where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerWaits(Record):
    """The controller cannot write its journal because the disk is full. It reacts to no failure until space is free."""

    problem: str
    """Error of the write."""

    def describe(self) -> Note:
        effect = "until disk space is free, it does not react to lost ranks or nodes"
        text = f"the controller cannot write to disk ({self.problem}); {effect}"
        return Note("bad", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerGoesOn(Record):
    """The disk has space again, and the controller now reacts to failures that occurred while it waited."""

    seconds: float
    """Duration of the wait for space, in seconds."""

    def describe(self) -> Note:
        return Note("good", f"disk space is free again: the controller continues after {seconds(self.seconds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolderMissing(Record):
    """The run's folder was deleted or moved while the job ran."""

    path: str
    """Path of the run's folder."""

    def describe(self) -> Note:
        text = (
            f"the run's folder {self.path} was deleted or moved away. Nothing more is written, and the next loss "
            "of a rank ends "
        )
        return Note("bad", f"{text}the job: restore the folder, or stop the job")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReplaced(Record):
    """The job's controller ended or did not answer, and another controller continues from its journal."""

    reason: str
    """Reason why the earlier controller was replaced."""

    def describe(self) -> Note:
        return Note("warning", f"a new controller replaces the earlier one: {self.reason}")
