"""Events of ranks, nodes, controllers and recoveries; ``events.py`` has all events."""

from dataclasses import dataclass

from megatron_ft.formatting import counted, seconds
from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStarted(Record):
    """The ranks have restored a state and continue from it, after a recovery or in a new job of the run."""

    generation: int
    """Generation number of the ranks that continue from the restored state; 0 in a new job that continues the run."""
    strategy: str
    """Strategy that restored the state: ``living_state`` (surviving ranks have the whole state), ``localized_replay``
    (only stages that lost a rank replay), ``rollback`` (all ranks load a window), ``checkpoint`` or ``start_over``."""
    iteration: int
    """Newest iteration of the restored state, including replayed iterations."""
    source: str | None = None
    """Location of the loaded window if the strategy is ``rollback``: ``memory`` or ``persisted`` (on storage)."""
    declined: tuple[str, ...] = ()
    """States that would have been preferred to the restored state but could not be used, each with the reason."""

    def describe(self) -> Note:
        generation = f"generation {self.generation} " if self.generation else ""
        strategy = self.strategy if self.source is None else f"{self.strategy} ({self.source})"
        text = f"{generation}continues after iteration {self.iteration}: {strategy}"
        return Note("warning" if self.declined else "info", "; not used: ".join([text, *self.declined]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChanged(Record):
    """Nodes left or joined the job. The remaining ranks continue in their existing processes."""

    generation: int
    """Generation number of the new membership, counted from 0."""
    world_size: int
    """Number of ranks in the new membership."""
    nodes: tuple[int, ...]
    """Numbers of the nodes in the new membership; the number of a node never changes."""
    reason: str
    """Reason why the previous membership ended."""
    iteration: int
    """Last iteration that is part of the state with which the new membership begins."""
    seconds: float
    """Seconds from the decision to change the membership until the first rank was ready."""
    joining: tuple[int, ...] = ()
    """Nodes whose ranks received their state from ranks of other nodes. These nodes had no state, or the state of
    another iteration. This includes a node that was lost and restarted within one iteration."""
    schedule: tuple[str, ...] = ()
    """Entries for ``testing.membership_schedule``. With them, another job repeats all membership changes since the
    commit of ``iteration``. They replace the entries in earlier events of the same ``iteration``. Empty with
    ``recovery.keep_layout``."""

    def describe(self) -> Note:
        joining = f", {list(self.joining)} of them joining," if self.joining else ""
        ranks = (
            f"{self.world_size} ranks on nodes {list(self.nodes)}{joining} continue after iteration {self.iteration}"
        )
        return Note("warning", f"{ranks} ({seconds(self.seconds)}): {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecovery(Record):
    """A rank finished its work in a recovery that keeps the layout; ``role`` is the kind of work."""

    generation: int
    """Generation number of the membership that this recovery establishes."""
    rank: int
    """Rank that reports this event."""
    stage: int
    """Pipeline stage of the rank, counted from 0."""
    role: str
    """Role of the rank. ``replays``: its stage loads a window and computes iterations again. ``receives``: it gets its
    state from surviving ranks. ``serves``: it sends its upstream log to a stage that replays, or its state to a rank of
    its stage. ``waits``: none of these."""
    start_iteration: int
    """Newest iteration of the window that the rank's stage loads before it replays; equal to ``iteration`` if the stage
    does not replay."""
    iteration: int
    """Last iteration that is part of the state from which all ranks continue."""
    num_iterations: int
    """Number of iterations that this rank replayed; 0 if its role is not ``replays``."""
    num_forward_passes: int
    """Number of forward passes of this rank in all replayed iterations: microbatches times the rank's model chunks."""
    bytes_moved: int
    """Bytes of the upstream log and of state that this rank sent or received. Bytes of windows do not count."""
    is_kept: bool = False
    """Whether the rank kept its model, gradient buffers and optimizer; false if it had to build them."""
    built: str = ""
    """Part that the rank had to build (model, gradient buffers, optimizer). ``kept``: nothing, see ``is_kept``.
    ``in_advance``: nothing, it was built in advance. ``optimizer``: only the optimizer, the model was built in advance
    for another rank with an equal model. ``all``: everything. Empty in files of earlier versions."""
    why_built: str = ""
    """Reason why the rank could not use a model that was built in advance; only if ``built`` is ``all``."""
    build_seconds: float = 0.0
    """Seconds to build the model, gradient buffers and optimizer, or to prepare existing ones for use."""
    state_bytes: int = 0
    """Bytes of the rank's weights, gradients, master weights and optimizer moments."""
    staged_bytes: int = 0
    """Peak size in bytes of temporary copies while state moved; ``state_bytes`` does not include them."""
    began_unix_seconds: float
    """Time at which the recovery began on this rank, in seconds since 1970 by the clock of its node."""
    seconds: float
    """Duration of this rank's work in the recovery, in seconds."""

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
    """Number of the spare node."""
    local_rank: int
    """Index of the rank's process on its node."""
    stage: int
    """Pipeline stage whose model was built, counted from 0."""
    places: tuple[int, ...]
    """Positions, in the parallel layout, of the nodes that use this model. The rank needs the model if its node
    replaces the node at one of these positions."""
    state_bytes: int
    """Bytes that were allocated for weights, gradients, master weights and optimizer moments."""
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
    """Whether the failure of another rank caused this failure: the rank's error states only that another rank closed a
    connection."""
    phase: str | None = None
    """Last phase of an iteration that the rank reported."""
    iteration: int | None = None
    """Last iteration that the rank reported."""
    error: str | None = None
    """Last line of the rank's traceback."""

    @property
    def ending(self) -> str:
        """Text about the end of the rank's process: ``SIGKILL``, ``exit code 1`` or ``lost``."""
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
    """Reason why the node is considered lost."""

    def describe(self) -> Note:
        return Note("bad", f"node {self.node} was lost: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStartFailed(Record):
    """A node that was started during the job did not join it. Its agent or a rank ended, or was not ready in time."""

    node: int
    """Node that did not join; the number of a node never changes."""
    reason: str
    """Cause, e.g. the agent's exit code and last output, or the rank that ended and its exit code or signal."""
    starts_again: bool
    """Whether the job starts the node again, as ``nodes.max_node_restarts`` allows."""

    def describe(self) -> Note:
        again = "starting it again" if self.starts_again else "it is not started again"
        return Note("bad", f"node {self.node} did not join: {self.reason}; {again}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRestarted(Record):
    """After a failure, the job has started new processes for all ranks, which continue the run."""

    generation: int
    """Generation of the restarted ranks, counted from 0. Each restart and each change of the membership adds 1."""
    reason: str
    """Reason why the previous generation of ranks ended."""
    failed_ranks: tuple[int, ...]
    """Ranks that failed, in the order of failures. Ranks that only ended because other ranks failed are left out."""
    iteration: int
    """Iteration in which the first rank failed. If a node was lost, this is the latest iteration that any rank had
    begun; 0 if no rank had begun one."""
    num_restarts_left: int
    """Number of further restarts that the job may make. It is ``recovery.max_restarts`` again if ranks fail in a later
    iteration than in all earlier generations."""
    nodes: tuple[int, ...] = ()
    """Numbers of the nodes of the new generation, in the order of their ranks."""

    def describe(self) -> Note:
        where = f" in iteration {self.iteration}" if self.iteration else ""
        left = f"generation {self.generation}; restarts left without progress: {self.num_restarts_left}"
        if self.nodes != tuple(range(len(self.nodes))):
            left = f"nodes {', '.join(map(str, self.nodes))}; {left}"
        return Note("warning", f"starting all ranks again ({left}): {self.reason}{where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerWaits(Record):
    """The controller's disk is full, so it cannot write its journal. Until space is free, it reacts to no failure."""

    problem: str
    """Error with which the write of the journal failed."""

    def describe(self) -> Note:
        effect = "until disk space is free, it does not react to lost ranks or nodes"
        text = f"the controller cannot write to disk ({self.problem}); {effect}"
        return Note("bad", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerGoesOn(Record):
    """The controller's full disk has space again. The controller now reacts to failures that occurred meanwhile."""

    seconds: float
    """Seconds that the controller waited for disk space."""

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
    """The job's controller ended or did not answer. A new controller process continues from its journal."""

    reason: str
    """Reason why the earlier controller was replaced."""

    def describe(self) -> Note:
        return Note("warning", f"a new controller replaces the earlier one: {self.reason}")
