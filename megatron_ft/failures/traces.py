"""Reads traces that record when preemptible nodes were added and removed, and makes schedules of failures from them.

The format is that of Bamboo (NSDI '23): each line is ``milliseconds,add|remove,node`` and ends with LF or CRLF.
"""

import heapq
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.errors import ConfigError, DataError
from megatron_ft.failures.schedule import FailureSchedule, MembershipEvent
from megatron_ft.serde import read_bytes

_MOST_BYTES = 64 * 1024 * 1024
_ROW = re.compile(r"([0-9]{1,15}),(add|remove),([A-Za-z0-9._-]{1,64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """Nodes that a trace removes and adds at one moment."""

    milliseconds: int
    """Milliseconds since the first row of the trace."""
    removed: tuple[str, ...]
    added: tuple[str, ...]
    """Added nodes in the order of their rows. In this order, they get node numbers of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipTrace:
    """A recorded trace: which nodes were added and removed, and when."""

    source: str
    """Name of the trace's file."""
    instants: tuple[_Instant, ...]
    """Nodes added and removed at each moment, in order of time. The first moment adds all initial nodes."""
    num_repeated_rows: int = 0
    """Number of rows that repeat an earlier row and are therefore ignored."""

    def schedule(self, *, most_nodes: int, minutes: float | None = None, scale: float = 1.0) -> FailureSchedule:
        """Make a schedule for a job from the trace.

        Each node of the trace gets the lowest free node number. A node that arrives while no number is free is ignored
        until it arrives again. A number that becomes free is used at later instants only.

        Args:
            most_nodes: largest number of nodes. Node numbers are 0 to ``most_nodes`` - 1.
            minutes: how many minutes of the trace are used, from its beginning; None uses the whole trace.
            scale: seconds of the schedule for each second of the trace.

        Raises:
            ConfigError: an argument is out of range.
        """
        _check(most_nodes, minutes, scale)
        last = self.instants[-1].milliseconds
        # The duration must be above the time of every event, including the last instant.
        end = last + 1 if minutes is None else minutes * 60_000.0
        numbers = _Numbers(most_nodes)
        numbers.arrive(self.instants[0].added)
        num_initial_nodes = len(numbers.of)
        events = []
        for instant in self.instants[1:]:
            if instant.milliseconds >= end:
                break
            # Arrivals are handled first. Otherwise they could get numbers that become free now, and the same node
            # number would leave and join in one event.
            joins, leaves = numbers.arrive(instant.added), numbers.depart(instant.removed)
            if joins or leaves:
                seconds = instant.milliseconds / 1000.0 * scale
                events.append(MembershipEvent(seconds=seconds, leaves=tuple(leaves), joins=tuple(joins)))
        schedule = FailureSchedule(
            source=self.source,
            most_nodes=most_nodes,
            num_initial_nodes=num_initial_nodes,
            duration_seconds=end / 1000.0 * scale,
            events=tuple(events),
            num_ignored_arrivals=numbers.num_ignored,
        )
        schedule.validate()
        return schedule

    @classmethod
    def parse(cls, source: str, content: bytes) -> "MembershipTrace":
        """Parse a file's content; see ``MembershipTrace.read``."""
        lines = content.split(b"\n")
        if lines.pop():
            raise DataError(
                f"{source}:{len(lines) + 1}: the last line does not end with a newline: the file is truncated"
            )
        if not lines:
            raise DataError(f"{source}: is empty: must begin with the nodes that are present at the start")
        rows: list[tuple[int, str, str]] = []
        seen: set[tuple[int, str, str]] = set()
        present: set[str] = set()
        before = 0
        for number, line in enumerate(lines, 1):
            milliseconds, action, node = row = _row(source, number, line)
            if milliseconds < before:
                raise DataError(
                    f"{source}:{number}: time {milliseconds}: must be at least {before}, the time of the line before"
                )
            before = milliseconds
            if row in seen:
                continue
            seen.add(row)
            if (action == "remove") is not (node in present):
                known = "is present already" if action == "add" else "is not present"
                raise DataError(f"{source}:{number}: {action} {node}: {node} {known}")
            present.symmetric_difference_update({node})
            rows.append(row)
        return cls(source=source, instants=_instants(rows), num_repeated_rows=len(lines) - len(rows))

    @classmethod
    def read(cls, path: Path) -> "MembershipTrace":
        """Read a trace from a file.

        A repeated row counts once. A trace is malformed if it adds a node that is already present, removes a node
        that is absent, has descending times, or has a last line without a line end.

        Raises:
            DataError: the trace is malformed; the message gives the number of the line.
        """
        return MembershipTrace.parse(path.name, read_bytes(path, max_bytes=_MOST_BYTES))


class _Numbers:
    """Maps the nodes of a trace, which have names, to node numbers of the job."""

    def __init__(self, most_nodes: int) -> None:
        self.of: dict[str, int] = {}
        self.num_ignored = 0
        self._free = list(range(most_nodes))

    def arrive(self, names: Iterable[str]) -> list[int]:
        """Give node numbers to added nodes until no number is free. Return the given numbers, ascending."""
        found = []
        for name in names:
            if not self._free:
                self.num_ignored += 1
                continue
            self.of[name] = heapq.heappop(self._free)
            found.append(self.of[name])
        return sorted(found)

    def depart(self, names: Iterable[str]) -> list[int]:
        """Release the node numbers of removed nodes. Return the released numbers, ascending."""
        freed = sorted(self.of.pop(name) for name in names if name in self.of)
        for number in freed:
            heapq.heappush(self._free, number)
        return freed


def _check(most_nodes: int, minutes: float | None, scale: float) -> None:
    if most_nodes < 1:
        raise ConfigError.of("most_nodes", most_nodes, "must be at least 1")
    for name, value in (("minutes", minutes), ("scale", scale)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError.of(name, value, "must be finite and above 0")


def _row(source: str, number: int, line: bytes) -> tuple[int, str, str]:
    """Parse time, action and node of a line of a trace. Raise a DataError if the line has another format."""
    match = _ROW.fullmatch(line.removesuffix(b"\r").decode("ascii", "replace"))
    if match is None:
        raise DataError(f"{source}:{number}: {line[:80]!r}: must be milliseconds,add|remove,node")
    return int(match.group(1)), match.group(2), match.group(3)


def _instants(rows: list[tuple[int, str, str]]) -> tuple[_Instant, ...]:
    # A dictionary keeps the order of the rows, by which nodes get their numbers.
    first, present, instants = rows[0][0], dict[str, None](), []
    for milliseconds, together in itertools.groupby(rows, key=lambda row: row[0]):
        earlier = dict(present)
        for _, action, node in together:
            if action == "add":
                present[node] = None
            else:
                del present[node]
        removed = tuple(node for node in earlier if node not in present)
        added = tuple(node for node in present if node not in earlier)
        instants.append(_Instant(milliseconds=milliseconds - first, removed=removed, added=added))
    return tuple(instants)
