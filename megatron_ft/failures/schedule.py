"""Membership schedules: which nodes leave and join when, numbered as a job numbers them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from megatron_ft.errors import ConfigError
from megatron_ft.strict_json import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipEvent:
    """Changes at one moment: departures and arrivals of different nodes."""

    seconds: float
    """Seconds since the schedule began."""
    leaves: tuple[int, ...] = ()
    """Nodes that are lost, rising."""
    joins: tuple[int, ...] = ()
    """Nodes that arrive, rising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSchedule:
    """Membership changes of nodes; nodes 0 to below ``num_initial_nodes`` are there when it begins."""

    source: str
    """Source, for messages."""
    most_nodes: int
    """Number of node numbers: 0 to below it."""
    num_initial_nodes: int
    duration_seconds: float
    events: tuple[MembershipEvent, ...]
    """Events by rising seconds, all before ``duration_seconds``."""
    num_ignored_arrivals: int = 0
    """Arrivals of the source that found no free number, the first instant's included."""

    def validate(self) -> None:
        """Check that times rise, that leaving nodes are present and that joining nodes are not.

        Raises:
            ConfigError: naming the event and the field.
        """
        if not 0 <= self.num_initial_nodes <= self.most_nodes or self.most_nodes < 1:
            constraint = f"must be from 0 to most_nodes={self.most_nodes}, which is at least 1"
            raise ConfigError.of("num_initial_nodes", self.num_initial_nodes, constraint)
        if not (math.isfinite(self.duration_seconds) and self.duration_seconds > 0):
            raise ConfigError.of("duration_seconds", self.duration_seconds, "must be finite and above 0")
        if self.num_ignored_arrivals < 0:
            raise ConfigError.of("num_ignored_arrivals", self.num_ignored_arrivals, "must be 0 or more")
        present, before = set(range(self.num_initial_nodes)), 0.0
        for number, event in enumerate(self.events):
            if not before <= event.seconds < self.duration_seconds:
                constraint = f"must rise from {before:g} and be below duration_seconds={self.duration_seconds:g}"
                raise ConfigError.of(f"events[{number}].seconds", event.seconds, constraint)
            present, before = self._after(present, number, event), event.seconds

    def _after(self, present: set[int], number: int, event: MembershipEvent) -> set[int]:
        """Return the nodes that are present after an event. Raises ConfigError."""
        leaves, joins = set(event.leaves), set(event.joins)
        for name, given, known in (("leaves", event.leaves, leaves), ("joins", event.joins, joins)):
            if list(given) != sorted(known):
                raise ConfigError.of(f"events[{number}].{name}", list(given), "must rise, each node once")
        if not leaves | joins:
            raise ConfigError.of(f"events[{number}]", "{}", "must have nodes that leave or join")
        if wrong := sorted(leaves - present):
            raise ConfigError.of(f"events[{number}].leaves", wrong, f"must be among the nodes there are, {present}")
        if wrong := sorted(joins & present | {node for node in joins if not 0 <= node < self.most_nodes}):
            constraint = f"must be numbers from 0 to below most_nodes={self.most_nodes} of nodes that are not there"
            raise ConfigError.of(f"events[{number}].joins", wrong, constraint)
        return present - leaves | joins

    @property
    def num_leaves(self) -> int:
        """Departures over all events."""
        return sum(len(event.leaves) for event in self.events)

    @property
    def num_joins(self) -> int:
        """Arrivals after the beginning, over all events."""
        return sum(len(event.joins) for event in self.events)

    @property
    def most_lost_at_once(self) -> int:
        """Most departures in one event."""
        return max((len(event.leaves) for event in self.events), default=0)

    def num_nodes_after(self) -> tuple[int, ...]:
        """Count the nodes after each event."""
        counts, count = [], self.num_initial_nodes
        for event in self.events:
            count += len(event.joins) - len(event.leaves)
            counts.append(count)
        return tuple(counts)

    def summary(self) -> str:
        """One log line."""
        fewest = min((self.num_initial_nodes, *self.num_nodes_after()))
        return (
            f"{self.source}: {self.num_initial_nodes} of {self.most_nodes} nodes at first, {self.num_leaves} leave "
            f"(up to {self.most_lost_at_once} at once, {fewest} nodes at the fewest) and {self.num_joins} join in "
            f"{len(self.events)} events over {self.duration_seconds:g} s; {self.num_ignored_arrivals} arrivals ignored"
        )

    def to_json(self) -> dict[str, Any]:
        events = [{"seconds": e.seconds, "leaves": list(e.leaves), "joins": list(e.joins)} for e in self.events]
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"events": events}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "FailureSchedule":
        """Read the result of ``to_json`` and validate it.

        Raises:
            ConfigError: fields are missing or unknown, of another type, or inconsistent.
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
        # Files come from outside; the injector relies on nodes that exist.
        schedule.validate()
        return schedule


def _nodes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError(f"{values!r}: must be a list of node numbers")
    return tuple(values)
