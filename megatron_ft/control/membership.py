"""Who belongs to the job, and what happens next: a pure state machine.

Facts (``facts``) and a clock go in; a new state, a decision and its reason come out. Nothing here reads a clock, a
file or a socket: the controller drives it with real ones, tests and simulations with virtual ones.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from megatron_ft.control.facts import (
    Fact,
    KillRequested,
    NodeJoined,
    NodeLost,
    RankExited,
    RankRaised,
    RankReported,
    StopRequested,
    Tick,
)


class Phase(Enum):
    """Where the job stands."""

    FORMING = "forming"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    KILLING = "killing"
    ENDED = "ended"


class Decision(Enum):
    """What the controller has to do now."""

    WAIT = "wait"
    START = "start"
    RESTART = "restart"
    STOP = "stop"
    KILL = "kill"
    END = "end"


class Outcome(Enum):
    """How the job ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipPolicy:
    """Knobs of the decisions."""

    num_nodes: int
    ranks_per_node: int
    start_timeout_seconds: float
    stop_timeout_seconds: float
    failure_grace_seconds: float = 2.0
    """After the first death the others may say why they end, too, for so long."""
    kill_timeout_seconds: float = 10.0
    """Killed ranks nobody reports for so long are given up."""
    max_restarts: int = 0
    """Times in a row that all ranks are started again without the job getting further than before."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Node of a global rank."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Global ranks of ``node``."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One death: of a rank, or of a node (``rank`` is ``None``), or of nobody (both ``None``: start timed out)."""

    at_seconds: float
    rank: int | None = None
    node: int | None = None
    iteration: int = 0
    """Last iteration the rank reached, 0 before the first."""
    sudden: bool = False
    """A lost node, or a signal that no lost peer brings about: not an error that a rank saw, nor an abort."""
    final: bool = False
    """Another try cannot mend it."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the controller knows. ``deadline_seconds`` is on the controller's clock, ``at_seconds`` on the agents'."""

    phase: Phase = Phase.FORMING
    generation: int = 0
    deadline_seconds: float | None = None
    joined: frozenset[int] = frozenset()
    reported: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    failures: tuple[Failure, ...] = ()
    """Deaths of this generation."""
    survived: tuple[tuple[Failure, ...], ...] = ()
    """Deaths of each earlier generation."""
    interrupted: bool = False
    furthest_iteration: int = 0
    """Furthest iteration in which an earlier generation failed."""
    num_restarts: int = 0
    """Restarts since the job last got further."""

    @property
    def first_failure(self) -> Failure | None:
        """The earliest death of this generation, see ``first_of``."""
        return first_of(self.failures)

    @property
    def num_fruitless_restarts(self) -> int:
        """Restarts in a row that got the job no further than where it had failed before.

        The first rank to fail tells: what fails at the same place each time fails in the same iteration of that rank.
        """
        first = self.first_failure
        return 0 if first is not None and first.iteration > self.furthest_iteration else self.num_restarts

    @property
    def outcome(self) -> Outcome:
        """How the job ended, or would if it ended now."""
        if self.failures:
            return Outcome.FAILED
        return Outcome.INTERRUPTED if self.interrupted else Outcome.FINISHED


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """The earliest death; later ones may only be its consequences.

    On a busy machine peers can speak of a killed rank before its exit is seen: a sudden death comes first among
    those within ``SAME_TIME_SECONDS`` of the earliest.
    """
    earliest = min((failure.at_seconds for failure in failures), default=0.0)
    close = [failure for failure in failures if failure.at_seconds <= earliest + SAME_TIME_SECONDS]
    return min(close, key=lambda failure: (not failure.sudden, failure.at_seconds), default=None)


@dataclass(frozen=True, slots=True)
class Step:
    """One move of the state machine."""

    state: State
    decision: Decision
    reason: str


SAME_TIME_SECONDS = 1.0
_REASONS = {Outcome.FINISHED: "all ranks have finished", Outcome.INTERRUPTED: "asked to stop"}
_BEFORE_STOP = (Phase.FORMING, Phase.STARTING, Phase.RUNNING)


def initial(policy: MembershipPolicy, now_seconds: float) -> State:
    """The state of a job nobody joined yet."""
    return State(deadline_seconds=now_seconds + policy.start_timeout_seconds)


def advance(policy: MembershipPolicy, state: State, fact: Fact, now_seconds: float) -> Step:
    """Take in one fact and decide.

    Args:
        now_seconds: the controller's monotonic clock.
    """
    if state.phase is Phase.ENDED:
        return Step(state, Decision.WAIT, "the job has ended")
    observed = _observe(policy, state, fact)
    for rule in (_restart, _end, _killed_for_nothing, _kill, _stop, _time_out, _go_on):
        step = rule(policy, observed, fact, now_seconds)
        if step is not None:
            return step
    return Step(observed, Decision.WAIT, f"{observed.phase.value}")


def _observe(policy: MembershipPolicy, state: State, fact: Fact) -> State:
    match fact:
        case NodeJoined(node):
            return replace(state, joined=state.joined | {node})
        case RankReported(rank):
            return replace(state, reported=state.reported | {rank})
        case RankRaised(rank, at_seconds, iteration, final):
            detail = f"rank {rank} raised"
            failure = Failure(rank=rank, at_seconds=at_seconds, iteration=iteration, final=final, detail=detail)
            return _fail(state, failure)
        case RankExited(rank, returncode, at_seconds, done, iteration):
            state = replace(state, gone=state.gone | {rank})
            detail = f"rank {rank} {describe_returncode(returncode)}"
            if done and returncode == 0:
                return state
            sudden = returncode < 0 and -returncode not in (signal.SIGABRT, signal.SIGTERM)
            failure = Failure(rank=rank, at_seconds=at_seconds, iteration=iteration, sudden=sudden, detail=detail)
            return _fail(state, failure)
        case NodeLost(node, at_seconds, detail):
            state = replace(state, gone=state.gone | set(policy.ranks_of(node)))
            detail = f"node {node} was lost: {detail}"
            return _fail(state, Failure(node=node, at_seconds=at_seconds, sudden=True, detail=detail))
        case StopRequested() | KillRequested():
            return replace(state, interrupted=True)
    return state


def _fail(state: State, failure: Failure) -> State:
    """Add a death; those we caused by killing do not count, and a rank dies once."""
    known = any(old.rank == failure.rank and old.node == failure.node for old in state.failures)
    if state.phase is Phase.KILLING or known:
        return state
    return replace(state, failures=(*state.failures, failure))


def _restart(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    """Start all ranks again once the last one is gone, where ranks alone failed and another try may mend it."""
    first = state.first_failure
    if first is None or first.final or state.interrupted or len(state.gone) < policy.world_size:
        return None
    if any(failure.rank is None for failure in state.failures):
        return None
    if state.num_fruitless_restarts >= policy.max_restarts:
        return None
    restarted = State(
        phase=Phase.STARTING,
        generation=state.generation + 1,
        deadline_seconds=now + policy.start_timeout_seconds,
        joined=state.joined,
        survived=(*state.survived, state.failures),
        furthest_iteration=max(state.furthest_iteration, first.iteration),
        num_restarts=state.num_fruitless_restarts + 1,
    )
    return Step(restarted, Decision.RESTART, first.detail)


def _end(policy: MembershipPolicy, state: State, fact: Fact, _now: float) -> Step | None:
    nothing_runs = state.phase is Phase.FORMING and (state.interrupted or state.failures)
    if len(state.gone) < policy.world_size and not nothing_runs:
        return None
    first = state.first_failure
    reason = first.detail if first else _REASONS[state.outcome]
    return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, reason)


def _killed_for_nothing(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase is not Phase.KILLING or not _late(state, now):
        return None
    missing = sorted(set(range(policy.world_size)) - state.gone)
    reason = f"no word of killed ranks {missing} for {policy.kill_timeout_seconds} s"
    return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, reason)


def _kill(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase is Phase.KILLING:
        return None
    overdue = state.phase is Phase.STOPPING and _late(state, now)
    nothing_to_save = state.phase is Phase.STARTING and state.interrupted
    if not overdue and not nothing_to_save and not isinstance(fact, KillRequested):
        return None
    reason = "ranks did not stop in time" if overdue else "asked to end"
    state = replace(state, phase=Phase.KILLING, deadline_seconds=now + policy.kill_timeout_seconds)
    return Step(state, Decision.KILL, reason)


def _stop(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase not in _BEFORE_STOP:
        return _hurry(policy, state, fact, now)
    first = state.first_failure
    if first is not None:
        state = replace(state, phase=Phase.STOPPING, deadline_seconds=now + policy.failure_grace_seconds)
        return Step(state, Decision.STOP, first.detail)
    if state.interrupted:
        state = replace(state, phase=Phase.STOPPING, deadline_seconds=now + policy.stop_timeout_seconds)
        return Step(state, Decision.STOP, "asked to stop")
    return None


def _hurry(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    """A death while stopping: the rest gets the shorter grace."""
    if state.phase is not Phase.STOPPING or not state.failures or isinstance(fact, Tick):
        return None
    deadline = min(state.deadline_seconds or now, now + policy.failure_grace_seconds)
    return Step(replace(state, deadline_seconds=deadline), Decision.WAIT, "stopping after a failure")


def _time_out(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase not in (Phase.FORMING, Phase.STARTING) or not _late(state, now):
        return None
    if state.phase is Phase.FORMING:
        missing = f"nodes {sorted(set(range(policy.num_nodes)) - state.joined)}"
    else:
        missing = f"ranks {sorted(set(range(policy.world_size)) - state.reported)}"
    detail = f"launch.start_timeout_seconds={policy.start_timeout_seconds:g}: no word of {missing}"
    state = replace(state, failures=(Failure(at_seconds=now, detail=detail),))
    if state.phase is Phase.FORMING:
        return Step(replace(state, phase=Phase.ENDED, deadline_seconds=None), Decision.END, detail)
    state = replace(state, phase=Phase.KILLING, deadline_seconds=now + policy.kill_timeout_seconds)
    return Step(state, Decision.KILL, detail)


def _go_on(policy: MembershipPolicy, state: State, fact: Fact, now: float) -> Step | None:
    if state.phase is Phase.FORMING and len(state.joined) == policy.num_nodes:
        state = replace(state, phase=Phase.STARTING, deadline_seconds=now + policy.start_timeout_seconds)
        return Step(state, Decision.START, f"all {policy.num_nodes} nodes joined")
    if state.phase is Phase.STARTING and len(state.reported) == policy.world_size:
        state = replace(state, phase=Phase.RUNNING, deadline_seconds=None)
        return Step(state, Decision.WAIT, f"all {policy.world_size} ranks reported")
    return None


def _late(state: State, now: float) -> bool:
    return state.deadline_seconds is not None and now >= state.deadline_seconds


def describe_returncode(returncode: int) -> str:
    """``exited with code 1`` or ``was killed by SIGKILL``."""
    if returncode == 0:
        return "exited with code 0 before its work was done"
    return f"exited with code {returncode}" if returncode > 0 else f"was killed by {signal_name(-returncode)}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
