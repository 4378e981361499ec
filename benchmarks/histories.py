"""The history of a job's memberships as its controller ordered it, and the script that repeats it without faults.

The events of a run name the entries of its script. Where they do not, its orders are read: all that begin after one
iteration are one change, from the members before the first of them to those of the last, as where none but the last had
formed. A node that is among both and came as a new process in between leaves and joins.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of membership that committed iterations, or was the last."""

    iteration: int
    """Newest iteration of the state that it begins with."""
    lose: tuple[int, ...]
    """Rising; a node that comes back at once as a new process is among both."""
    join: tuple[int, ...]
    """Rising."""
    nodes: tuple[int, ...]
    """Its members, rising."""
    num_orders: int
    """Orders that it took: all but one were broken before they committed an iteration."""


def changes_of(orders: Iterable[Event], num_nodes: int) -> list[Change]:
    """The changes of a job that began with nodes 0 to ``num_nodes`` - 1.

    Args:
        orders: lines of ``decisions.jsonl``, in order. Those that declined have no next membership and are left out.
    """
    members = set(range(num_nodes))
    found: list[Change] = []
    group: list[Event] = []
    followings = [order["next"] for order in orders if order.get("next")]
    for index, following in enumerate(followings):
        group.append(following)
        later = followings[index + 1 : index + 2]
        iteration = following["target"]["iteration"]
        if later and later[0]["target"]["iteration"] == iteration:
            continue
        new = {node for each in group for node in _new_nodes(each)}
        after = set(following["nodes"])
        join = {node for node in after if node not in members or node in new}
        lose = {node for node in members if node not in after or node in new}
        change = Change(
            iteration=iteration,
            lose=tuple(sorted(lose)),
            join=tuple(sorted(join)),
            nodes=tuple(sorted(after)),
            num_orders=len(group),
        )
        found.append(change)
        members, group = after, []
    return found


def _new_nodes(following: Event) -> set[int]:
    """Nodes of a membership whose processes bring no state."""
    ranks = zip(following["nodes"], following["previous_ranks"], strict=True)
    return {node for node, previous in ranks if previous is None}


def scripted(changes: Sequence[Event], orders: Iterable[Event], num_nodes: int) -> list[str]:
    """The override that repeats a history without faults; nothing for none.

    Args:
        changes: events ``membership_changed``. Where they name entries of the script, those count: several memberships
            may have formed at one boundary, each with a placement of its own.
        orders: lines of ``decisions.jsonl``, which count otherwise.
        num_nodes: members at the start.
    """
    if changes and all(change.get("schedule") for change in changes):
        by_iteration = {change["iteration"]: change["schedule"] for change in changes}
        entries = [f"'{entry}'" for iteration in sorted(by_iteration) for entry in by_iteration[iteration]]
    else:
        entries = [_entry(change) for change in changes_of(orders, num_nodes) if change.lose or change.join]
    return [f"testing.membership_schedule=[{','.join(entries)}]"] if entries else []


def _entry(change: Change) -> str:
    before = change.iteration + 1
    if change.lose and change.join:
        return f"'change(lose={_list(change.lose)},join={_list(change.join)},before_iteration={before})'"
    name, nodes = ("lose", change.lose) if change.lose else ("join", change.join)
    return f"'{name}(nodes={_list(nodes)},before_iteration={before})'"


def _list(nodes: Sequence[int]) -> str:
    return json.dumps(list(nodes), separators=(",", ":"))
