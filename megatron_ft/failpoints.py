"""Named points where tests and campaigns inject faults.

The points are the phases of an iteration, so they are also where a rank says how far it is (``watch``).
A spec is a call with literal keywords, e.g. ``kill(rank=1, at_iteration=7, phase="backward")``. It fires in
every rank it matches, once per process (so in every generation, unless it names one), and is recorded durably *before*
the fault, so that a trial can prove that it injected. A process may become another rank as memberships change: where a
generation is named, the rank is that in it, else the first one. ``hit`` costs two truth tests while nothing is armed
and nobody watches.
"""

import ast
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.events import FailpointHit

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
"""Those that an iteration passes, in order."""

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
"""Phases a failpoint can name, in the order an iteration passes them. ``migrate`` comes before experts move,
``migrate_build`` before the model is built for their new places. The last three come while a membership forms: before
ranks join each other, before state moves, before the model is built. Their iteration is the one it begins after."""

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
_KEY = "launch.failpoints"

Record = dict[str, Any]


class InjectedFault(RuntimeError):
    """What the action ``raise`` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """One fault: what happens, and where.

    ``rank``, ``node``, ``at_iteration`` and ``generation`` match anything when ``None``.
    """

    action: str
    phase: str
    rank: int | None = None
    node: int | None = None
    at_iteration: int | None = None
    generation: int | None = None
    passes: int = 1
    """It fires when its phase is reached for so many times, where all else matches."""
    code: int = 0
    message: str = "injected fault"
    seconds: float = 0.0
    text: str = ""


def parse(text: str) -> Failpoint:
    """Read one spec.

    Raises:
        ConfigError: unknown action, keyword or phase; a value that is no literal of the right type.
    """
    match = re.fullmatch(r"\s*([A-Za-z_]+)\s*(\(.*\))\s*", text, re.DOTALL)
    if match is None or match.group(1) not in _OPTIONS:
        raise ConfigError.of(_KEY, text, f"must be a call of one of {', '.join(_OPTIONS)}, e.g. kill(rank=1, ...)")
    action = match.group(1)
    values = _keywords(text, match.group(2), _SELECTORS | _OPTIONS[action])
    _check_values(text, action, values)
    return Failpoint(action=action, text=text.strip(), **values)  # type: ignore[arg-type]


def _keywords(text: str, arguments: str, types: dict[str, type]) -> dict[str, object]:
    try:
        call = ast.parse("call" + arguments, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError.of(_KEY, text, f"must be one call with keyword arguments ({error})") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ConfigError.of(_KEY, text, "must be one call with keyword arguments only")
    values: dict[str, object] = {}
    for keyword in call.keywords:
        name = keyword.arg or "**"
        if name not in types:
            raise ConfigError.of(_KEY, text, f"has no keyword {name}; it takes {', '.join(types)}")
        if name in values:
            raise ConfigError.of(_KEY, text, f"must give {name} once")
        values[name] = _literal(text, name, keyword.value, types[name])
    return values


def _literal(text: str, name: str, node: ast.expr, wanted: type) -> object:
    value = node.value if isinstance(node, ast.Constant) else None
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError.of(_KEY, text, f"must give {name} as a literal of type {wanted.__name__}")
    return value


def _check_values(text: str, action: str, values: dict[str, object]) -> None:
    if values.get("phase") not in PHASES:
        raise ConfigError.of(_KEY, text, f"must name a phase of {', '.join(PHASES)}")
    if action in _REQUIRED and _REQUIRED[action] not in values:
        raise ConfigError.of(_KEY, text, f"must give {_REQUIRED[action]}")
    if int(values.get("passes", 1)) < 1:  # type: ignore[call-overload]
        raise ConfigError.of(_KEY, text, "must give passes of at least 1")
    if not 0 <= int(values.get("code", 0)) <= 255:  # type: ignore[call-overload]
        raise ConfigError.of(_KEY, text, "must give a code between 0 and 255")


def append_to(path: Path) -> Callable[[Record], None]:
    """A recorder that appends each hit to ``path`` as a JSON line and returns when it is on disk.

    Lines are written with one ``write`` in append mode, so the ranks of a job may share the file.
    """

    def record(hit_record: Record) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, json.dumps(hit_record).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    return record


Tell = Callable[[int, str], None]
"""Takes (iteration, phase)."""


@dataclass
class _Watch:
    tell: Tell
    last: tuple[str, int] | None = None


@dataclass
class _Armed:
    waiting: list[Failpoint]
    """All that have not fired."""
    first_rank: int
    """What the process began as."""
    rank: int
    """What it is now."""
    node: int
    record: Callable[[Record], None]
    generation: int
    num_passes: Counter[Failpoint] = field(default_factory=Counter)

    @property
    def mine(self) -> tuple[Failpoint, ...]:
        """Those that mean this process. A fault's rank is that in the generation it names; in none, the first one."""
        return tuple(
            failpoint
            for failpoint in self.waiting
            if failpoint.rank in (None, self.first_rank if failpoint.generation is None else self.rank)
        )

    def due(self, phase: str, iteration: int) -> list[Failpoint]:
        """Those of them that mean this place."""
        return [
            failpoint
            for failpoint in self.mine
            if failpoint.phase == phase
            and failpoint.at_iteration in (None, iteration)
            and failpoint.generation in (None, self.generation)
        ]


_armed: _Armed | None = None
_watch: _Watch | None = None


def watch(tell: Tell | None) -> None:
    """Have ``tell`` called with (iteration, phase) at every hit that names another phase or iteration than the last.

    It comes before a fault that is armed there. None ends it.
    """
    global _watch
    _watch = None if tell is None else _Watch(tell)


def arm(specs: Iterable[str], *, rank: int, node: int, record: Callable[[Record], None], generation: int = 0) -> None:
    """Make this process obey those of ``specs`` that mean it; replaces what was armed before.

    Args:
        specs: e.g. ``config.launch.failpoints``.
        record: called with a ``FailpointHit`` record before the fault; must be durable (``append_to``).
        rank: that it is now; another one may be its own later, see ``enter``.
        generation: how often the job's ranks have been started again.

    Raises:
        ConfigError: a spec that does not parse.
    """
    global _armed
    known = [failpoint for failpoint in map(parse, specs) if failpoint.node in (None, node)]
    waiting = [found for found in known if found.generation is None or found.generation >= generation]
    _armed = _Armed(waiting, rank, rank, node, record, generation) if waiting else None


def enter(generation: int, *, rank: int) -> None:
    """Obey those that name ``generation`` or none, as ``rank``, until the process goes on in another one."""
    if _armed is not None:
        _armed.generation, _armed.rank = generation, rank


def unfired() -> tuple[Failpoint, ...]:
    """Failpoints that mean this process, in whatever generation, and have not fired."""
    return () if _armed is None else _armed.mine


def hit(phase: str, iteration: int) -> None:
    """Say that this process reaches ``phase`` of ``iteration``; an armed fault happens here.

    Raises:
        InjectedFault: the action ``raise`` is armed here.
    """
    if _watch is not None and _watch.last != (phase, iteration):
        _watch.last = (phase, iteration)
        _watch.tell(iteration, phase)
    if _armed is None:
        return
    assert phase in PHASES, f"unknown phase {phase}"
    for failpoint in _armed.due(phase, iteration):
        _armed.num_passes[failpoint] += 1
        if _armed.num_passes[failpoint] >= failpoint.passes:
            _fire(_armed, failpoint, iteration)


def _fire(armed: _Armed, failpoint: Failpoint, iteration: int) -> None:
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
