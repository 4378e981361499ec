"""Injected faults and scheduled membership changes (group ``testing``)."""

from dataclasses import dataclass, field


@dataclass
class TestingConfig:
    """Faults and membership changes that a test prescribes."""

    failpoints: list[str] = field(default_factory=list)
    """Faults to inject, e.g. ``kill(rank=1,at_iteration=7,phase="backward")``."""
    membership_schedule: list[str] = field(default_factory=list)
    """Scheduled membership changes, e.g. ``lose(nodes=[2],before_iteration=5)``, ``join(nodes=[2],before_iteration=9)``
    or both in ``change(lose=[1],join=[2],before_iteration=12)``. The ranks of these nodes leave or join before that
    iteration. A node in both lists is restarted. Tests compare runs that lost nodes with such a run. The event
    ``membership_changed`` contains the entries that repeat a run (docs/elastic.md)."""
