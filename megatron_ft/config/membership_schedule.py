"""Membership changes that a configuration asks for, e.g. ``lose(nodes=[2],before_iteration=5)``.

At the boundary before that iteration ranks leave, without a fault, and others join: the history that a job with the
same losses and joins has. ``join(nodes=[2],before_iteration=9)`` has nodes (again), and
``change(lose=[1],join=[2],before_iteration=12)`` does both at once. A node in both lists has new ranks, which have
nothing of the run. ``change(lose=[],join=[],before_iteration=12)`` keeps the members and places experts anew. Several
entries before one iteration are memberships that form one after the other.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_ft.errors import ConfigError

_KEY = "launch.membership_schedule"
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
    """Nodes that leave and nodes that join before an iteration; a node that does both joins without state."""

    lose: tuple[int, ...] = ()
    """Rising."""
    join: tuple[int, ...] = ()
    """Rising."""
    before_iteration: int
    """The first that goes without the ones and with the others; at least 1."""

    @classmethod
    def between(
        cls, before: Iterable[int], after: Iterable[int], joining: Iterable[int], before_iteration: int
    ) -> "MembershipChange":
        """The change from the nodes ``before`` to the nodes ``after``, of which those ``joining`` have no state."""
        lost = (set(before) - set(after)) | (set(before) & set(joining))
        joined = (set(after) - set(before)) | set(joining)
        return cls(lose=tuple(sorted(lost)), join=tuple(sorted(joined)), before_iteration=before_iteration)

    def to_text(self) -> str:
        """The entry that ``parse_membership_change`` reads."""
        lose, join = (str(list(nodes)).replace(" ", "") for nodes in (self.lose, self.join))
        if self.lose and not self.join:
            return f"lose(nodes={lose},before_iteration={self.before_iteration})"
        if self.join and not self.lose:
            return f"join(nodes={join},before_iteration={self.before_iteration})"
        return f"change(lose={lose},join={join},before_iteration={self.before_iteration})"

    def after(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """The nodes of the job once ``nodes`` have changed, rising."""
        return tuple(sorted(set(nodes) - set(self.lose) | set(self.join)))

    def summary(self) -> str:
        """A part of a log line."""
        leaving = [f"nodes {list(self.lose)} leave"] if self.lose else []
        joining = [f"nodes {list(self.join)} join"] if self.join else []
        what = " and ".join(leaving + joining) or "experts are placed anew"
        return f"{what} before iteration {self.before_iteration}"


def parse_membership_change(text: str) -> MembershipChange:
    """Read one entry.

    Raises:
        ConfigError: not a call of ``lose``, ``join`` or ``change`` with all keywords as literals; nodes that do not
            rise; an iteration below 1.
    """
    name, values = _call(text)
    iteration = values.pop("before_iteration")
    nodes = {
        name if keyword == "nodes" else keyword: _node_list(text, value, may_be_empty=name == "change")
        for keyword, value in values.items()
    }
    if type(iteration) is not int or iteration < 1:
        raise ConfigError.of(_KEY, text, "must give before_iteration as a number of at least 1")
    return MembershipChange(before_iteration=iteration, **nodes)


def nodes_over_time(num_nodes: int, changes: Iterable[MembershipChange]) -> Iterator[tuple[int, ...]]:
    """The nodes that a job of ``num_nodes`` has at its start and after each of ``changes``."""
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
    if nodes != sorted(set(nodes)):
        raise ConfigError.of(_KEY, text, "must name each node once, in rising order")
    return tuple(nodes)


def _call(text: str) -> tuple[str, dict[str, object]]:
    """Name of one call, and the values of its keywords, each given once."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError.of(_KEY, text, f"must be one call with keyword arguments ({error})") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ConfigError.of(_KEY, text, f"must be a call like {_EXAMPLES['lose']}")
    name = call.func.id
    if name not in _KEYWORDS:
        raise ConfigError.of(_KEY, text, f"must be a call like {', '.join(_EXAMPLES.values())}")
    if sorted(str(keyword.arg) for keyword in call.keywords) != sorted(_KEYWORDS[name]):
        keywords = " and ".join(_KEYWORDS[name])
        raise ConfigError.of(_KEY, text, f"must give {keywords} once each, as in {_EXAMPLES[name]}")
    try:
        return name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ConfigError.of(_KEY, text, f"must give {' and '.join(_KEYWORDS[name])} as literals") from None
