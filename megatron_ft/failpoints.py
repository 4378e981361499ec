"""Named points where tests and campaigns inject faults.

A point is a phase of an iteration, so it is also where a rank reports its progress (``watch``). A failpoint is a call
with literal keywords, e.g. ``kill(rank=1, at_iteration=7, phase="backward")``. It fires in every rank that it matches,
once per process, so also in every generation unless it names one. It is recorded durably *before* the fault, so that a
trial can prove the injection. A process may become another rank when memberships change: if the failpoint names a
generation, ``rank`` is the number in that generation, otherwise the process's first number. Without failpoints and
watching functions ``hit`` costs two truth tests.
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
from megatron_ft.reading import parse_call

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
"""Phases of an iteration, in order."""

PHASES = (
    "build",
    "replay",
    "migrate",
    "migrate_build",
    *ITERATION_PHASES,
    "checkpoint",
    "teardown",
    "reform_join",
    "reform_move",
    "reform_build",
)
"""Phases that a failpoint can name, in order. ``migrate`` is before experts move, ``migrate_build`` before the model is
built for the new placement. The last three are reached while a membership is formed: before the ranks connect, before
state moves, before the model is built; their iteration is the last one before that membership."""

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
    """A fault to inject, and where; a selector of None matches anything."""

    action: str
    phase: str
    rank: int | None = None
    node: int | None = None
    at_iteration: int | None = None
    generation: int | None = None
    passes: int = 1
    """Number of matching hits of the phase after which it fires."""
    code: int = 0
    message: str = "injected fault"
    seconds: float = 0.0
    text: str = ""


def parse(text: str) -> Failpoint:
    """Parse one failpoint.

    Raises:
        ConfigError: unknown action, keyword or phase; a value that is not a literal of the right type, or below 0.
    """
    action, values = parse_call(_KEY, text, _OPTIONS, 'kill(rank=1,at_iteration=7,phase="backward")')
    types = _SELECTORS | _OPTIONS[action]
    for name, value in values.items():
        if name not in types:
            raise ConfigError.of(_KEY, text, f"has no keyword {name}; it takes {', '.join(types)}")
        if types[name] is float and type(value) is int:
            values[name] = float(value)
        elif type(value) is not types[name]:
            raise ConfigError.of(_KEY, text, f"must give {name} as a literal of type {types[name].__name__}")
        elif isinstance(value, int) and value < 0:
            raise ConfigError.of(_KEY, text, f"must give {name} of at least 0")
    _check_values(text, action, values)
    return Failpoint(action=action, text=text.strip(), **values)  # type: ignore[arg-type]


def _check_values(text: str, action: str, values: dict[str, object]) -> None:
    if values.get("phase") not in PHASES:
        raise ConfigError.of(_KEY, text, f"must set phase to one of {', '.join(PHASES)}")
    if action in _REQUIRED and _REQUIRED[action] not in values:
        raise ConfigError.of(_KEY, text, f"must give {_REQUIRED[action]}")
    if int(values.get("passes", 1)) < 1:  # type: ignore[call-overload]
        raise ConfigError.of(_KEY, text, "must give passes, at least 1")
    if not 0 <= int(values.get("code", 0)) <= 255:  # type: ignore[call-overload]
        raise ConfigError.of(_KEY, text, "must give code, from 0 to 255")
    if not float(values.get("seconds", 0.0)) >= 0.0:  # type: ignore[arg-type]
        raise ConfigError.of(_KEY, text, "must give seconds of at least 0")


def append_to(path: Path) -> Callable[[Record], None]:
    """Make a recorder that appends each hit to ``path`` as a JSON line and returns once it is on disk.

    Each line is one ``write`` in append mode, so the ranks of a job may share the file.
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
"""Function that takes (iteration, phase)."""


@dataclass
class _Watch:
    report: ReportProgress
    last: tuple[str, int] | None = None


@dataclass
class _Armed:
    waiting: list[Failpoint]
    """Failpoints that have not fired."""
    first_rank: int
    """Rank of the process when ``arm`` was called."""
    rank: int
    """Rank of the process in the present generation."""
    node: int
    record: Callable[[Record], None]
    generation: int
    num_passes: Counter[Failpoint] = field(default_factory=Counter)

    @property
    def mine(self) -> tuple[Failpoint, ...]:
        """Return the failpoints that match this process."""
        return tuple(
            failpoint
            for failpoint in self.waiting
            # Without a generation the first number names the process, whatever rank it becomes later.
            if failpoint.rank in (None, self.first_rank if failpoint.generation is None else self.rank)
        )

    def due(self, phase: str, iteration: int) -> list[Failpoint]:
        """Return the failpoints of this process that match the phase and iteration."""
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
    """Call ``report`` at every hit whose phase or iteration differs from that of the previous hit; None stops this.

    The call comes before a fault that is armed at the same point.
    """
    global _watch
    _watch = None if report is None else _Watch(report)


def arm(specs: Iterable[str], *, rank: int, node: int, record: Callable[[Record], None], generation: int = 0) -> None:
    """Arm the failpoints of ``specs`` that match this process, in place of those armed before.

    Args:
        specs: e.g. ``config.testing.failpoints``.
        rank: present rank of the process; ``enter`` changes it.
        record: called with a ``FailpointHit`` record before the fault; must be durable (``append_to``).
        generation: present generation of the job.

    Raises:
        ConfigError: a failpoint that does not parse.
    """
    global _armed
    known = [failpoint for failpoint in map(parse, specs) if failpoint.node in (None, node)]
    # Later generations count: the process may still enter them. Earlier ones cannot come back.
    waiting = [found for found in known if found.generation is None or found.generation >= generation]
    _armed = _Armed(waiting, rank, rank, node, record, generation) if waiting else None


def enter(generation: int, *, rank: int) -> None:
    """Continue as ``rank`` in ``generation``: from now on failpoints that name other generations do not fire."""
    if _armed is not None:
        _armed.generation, _armed.rank = generation, rank


def unfired() -> tuple[Failpoint, ...]:
    """Return the failpoints of this process, of any generation, that have not fired."""
    return () if _armed is None else _armed.mine


def hit(phase: str, iteration: int) -> None:
    """Report that this process has reached ``phase`` of ``iteration``; an armed fault happens here.

    Raises:
        InjectedFault: the action ``raise`` is armed here.
    """
    if _watch is not None and _watch.last != (phase, iteration):
        # Reported before a fault that is armed here, so that the failure report names this phase.
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
    # Before the fault: ``delay`` and a continued ``stop`` return, and must not fire again.
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
    # On disk before the fault, which may leave no time for anything: a trial counts only with this record.
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
