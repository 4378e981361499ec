"""Tests that simulated jobs keep the rules, and that the simulation notices decisions that break them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from benchmarks.membership_simulation import simulate
from benchmarks.simulated_job import KEEPS_LAYOUT
from megatron_ft.control.membership import joining, reconfigure
from megatron_ft.control.membership.events import Moment
from megatron_ft.control.membership.joining import NodeRules
from megatron_ft.control.membership.state import (
    MembershipPolicy,
    NodeRecord,
    NodeState,
    Phase,
    Reform,
    State,
    Step,
)
from megatron_ft.planning.recovery.membership import Position, Target

SEEDS = range(60)
KEEPING = range(KEEPS_LAYOUT - 1, 240, KEEPS_LAYOUT)
"""Seeds of jobs that keep their layout."""


def test_the_decisions_of_the_product_keep_every_rule() -> None:
    counts, failures = simulate(SEEDS)
    assert not failures, failures[0]
    often = ("reform", "finished", "undone", "joined nodes", "left nodes")
    assert min(counts[name] for name in often) > 3
    assert min(counts[name] for name in ("replaced nodes", "hung ranks found", "silent nodes", "sent again")) > 0


@pytest.mark.parametrize(("choose", "broken_rule"), [(min, "would be rolled back"), (max, "cannot finish")])
def test_a_target_that_forgets_settled_votes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[[Iterable[int]], int], broken_rule: str
) -> None:
    def forget(positions: Sequence[Position]) -> Target:
        return Target(iteration=choose(position.completed for position in positions), vote=None)

    monkeypatch.setattr(reconfigure, "choose_target", forget)
    _, failures = simulate(SEEDS)
    assert any(broken_rule in failure["error"] for failure in failures)


def test_continuing_before_all_ranks_have_reported_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = reconfigure.remaining_ranks

    def fewer(policy: MembershipPolicy, state: State) -> set[int]:
        left = remaining(policy, state)
        return left if len(state.has_reported) < 2 else left & set(state.has_reported)

    monkeypatch.setattr(reconfigure, "remaining_ranks", fewer)
    _, failures = simulate(SEEDS)
    assert any("has not reported" in failure["error"] for failure in failures)


def test_a_lost_node_that_comes_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reform = reconfigure._reform

    def generous(policy: MembershipPolicy, state: State, now: float) -> Step:
        step = reform(policy, state, now)
        return replace(
            step,
            state=replace(step.state, nodes=replace(step.state.nodes, members=(*step.state.members, policy.num_nodes))),
        )

    monkeypatch.setattr(reconfigure, "_reform", generous)
    _, failures = simulate(SEEDS)
    assert any("not among the joining nodes" in failure["error"] for failure in failures)


def unready_nodes(rules: NodeRules, state: State, num_staying: int) -> tuple[int, ...]:
    """Return joining nodes, wrongly including nodes that are not ready."""
    nodes = [record.node for record in state.nodes.joining]
    return tuple(sorted(nodes[: max(0, rules.policy.most_members - num_staying)]))


def too_many(rules: NodeRules, state: State, num_staying: int) -> tuple[int, ...]:
    """Return all nodes that are ready, wrongly including spares."""
    return tuple(sorted(record.node for record in state.nodes.joining if record.state is NodeState.READY))


def no_rank_lives(rules: NodeRules, state: State, record: NodeRecord) -> bool:
    """Treat every node, wrongly, as one without ranks."""
    return False


@pytest.mark.parametrize(
    ("name", "wrong", "broken_rule"),
    [
        ("admitted", unready_nodes, "did not wait"),
        ("admitted", too_many, "outside its limits"),
        ("_has_living_rank", no_rank_lives, "its predecessor lives"),
    ],
)
def test_wrong_decisions_about_joining_nodes_are_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., object], broken_rule: str
) -> None:
    monkeypatch.setattr(NodeRules, name, wrong)
    _, failures = simulate(SEEDS)
    assert any(broken_rule in failure["error"] for failure in failures)


def test_a_node_that_leaves_in_the_middle_of_an_iteration_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    following = reconfigure._next

    def hasty(policy: MembershipPolicy, state: State) -> Reform:
        reform = following(policy, state)
        return reform if not state.nodes.draining else replace(reform, leaving=tuple(sorted(state.nodes.draining)))

    monkeypatch.setattr(reconfigure, "_next", hasty)
    _, failures = simulate(SEEDS)
    assert any("neither lost nor drained" in failure["error"] for failure in failures)


def test_a_change_that_is_ordered_again_and_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    change = NodeRules._change

    def forgetful(rules: NodeRules, state: State, now: Moment) -> Step | None:
        return change(rules, replace(state, phase=Phase.RUNNING), now)

    monkeypatch.setattr(NodeRules, "_change", forgetful)
    _, failures = simulate(SEEDS)
    assert any("two changes" in failure["error"] for failure in failures)


def test_kept_layouts_keep_every_rule() -> None:
    counts, failures = simulate(KEEPING)
    assert not failures, failures[0]
    often = ("reform", "filled places", "places filled by their own node", "replayed ranks", "waiting ranks")
    assert min(counts[name] for name in often) > 10
    assert min(counts[name] for name in ("start_agents", "kill_nodes", "hung ranks found", "silent nodes")) > 0


def in_any_order(policy: MembershipPolicy, state: State) -> tuple[int, ...]:
    """Return the members, wrongly in the order of a job that does not keep its layout."""
    return tuple(sorted(FILLED(policy, state)))


def not_ready(state: State) -> list[int]:
    """Return joining nodes, wrongly including nodes that are not alive yet."""
    return [record.node for record in state.nodes.joining]


FILLED = joining.members_after_filling


@pytest.mark.parametrize(
    ("name", "wrong", "broken_rule"),
    [
        ("members_after_filling", in_any_order, "place"),
        ("_all_ready", not_ready, "did not wait"),
    ],
)
def test_wrong_decisions_about_places_are_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., object], broken_rule: str
) -> None:
    monkeypatch.setattr(joining, name, wrong)
    _, failures = simulate(KEEPING)
    assert any(broken_rule in failure["error"] for failure in failures), failures


def test_killing_ranks_that_were_started_for_a_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reform = reconfigure._reform

    def harsh(policy: MembershipPolicy, state: State, now: float) -> Step:
        step = reform(policy, state, now)
        return step if step.reform is None else replace(step, nodes=step.reform.lost)

    monkeypatch.setattr(reconfigure, "_reform", harsh)
    _, failures = simulate(KEEPING)
    assert any("would be killed" in failure["error"] for failure in failures)
