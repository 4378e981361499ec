"""Schedules of failures: which node of a job is lost or joins, and at which time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from megatron_ft.errors import ConfigError
from megatron_ft.serde import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipEvent:
    """Event of a schedule: nodes that are lost and nodes that join at one moment."""

    seconds: float
    """Seconds since the schedule began."""
    leaves: tuple[int, ...] = ()
    """Numbers of the nodes that are lost, ascending."""
    joins: tuple[int, ...] = ()
    """Numbers of the nodes that join, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSchedule:
    """Planned losses and joins of a job's nodes. At first the nodes 0 to ``num_initial_nodes`` - 1 are present."""

    source: str
    """Origin of the schedule, e.g. the name of a trace file. Messages show this origin."""
    most_nodes: int
    """Largest number of nodes that are present at once. Nodes are numbered from 0 to ``most_nodes`` - 1."""
    num_initial_nodes: int
    duration_seconds: float
    events: tuple[MembershipEvent, ...]
    """Events in ascending order of time. All events are before ``duration_seconds``."""
    num_ignored_arrivals: int = 0
    """Number of nodes' arrivals in the source (a trace) that the schedule omits, because no node number was free."""

    def validate(self) -> None:
        """Check that event times ascend, that lost nodes were present, and that joining nodes were absent.

        Raises:
            ConfigError: a value is invalid; the message names the event and the field.
        """
        if not 0 <= self.num_initial_nodes <= self.most_nodes or self.most_nodes < 1:
            constraint = f"must be from 0 to most_nodes={self.most_nodes}, which must be at least 1"
            raise ConfigError.of("num_initial_nodes", self.num_initial_nodes, constraint)
        if not (math.isfinite(self.duration_seconds) and self.duration_seconds > 0):
            raise ConfigError.of("duration_seconds", self.duration_seconds, "must be finite and above 0")
        if self.num_ignored_arrivals < 0:
            raise ConfigError.of("num_ignored_arrivals", self.num_ignored_arrivals, "must be 0 or more")
        present, before = set(range(self.num_initial_nodes)), 0.0
        for number, event in enumerate(self.events):
            if not before <= event.seconds < self.duration_seconds:
                constraint = (
                    f"must be at least {before:g}, the time of the event before, and below "
                    f"duration_seconds={self.duration_seconds:g}"
                )
                raise ConfigError.of(f"events[{number}].seconds", event.seconds, constraint)
            present, before = self._after(present, number, event), event.seconds

    def _after(self, present: set[int], number: int, event: MembershipEvent) -> set[int]:
        """Return the nodes present after ``event``. Raise a ConfigError if ``present``, the nodes before, forbid it."""
        leaves, joins = set(event.leaves), set(event.joins)
        for name, given, known in (("leaves", event.leaves, leaves), ("joins", event.joins, joins)):
            if list(given) != sorted(known):
                raise ConfigError.of(
                    f"events[{number}].{name}", list(given), "must be in ascending order and name each node once"
                )
        if not leaves | joins:
            raise ConfigError.of(f"events[{number}]", "{}", "must have at least one node that leaves or joins")
        if wrong := sorted(leaves - present):
            raise ConfigError.of(f"events[{number}].leaves", wrong, f"must be nodes that are present: {present}")
        if wrong := sorted(joins & present | {node for node in joins if not 0 <= node < self.most_nodes}):
            constraint = f"must be nodes that are not present, numbered from 0 to {self.most_nodes - 1}"
            raise ConfigError.of(f"events[{number}].joins", wrong, constraint)
        return present - leaves | joins

    @property
    def num_leaves(self) -> int:
        """Total count of node losses in all events."""
        return sum(len(event.leaves) for event in self.events)

    @property
    def num_joins(self) -> int:
        """Total count of node joins in all events. Nodes that are present at the beginning do not count."""
        return sum(len(event.joins) for event in self.events)

    @property
    def most_lost_at_once(self) -> int:
        """Largest number of nodes that are lost in one event."""
        return max((len(event.leaves) for event in self.events), default=0)

    def num_nodes_after(self) -> tuple[int, ...]:
        """Return the number of nodes that are present after each event."""
        counts, count = [], self.num_initial_nodes
        for event in self.events:
            count += len(event.joins) - len(event.leaves)
            counts.append(count)
        return tuple(counts)

    def summary(self) -> str:
        """Describe the schedule in one line for a log."""
        fewest = min((self.num_initial_nodes, *self.num_nodes_after()))
        return (
            f"{self.source}: nodes at the start: {self.num_initial_nodes} of {self.most_nodes}; departures: "
            f"{self.num_leaves} (most at once: {self.most_lost_at_once}, fewest nodes: {fewest}); arrivals: "
            f"{self.num_joins}, ignored arrivals: {self.num_ignored_arrivals}; events: {len(self.events)} in "
            f"{self.duration_seconds:g} s"
        )

    def to_json(self) -> dict[str, Any]:
        events = [{"seconds": e.seconds, "leaves": list(e.leaves), "joins": list(e.joins)} for e in self.events]
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"events": events}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "FailureSchedule":
        """Make a schedule from the result of ``to_json``, and validate it.

        Raises:
            ConfigError: a field is missing, is unknown, has a wrong type, or contradicts another field.
        """
        try:
            events = tuple(
                MembershipEvent(
                    seconds=float(event["seconds"]), leaves=_nodes(event["leaves"]), joins=_nodes(event["joins"])
                )
                for event in content["events"]
            )
            hints = get_type_hints(cls)
            plain = {name: decode(hints[name], content[name], name) for name in content.keys() - {"events"}}
            schedule = cls(**plain, events=events)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError.of("schedule", "", f"is damaged: {error!r}") from None
        # A file may have any content, and the injector needs nodes that exist.
        schedule.validate()
        return schedule


def _nodes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError(f"{values!r}: must be a list of node numbers")
    return tuple(values)
