"""Injected faults and scheduled membership changes (group ``testing``)."""

from dataclasses import dataclass, field


@dataclass
class TestingConfig:
    """Injected faults and scheduled membership changes, for tests."""

    failpoints: list[str] = field(default_factory=list)
    """Faults that are injected, e.g. ``kill(rank=1,at_iteration=7,phase="backward")`` (docs/testing.md)."""
    membership_schedule: list[str] = field(default_factory=list)
    """Membership changes before given iterations, e.g. ``lose(nodes=[2],before_iteration=5)``,
    ``join(nodes=[2],before_iteration=9)`` or both in ``change(lose=[1],join=[2],before_iteration=12)``. A node in both
    lists is restarted. Tests compare runs that lost nodes with scheduled runs: the event ``membership_changed``
    contains the entries that repeat a run (docs/elastic.md)."""
