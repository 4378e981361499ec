"""Injects faults into ranks at named phases of an iteration, for tests and fault campaigns.

A failpoint is a fault in a named phase, written as a call, e.g. ``kill(rank=1, at_iteration=7, phase="backward")``. Its
fault happens once in each process that it matches. A record is on disk *before* the fault happens, so that a test can
prove the injection. A failpoint with ``generation`` matches only in this generation, and its ``rank`` is the rank of a
process in this generation. A failpoint without ``generation`` matches in every generation. Its ``rank`` is then the
rank that a process had when it called ``arm``, because the rank may change with the membership.

Training calls ``hit`` in each phase. ``hit`` also reports the rank's progress to the function that ``watch`` has set.
If there is neither a failpoint nor such a function, ``hit`` only evaluates two conditions.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.events import FailpointHit
from megatron_ft.serde import parse_call

ITERATION_PHASES = (
    "data",
    "forward",
    "dispatch",
    "backward",
    "grad_sync",
    "vote_before",
    "vote_inside",
    "vote_after",
    "update",
    "gather",
    "capture",
    "replicate",
)
"""Phases of a training iteration, in order."""

PHASES = (
    "prebuild",
    "build",
    "replay",
    "migrate",
    "migrate_step",
    "migrate_build",
    *ITERATION_PHASES,
    "checkpoint",
    "teardown",
    "reform_join",
    "reform_move",
    "reform_build",
)
"""Phases that a failpoint can name, in order. ``prebuild``: before a spare builds a model in advance. In this phase,
``rank`` is the index of the spare's process among the processes of all nodes, in the order of nodes. ``migrate``:
before experts move. ``migrate_step``: before each step of a rebalance. ``migrate_build``: before the model is built for
a new placement, which happens only if a rank gets another number of experts. Three phases occur while a membership is
formed. ``reform_join``: before ranks connect. ``reform_move``: before state moves and, with the distributed optimizer,
once more before the optimizer's shards move. ``reform_build``: before the model is built. In these three phases, the
iteration is the last one of the previous membership."""

_SELECTORS: dict[str, type] = {
    "rank": int,
    "node": int,
    "at_iteration": int,
    "generation": int,
    "phase": str,
    "passes": int,
}
_OPTIONS: dict[str, dict[str, type]] = {
    "kill": {},
    "stop": {},
    "exit": {"code": int},
    "raise": {"message": str},
    "delay": {"seconds": float},
}
_REQUIRED = {"exit": "code", "delay": "seconds"}
_KEY = "testing.failpoints"

Record = dict[str, Any]


class InjectedFault(RuntimeError):
    """Error that the action ``raise`` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """A fault to inject in ``phase``. A selector (``rank``, ``node`` etc.) that is None matches any value."""

    action: str
    phase: str
    rank: int | None = None
    node: int | None = None
    at_iteration: int | None = None
    generation: int | None = None
    passes: int = 1
    """The fault happens when the phase is reached for the ``passes``-th time with matching selectors."""
    code: int = 0
    message: str = "injected fault"
    seconds: float = 0.0
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> "Failpoint":
        """Parse one failpoint.

        Raises:
            ConfigError: the action, a keyword or the phase is unknown, or a value has a wrong type or is below 0.
        """
        action, values = parse_call(_KEY, text, _OPTIONS, 'kill(rank=1,at_iteration=7,phase="backward")')
        types = _SELECTORS | _OPTIONS[action]
        for name, value in values.items():
            if name not in types:
                raise ConfigError.of(_KEY, text, f"must not have the keyword {name}; allowed: {', '.join(types)}")
            if types[name] is float and type(value) is int:
                values[name] = float(value)
            elif type(value) is not types[name]:
                raise ConfigError.of(_KEY, text, f"must give {name} as a literal of type {types[name].__name__}")
            elif isinstance(value, int) and value < 0:
                raise ConfigError.of(_KEY, text, f"must give {name} a value of at least 0")
        _check_values(text, action, values)
        return cls(action=action, text=text.strip(), **values)  # type: ignore[arg-type]


def _check_values(text: str, action: str, values: dict[str, object]) -> None:
    if values.get("phase") not in PHASES:
        raise ConfigError.of(_KEY, text, f"must set phase to one of {', '.join(PHASES)}")
    if action in _REQUIRED and _REQUIRED[action] not in values:
        raise ConfigError.of(_KEY, text, f"must give the keyword {_REQUIRED[action]}, because the action is {action}")
    if int(values.get("passes", 1)) < 1:  # type: ignore[call-overload]
        raise ConfigError.of(_KEY, text, "must give `passes` a value of at least 1")
    if not 0 <= int(values.get("code", 0)) <= 255:  # type: ignore[call-overload]
        raise ConfigError.of(_KEY, text, "must give `code` a value from 0 to 255")
    if not float(values.get("seconds", 0.0)) >= 0.0:  # type: ignore[arg-type]
        raise ConfigError.of(_KEY, text, "must give `seconds` a value of at least 0")


def append_to(path: Path) -> Callable[[Record], None]:
    """Return a function that appends a record to ``path`` as a JSON line, and waits until the line is on disk.

    Several ranks may append to the same file, because each line is one ``write`` in append mode.
    """

    def record(hit_record: Record) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # One write in append mode is not mixed with those of other ranks.
            os.write(descriptor, json.dumps(hit_record).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    return record


ReportProgress = Callable[[int, str], None]
"""Function that is called with the iteration and phase which a rank has reached."""


@dataclass
class _Watch:
    report: ReportProgress
    last: tuple[str, int] | None = None


@dataclass
class _Armed:
    waiting: list[Failpoint]
    """Failpoints whose fault has not happened yet."""
    first_rank: int
    """Rank of the process when ``arm`` was called. A failpoint without a generation refers to this rank."""
    rank: int
    """Rank of the process in the present generation."""
    node: int
    record: Callable[[Record], None]
    generation: int
    num_passes: Counter[Failpoint] = field(default_factory=Counter)

    @property
    def mine(self) -> tuple[Failpoint, ...]:
        """Return the failpoints that match this process and whose fault has not happened."""
        return tuple(
            failpoint
            for failpoint in self.waiting
            # A failpoint without a generation names a process by its first rank, whatever its later ranks are.
            if failpoint.rank in (None, self.first_rank if failpoint.generation is None else self.rank)
        )

    def due(self, phase: str, iteration: int) -> list[Failpoint]:
        """Return the failpoints of this process that match the phase, the iteration and the present generation."""
        return [
            failpoint
            for failpoint in self.mine
            if failpoint.phase == phase
            and failpoint.at_iteration in (None, iteration)
            and failpoint.generation in (None, self.generation)
        ]


_armed: _Armed | None = None
_watch: _Watch | None = None


def watch(report: ReportProgress | None) -> None:
    """Call ``report`` whenever this process reaches another phase or iteration. If ``report`` is None, end these calls.

    If a fault is due at this phase, ``report`` is called before the fault.
    """
    global _watch
    _watch = None if report is None else _Watch(report)


def arm(specs: Iterable[str], *, rank: int, node: int, record: Callable[[Record], None], generation: int = 0) -> None:
    """Activate the failpoints of ``specs`` that match this process. The failpoints of earlier calls are removed.

    Args:
        specs: e.g. ``config.testing.failpoints``.
        rank: present rank of the process; ``enter`` changes it.
        record: called before the fault with the JSON object of a ``FailpointHit`` event, which it must write to disk.
        generation: present generation of the job.

    Raises:
        ConfigError: a failpoint cannot be parsed.
    """
    global _armed
    known = [failpoint for failpoint in map(Failpoint.parse, specs) if failpoint.node in (None, node)]
    # Failpoints of later generations are kept, because the process may still enter these generations.
    waiting = [found for found in known if found.generation is None or found.generation >= generation]
    _armed = _Armed(waiting, rank, rank, node, record, generation) if waiting else None


def enter(generation: int, *, rank: int) -> None:
    """Set the present rank and generation of this process. Failpoints of other generations have no effect then."""
    if _armed is not None:
        _armed.generation, _armed.rank = generation, rank


def unfired() -> tuple[Failpoint, ...]:
    """Return the failpoints of all generations that match this process and whose fault has not happened."""
    return () if _armed is None else _armed.mine


def hit(phase: str, iteration: int) -> None:
    """Note that this process has reached ``phase`` of ``iteration``. If a failpoint matches, record and inject its
    fault.

    Raises:
        InjectedFault: a matching failpoint has the action ``raise``.
    """
    if _watch is not None and _watch.last != (phase, iteration):
        # The progress is reported before the fault that is armed here, so that the failure report names this phase.
        _watch.last = (phase, iteration)
        _watch.report(iteration, phase)
    if _armed is None:
        return
    assert phase in PHASES, f"unknown phase {phase}"
    for failpoint in _armed.due(phase, iteration):
        _armed.num_passes[failpoint] += 1
        if _armed.num_passes[failpoint] >= failpoint.passes:
            _fire(_armed, failpoint, iteration)


def _fire(armed: _Armed, failpoint: Failpoint, iteration: int) -> None:
    # The failpoint is removed first. A process continues after ``delay`` or SIGCONT, and must not fire it again.
    armed.waiting.remove(failpoint)
    hit_event = FailpointHit(
        time_unix_seconds=time.time(),
        action=failpoint.action,
        phase=failpoint.phase,
        iteration=iteration,
        rank=armed.rank,
        node=armed.node,
        failpoint=failpoint.text,
    )
    # The record is on disk before the fault: without it, a test does not count the fault as injected.
    armed.record(hit_event.to_record())
    match failpoint.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(failpoint.code)
        case "raise":
            raise InjectedFault(f"{failpoint.message} (rank {armed.rank}, iteration {iteration}, {failpoint.phase})")
        case "delay":
            time.sleep(failpoint.seconds)
