"""Scheduled membership changes of a configuration, e.g. ``lose(nodes=[2],before_iteration=5)``.

Before the iteration, ranks leave without a fault and others join. Tests compare a job that loses and adds nodes by
failures with such a run. ``join(nodes=[2],before_iteration=9)`` adds nodes.
``change(lose=[1],join=[2],before_iteration=12)`` does both at once. A node in both lists is restarted, and its new
ranks have no state. ``change(lose=[],join=[],before_iteration=12)`` keeps the members and plans the placement again.
Several entries before one iteration form several memberships, one after the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_ft.errors import ConfigError
from megatron_ft.reading import parse_call

_KEY = "testing.membership_schedule"
_KEYWORDS = {
    "lose": ("nodes", "before_iteration"),
    "join": ("nodes", "before_iteration"),
    "change": ("lose", "join", "before_iteration"),
}
_EXAMPLES = {
    "lose": "lose(nodes=[2],before_iteration=5)",
    "join": "join(nodes=[2],before_iteration=9)",
    "change": "change(lose=[1],join=[2],before_iteration=12)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """Nodes that leave and nodes that join before an iteration; a node in both lists joins without state."""

    lose: tuple[int, ...] = ()
    """Node numbers, ascending."""
    join: tuple[int, ...] = ()
    before_iteration: int
    """First iteration of the new members; at least 1."""

    @classmethod
    def between(
        cls, before: Iterable[int], after: Iterable[int], joining: Iterable[int], before_iteration: int
    ) -> "MembershipChange":
        """Make the change from nodes ``before`` to nodes ``after``. The nodes in ``joining`` have no state."""
        lost = (set(before) - set(after)) | (set(before) & set(joining))
        joined = (set(after) - set(before)) | set(joining)
        return cls(lose=tuple(sorted(lost)), join=tuple(sorted(joined)), before_iteration=before_iteration)

    def to_text(self) -> str:
        """Write the change in the syntax that ``parse_membership_change`` reads."""
        lose, join = (str(list(nodes)).replace(" ", "") for nodes in (self.lose, self.join))
        if self.lose and not self.join:
            return f"lose(nodes={lose},before_iteration={self.before_iteration})"
        if self.join and not self.lose:
            return f"join(nodes={join},before_iteration={self.before_iteration})"
        return f"change(lose={lose},join={join},before_iteration={self.before_iteration})"

    def after(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Return the members after the change, ascending. ``nodes`` are the members before it."""
        return tuple(sorted(set(nodes) - set(self.lose) | set(self.join)))

    def summary(self) -> str:
        """Describe the change as part of a log line."""
        leaving = [f"nodes {list(self.lose)} leave"] if self.lose else []
        joining = [f"nodes {list(self.join)} join"] if self.join else []
        what = " and ".join(leaving + joining) or "the placement is planned again"
        return f"{what} before iteration {self.before_iteration}"


def parse_membership_change(text: str) -> MembershipChange:
    """Parse one entry.

    Raises:
        ConfigError: the entry is not a call of ``lose``, ``join`` or ``change`` with all keywords as literals, the
            nodes are not ascending, or the iteration is below 1.
    """
    name, values = parse_call(_KEY, text, _KEYWORDS, " or ".join(_EXAMPLES.values()))
    if sorted(values) != sorted(_KEYWORDS[name]):
        keywords = " and ".join(_KEYWORDS[name])
        raise ConfigError.of(_KEY, text, f"must give {keywords} once each, as in {_EXAMPLES[name]}")
    iteration = values.pop("before_iteration")
    nodes = {
        name if keyword == "nodes" else keyword: _node_list(text, value, may_be_empty=name == "change")
        for keyword, value in values.items()
    }
    if type(iteration) is not int or iteration < 1:
        raise ConfigError.of(_KEY, text, "must give before_iteration as a number of at least 1")
    return MembershipChange(before_iteration=iteration, **nodes)


def nodes_over_time(num_nodes: int, changes: Iterable[MembershipChange]) -> Iterator[tuple[int, ...]]:
    """Yield the members of a job with ``num_nodes`` at the start and after each of ``changes``."""
    nodes = tuple(range(num_nodes))
    yield nodes
    for change in changes:
        nodes = change.after(nodes)
        yield nodes


def _node_list(text: str, nodes: object, *, may_be_empty: bool) -> tuple[int, ...]:
    if (
        not isinstance(nodes, list)
        or not (nodes or may_be_empty)
        or any(type(node) is not int or node < 0 for node in nodes)
    ):
        raise ConfigError.of(_KEY, text, "must give nodes as a list of node numbers, e.g. [2]")
    # One spelling for each change, the one that ``to_text`` writes.
    if nodes != sorted(set(nodes)):
        raise ConfigError.of(_KEY, text, "must name each node once, in ascending order")
    return tuple(nodes)
