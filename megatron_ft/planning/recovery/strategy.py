"""``Strategy``: a way to recover a job from a loss of nodes. It computes the ``Cost`` of the recovery, if possible.

A strategy is a frozen dataclass in a file of its own. ``costs.STRATEGIES`` lists all strategies in the order in which
they are tried. ``dry_run``, ``tools/can_recover`` and the doctor call the same method ``cost``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol

from megatron_ft.config.requirements import Requirement
from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.cost.recovery_time import Prediction, RecoveryTimes, RecoveryWork
from megatron_ft.planning.placement.layout import Holdings
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.state.declined import Declined

NOT_RUNNING = "the job is not running"

Place = Callable[[tuple[int, ...], int, Holdings], PlacementPlan]
"""Function that plans the placement of expert replicas in one pipeline stage of a membership. Its arguments are the
node of each rank of the membership, the stage, and the experts that the ranks of the stage hold."""

Medium = Literal["memory", "persisted"]
"""Location of a window: the memory of nodes, or storage."""
SavedKind = Literal["memory", "persisted", "checkpoint"]
"""Kind of saved state: a window in the memory of nodes, a window on storage, or a dense checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Saved state of a run, according to the records in its folder."""

    iteration: int
    """Newest committed iteration."""
    memory_start: int | None = None
    """Start iteration of the newest committed window in memory."""
    persisted_start: int | None = None
    """Start iteration of the newest complete persisted window."""
    memory_last: int | None = None
    """Iteration whose state a replay of the newest window in memory restores; None if it is not recorded."""
    persisted_last: int | None = None
    """Iteration whose state a replay of the newest persisted window restores; None if it is not recorded."""
    checkpoint: int | None = None
    """Iteration of the newest complete dense checkpoint."""
    placed_from: int = 0
    """First iteration with the present placement of experts; 0 without expert replicas."""

    def again_from(self, start: int) -> int:
        """Return the number of iterations that run again if ranks load the state after iteration ``start``."""
        return max(0, self.iteration - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Nodes that are lost at the same time, and the state that is left."""

    nodes: tuple[int, ...]
    """Lost nodes, ascending."""
    remaining: tuple[int, ...]
    """Present nodes that are not lost, ascending."""
    is_gone: bool
    """Whether the nodes are lost with their memory; otherwise only their ranks have died."""
    missing: tuple[OperatorId, ...]
    """Operators whose complete state is not on the ranks that continue. If too few nodes remain for any layout, all
    ranks on the remaining nodes count as continuing."""
    ends_job: bool = False
    """Whether all processes of the job die, except snapshot servers that outlive it."""
    restart: Literal["all", "fewer"] | None
    """Nodes on which the job can restart its ranks by itself: as many as before (``all``), or only the remaining nodes
    (``fewer``). None if the job ends."""
    stored: Stored | None = None
    """Saved state of the run; if it is None, costs are upper bounds that follow from the configuration."""
    place: Place | None = None
    """Function that plans the placement on remaining nodes, to compute moved bytes; None if they are not required."""

    @classmethod
    def of(
        cls,
        facts: RecoveryFacts,
        nodes: Iterable[int],
        *,
        is_gone: bool = True,
        ends_job: bool = False,
        place: Place | None = None,
        stored: Stored | None = None,
    ) -> "Loss":
        """Describe the loss of ``nodes`` for a job. The fields of ``Loss`` describe the other arguments.

        Raises:
            ConfigError: ``nodes`` contains a node that is not present.
        """
        lost = tuple(sorted(set(nodes)))
        if foreign := [node for node in lost if node not in facts.nodes]:
            raise ConfigError.of("lost node", foreign[0], f"must be one of the present nodes {list(facts.nodes)}")
        assert not ends_job or (lost == facts.nodes and not is_gone), "ends_job needs all nodes, with is_gone=False"
        remaining = tuple(node for node in facts.nodes if node not in lost)
        living = facts.ranks_without(lost)
        return cls(
            nodes=lost,
            remaining=remaining,
            is_gone=is_gone,
            missing=facts.missing_on(living),
            ends_job=ends_job,
            restart=None if ends_job else _restart(facts, lost, remaining, is_gone),
            stored=stored,
            place=place,
        )


def why_no_replacement(loss: Loss, facts: RecoveryFacts) -> str:
    """Return the reason why no other node can replace the lost nodes of a job that keeps its layout; empty if one can.
    A node whose ranks have died counts as lost: its ranks start again only with ``nodes.restart_lost_nodes``."""
    nodes, full, here = facts.config.nodes, f"launch.num_nodes={facts.config.launch.num_nodes}", facts.layout.nodes
    if facts.has_changed_layout:
        return f"the job has had fewer than {full} nodes since its ranks started, so no node replaces a lost node"
    if not facts.has_places:
        return f"the job has {len(here)} of {full} nodes, so its layout has changed, and no node replaces a lost node"
    if facts.can_replace(loss.nodes):
        return ""
    if nodes.restart_lost_nodes:
        worn = [node for node in loss.nodes if node in facts.worn_nodes]
        return (
            f"nodes.max_node_restarts={nodes.max_node_restarts}: nodes {worn} were lost too often to be started again"
        )
    left, spares, num_lost = facts.num_spare_nodes, f"nodes.num_spare_nodes={nodes.num_spare_nodes}", len(loss.nodes)
    if left == nodes.num_spare_nodes:
        return f"{spares} is less than the number of lost nodes, {num_lost}"
    return f"{spares}: too few spare nodes are left (left: {left}, needed for the lost nodes: {num_lost})"


def _restart(
    facts: RecoveryFacts, lost: Sequence[int], remaining: Sequence[int], is_gone: bool
) -> Literal["all", "fewer"] | None:
    if not facts.is_running or not facts.config.recovery.max_restarts:
        return None
    if not is_gone:
        return "all"
    if facts.keeps_layout and facts.can_replace(lost):
        return "all"  # other nodes first replace the lost nodes
    return "fewer" if facts.min_nodes is not None and len(remaining) >= facts.min_nodes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of the recovery from a loss of nodes by one strategy."""

    lost_nodes: tuple[int, ...]
    is_gone: bool
    """Whether the nodes are lost with their memory; otherwise only their ranks have died."""
    ends_job: bool = False
    """Whether all processes of the job die, except snapshot servers that outlive it."""
    strategy: str
    """Strategy that recovers the job."""
    is_automatic: bool
    """Whether the job continues without intervention, in its present processes or new ones. Otherwise the job ends; it
    can be started on all nodes with ``run.resume=auto``."""
    declined: tuple[Declined, ...] = ()
    """Strategies that were tried before ``strategy``, each with the reason why it cannot be used. For a rollback from
    storage, the reason why windows in memory are not used is included."""
    lost_operators: tuple[OperatorId, ...]
    """Operators whose complete state is not on the surviving ranks."""
    max_iterations: int | None
    """Largest possible number of committed iterations that run again; None if the size of a window is not measured."""
    moved_bytes: int | None = None
    """Bytes of state that surviving ranks send; if the layout changes, only the state of experts counts. None if these
    bytes were not computed or no state is sent."""
    is_bitwise: bool
    """Whether the run gives the same results as a run without failures, bit by bit. Otherwise sums are computed in
    another order, and results agree within a tolerance."""
    loses_updates: bool = False
    """Whether updates of experts are lost, because windows leave out experts. Then ``is_bitwise`` is false."""
    update_loss: str = ""
    """Text that states a bound of the lost updates; empty if ``loses_updates`` is false."""
    keeps_processes: bool
    """Whether the surviving ranks continue in their processes with their state."""
    medium: Medium | None = None
    """Location of the window that a rollback loads; None for other strategies."""
    stages: tuple[int, ...] = ()
    """Pipeline stages that replay while other stages keep their state; empty if all stages replay or none does."""
    restarted_by: str = "hand"
    """Starter of the job after it has ended: ``hand`` (the user) or ``Slurm``."""
    max_windows: int = 2
    """Largest possible number of windows whose iterations run again, used if ``max_iterations`` is None."""
    seconds: float | None
    """Predicted seconds from the failure until ranks have replayed all committed iterations and train again (see
    ``RecoveryTimes``). If iterations run again, this is an upper bound. None if it is not known."""
    work: RecoveryWork | None = None
    """Amount of work from which ``seconds`` is predicted; None if the job does not continue by itself."""
    why_no_seconds: tuple[str, ...]
    """Missing inputs without which ``seconds`` cannot be predicted, e.g. ``snapshot.iteration_seconds=null``."""
    is_recoverable: bool = True
    """Whether the job can continue from some state; otherwise it starts again at iteration 0."""

    @classmethod
    def in_processes(
        cls,
        strategy: str,
        loss: Loss,
        facts: RecoveryFacts,
        max_iterations: int | None,
        *,
        sent_bytes: int | None,
        **values: Any,
    ) -> "Cost":
        """Return the cost of a recovery in which the remaining ranks continue in their processes.

        Args:
            sent_bytes: largest number of bytes that one rank sends or receives; None if the transfers are not planned.
            values: other fields of the cost.
        """
        num_replaced = _num_replaced(loss, facts)
        num_nodes = len(facts.nodes if num_replaced or not loss.is_gone else loss.remaining)
        work = RecoveryWork(
            num_ranks=num_nodes * facts.config.launch.ranks_per_node,
            state_bytes=facts.state_bytes,
            restarts_processes=False,
            num_replaced_nodes=num_replaced,
            starts_ranks=not loss.is_gone and facts.has_places,
            sent_bytes=sent_bytes,
            again_iterations=max_iterations,
            again_unknown=facts.unmeasured,
            again_share=RecoveryTimes().share_of(
                len(values.get("stages", ())),
                facts.config.parallel.pipeline_model_parallel_size,
                shares_machine=facts.shares_machine,
            ),
        )
        predicted = _predict(work, facts)
        return cls(
            strategy=strategy,
            lost_nodes=loss.nodes,
            is_gone=loss.is_gone,
            is_automatic=True,
            max_iterations=max_iterations,
            keeps_processes=True,
            work=work,
            seconds=predicted.seconds,
            why_no_seconds=predicted.unknown,
            **values,
        )

    @classmethod
    def of_restart(
        cls, strategy: str, loss: Loss, facts: RecoveryFacts, max_iterations: int | None, **values: Any
    ) -> "Cost":
        """Return the cost of a recovery in which all ranks start again. ``values`` are other fields of the cost."""
        given = {"is_automatic": loss.restart is not None, **values}
        # A Slurm batch job starts or requeues the training command after it has ended.
        restarted_by = "hand" if facts.config.launch.node_launcher == "local" else "Slurm"
        num_nodes = len(loss.remaining if loss.restart == "fewer" else facts.nodes)
        work = RecoveryWork(
            num_ranks=num_nodes * facts.config.launch.ranks_per_node,
            state_bytes=facts.state_bytes,
            restarts_processes=True,
            tries_processes=bool(loss.remaining) and facts.config.may_lose_nodes,
            num_replaced_nodes=_num_replaced(loss, facts),
            sent_bytes=0,
            again_iterations=max_iterations,
            again_unknown=facts.unmeasured,
        )
        predicted = _predict(work, facts)
        if not given["is_automatic"]:
            predicted = Prediction(seconds=None, unknown=(f"the job is started again by {restarted_by}",))
        return cls(
            strategy=strategy,
            lost_nodes=loss.nodes,
            is_gone=loss.is_gone,
            ends_job=loss.ends_job,
            lost_operators=loss.missing,
            max_iterations=max_iterations,
            # Fewer ranks add the same numbers in another order.
            is_bitwise=loss.restart != "fewer" and not given.get("loses_updates"),
            keeps_processes=False,
            restarted_by=restarted_by,
            work=work if given["is_automatic"] else None,
            seconds=predicted.seconds,
            why_no_seconds=predicted.unknown,
            **given,
        )

    def validate(self) -> None:
        """Assert that the fields are consistent."""
        assert self.is_automatic or not self.keeps_processes, "processes continue although the job needs intervention"
        assert not (self.loses_updates and self.is_bitwise), "lost updates change the results"
        assert self.loses_updates == bool(self.update_loss), "lost updates have no bound, or a bound without a loss"
        assert self.is_recoverable or not self.keeps_processes, "processes continue without any state"
        # After the end of the job, only its snapshot servers can still have windows in memory.
        keeps_memory = self.is_automatic or self.ends_job
        assert keeps_memory or self.medium != "memory", "windows in memory are lost with the job"

    def summary(self) -> str:
        nodes = ", ".join(map(str, self.lost_nodes))
        what = "loss of" if self.is_gone else "death of all ranks of"
        what = "death of all processes of the job on" if self.ends_job else what
        noun = "node" if len(self.lost_nodes) == 1 else "nodes"
        again = f"iterations run again: {self.iterations}"
        return f"{what} {noun} {nodes}: {self.description}; {again}; {self.result}: {self.meaning}"

    @property
    def description(self) -> str:
        """Return the name of the strategy, with the location of the window or the stages that replay. If the job ends,
        add who starts it again."""
        text = self.strategy if self.medium is None else f"{self.strategy} ({self.medium})"
        text += f" (stage {', '.join(map(str, self.stages))})" if self.stages else ""
        return text if self.is_automatic else f"{text}, by {self.restarted_by}"

    @property
    def iterations(self) -> str:
        """Return ``max_iterations`` as text."""
        if self.max_iterations is None:
            return f"<= {self.max_windows} windows"
        return "0" if self.max_iterations == 0 else f"<= {self.max_iterations}"

    @property
    def predicted(self) -> str:
        """Return ``seconds`` as text."""
        if self.seconds is None:
            return "-"
        return f"{'<= ' if self.max_iterations else ''}{self.seconds:.2g} s"

    @property
    def result(self) -> str:
        """Return ``is_bitwise`` and ``loses_updates`` as text."""
        if self.loses_updates:
            return "loses expert updates"
        return "bitwise" if self.is_bitwise else "tolerance"

    @property
    def meaning(self) -> str:
        """Describe how exactly the results agree with those of a run without faults, or how many updates are lost."""
        if self.loses_updates:
            return self.update_loss
        if self.is_bitwise:
            return "every bit equals that of the undisturbed run"
        undisturbed = "within a tolerance of the undisturbed run"
        if self.keeps_processes:
            faultless = "a run without faults in which the same nodes leave at the same iterations"
            return f"every bit equals that of {faultless}; {undisturbed}"
        return f"{undisturbed}, because fewer ranks compute sums in another order"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _num_replaced(loss: Loss, facts: RecoveryFacts) -> int:
    if not loss.is_gone or not facts.can_replace(loss.nodes):
        return 0
    # On one machine, the processes of several new nodes compete for the same cores.
    return len(loss.nodes) if facts.shares_machine else 1


def _predict(work: RecoveryWork, facts: RecoveryFacts) -> Prediction:
    return RecoveryTimes().predict(
        work,
        link_bytes_per_second=facts.config.topology.link_bytes_per_second,
        iteration_seconds=facts.iteration_seconds,
    )


class Strategy(Protocol):
    """A way to recover a job from a loss of nodes."""

    name: ClassVar[str]
    """Name of the strategy in events, in ``tools/can_recover`` and in ``dry_run``."""
    requirements: ClassVar[tuple[Requirement, ...]]
    """Values that configuration keys must have so that a job can use the strategy."""
    reads: ClassVar[tuple[SavedKind, ...]]
    """Kinds of saved state that ranks load in a recovery by this strategy."""

    def cost(self, loss: Loss, facts: RecoveryFacts) -> Cost | Declined:
        """Compute the cost of the recovery from ``loss``, or return the reason why the strategy cannot be used."""
        ...
