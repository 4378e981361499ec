"""Membership changes that a configuration asks for, e.g. ``lose(nodes=[2],before_iteration=5)``.

At the boundary before that iteration the ranks of these nodes end well and the others go on without them: the history
that a job with the same deaths has, without a fault.
"""

import ast
from dataclasses import dataclass

from megatron_ft.errors import ConfigError

_KEY = "launch.membership_schedule"
_EXAMPLE = "lose(nodes=[2],before_iteration=5)"
_KEYWORDS = ("nodes", "before_iteration")


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """Nodes that leave before an iteration."""

    nodes: tuple[int, ...]
    """Rising, at least one."""
    before_iteration: int
    """The first that goes without them; at least 1."""


def parse_membership_change(text: str) -> MembershipChange:
    """Read one entry.

    Raises:
        ConfigError: not the call ``lose`` with both keywords as literals; nodes that do not rise; an iteration below 1.
    """
    values = _keywords(text)
    nodes, iteration = values["nodes"], values["before_iteration"]
    if not isinstance(nodes, list) or not nodes or any(type(node) is not int or node < 0 for node in nodes):
        raise ConfigError.of(_KEY, text, "must give nodes as a list of node numbers, e.g. [2]")
    if nodes != sorted(set(nodes)):
        raise ConfigError.of(_KEY, text, "must name each node once, in rising order")
    if type(iteration) is not int or iteration < 1:
        raise ConfigError.of(_KEY, text, "must give before_iteration as a number of at least 1")
    return MembershipChange(nodes=tuple(nodes), before_iteration=iteration)


def _keywords(text: str) -> dict[str, object]:
    """Values of the keywords of one call, each given once."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError.of(_KEY, text, f"must be one call with keyword arguments ({error})") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "lose" or call.args:
        raise ConfigError.of(_KEY, text, f"must be a call like {_EXAMPLE}")
    if sorted(str(keyword.arg) for keyword in call.keywords) != sorted(_KEYWORDS):
        raise ConfigError.of(_KEY, text, f"must give {' and '.join(_KEYWORDS)} once each, as in {_EXAMPLE}")
    try:
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ConfigError.of(_KEY, text, f"must give {' and '.join(_KEYWORDS)} as literals") from None
