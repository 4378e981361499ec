"""Reads the history of a job's memberships, and writes the script that repeats this history without faults.

The entries of the script come from the events of the run or, if the events contain none, from the orders of the
controller. All orders that begin after the same iteration are merged into one change, as if only the membership of the
last order had formed: from the members before the first order to those of the last. A node that is a member before and
after, but came back as a new process in between, leaves and joins in this change.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.config.membership import MembershipChange

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of membership, made from all orders that begin after the same iteration."""

    iteration: int
    """Newest iteration of the state with which the change begins."""
    lose: tuple[int, ...]
    """Nodes that leave, in rising order. A node that comes back at once as a new process is in both ``lose`` and
    ``join``."""
    join: tuple[int, ...]
    """Nodes that join, in rising order."""
    nodes: tuple[int, ...]
    """Members after the change, in rising order."""
    num_orders: int
    """Number of orders of this change. The memberships of all except the last order committed no iteration."""


def changes_of(orders: Iterable[Event], num_nodes: int) -> list[Change]:
    """Return the changes of a job that began with nodes 0 to ``num_nodes`` - 1.

    Args:
        orders: Lines of ``decisions.jsonl``, in order. Declined orders have no next membership and are left out.
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
    """Return the nodes of a membership whose processes have no state of the run."""
    ranks = zip(following["nodes"], following["previous_ranks"], strict=True)
    return {node for node, previous in ranks if previous is None}


def scripted(changes: Sequence[Event], orders: Iterable[Event], num_nodes: int) -> list[str]:
    """Return the override that repeats a history without faults; an empty list for an empty history. The arguments are
    those of ``entries_of``."""
    return script_of(entries_of(changes, orders, num_nodes))


def script_of(entries: Sequence[str]) -> list[str]:
    """Return the override with these entries; an empty list without entries."""
    listed = ",".join(f"'{entry}'" for entry in entries)
    return [f"testing.membership_schedule=[{listed}]"] if entries else []


def entries_of(changes: Sequence[Event], orders: Iterable[Event], num_nodes: int) -> list[str]:
    """Return the entries of the script that repeats a history.

    Args:
        changes: Events ``membership_changed``. If they contain entries of the script, these are used, because several
            memberships may have formed after one iteration, each with a different placement.
        orders: Lines of ``decisions.jsonl``, which are used otherwise.
        num_nodes: Number of members at the start.
    """
    if changes and all(change.get("schedule") for change in changes):
        by_iteration = {change["iteration"]: change["schedule"] for change in changes}
        return [entry for iteration in sorted(by_iteration) for entry in by_iteration[iteration]]
    return [_entry(change) for change in changes_of(orders, num_nodes) if change.lose or change.join]


def at_first_nodes(entries: Iterable[str]) -> list[str]:
    """Return the entries with every spare node renumbered: it gets the number of the node whose place it has taken. A
    job with these entries needs no spare nodes. Its ranks may have another order, because ranks are ordered by node
    numbers.

    Args:
        entries: Entries, each with as many nodes that join as nodes that leave.
    """
    first: dict[int, int] = {}
    found = []
    for entry in entries:
        change = MembershipChange.parse(entry)
        places = tuple(first.get(node, node) for node in change.lose)
        first |= dict(zip(change.join, places, strict=True))
        found.append(replace(change, lose=tuple(sorted(places)), join=tuple(sorted(places))).to_text())
    return found


def _entry(change: Change) -> str:
    before = change.iteration + 1
    if change.lose and change.join:
        return f"change(lose={_list(change.lose)},join={_list(change.join)},before_iteration={before})"
    name, nodes = ("lose", change.lose) if change.lose else ("join", change.join)
    return f"{name}(nodes={_list(nodes)},before_iteration={before})"


def _list(nodes: Sequence[int]) -> str:
    return json.dumps(list(nodes), separators=(",", ":"))
