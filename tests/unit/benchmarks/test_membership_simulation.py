"""The simulated jobs keep the rules, and notice decisions that break them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from benchmarks.membership_simulation import simulate
from megatron_ft.control import membership_reform
from megatron_ft.control.membership_state import MembershipPolicy, State, Step
from megatron_ft.planning.recovery.target import Position, Target

SEEDS = range(60)


def test_the_decisions_of_the_product_keep_every_rule() -> None:
    counts, failures = simulate(SEEDS)
    assert not failures, failures[0]
    assert min(counts["reform"], counts["finished"], counts["undone"]) > 10


@pytest.mark.parametrize(("choose", "broken_rule"), [(min, "would be undone"), (max, "cannot finish")])
def test_a_target_that_forgets_settled_votes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[[Iterable[int]], int], broken_rule: str
) -> None:
    def forget(positions: Sequence[Position]) -> Target:
        return Target(iteration=choose(position.completed for position in positions), vote=None)

    monkeypatch.setattr(membership_reform, "choose_target", forget)
    _, failures = simulate(SEEDS)
    assert any(broken_rule in failure["error"] for failure in failures)


def test_going_on_before_everybody_has_spoken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = membership_reform._left

    def fewer(policy: MembershipPolicy, state: State) -> set[int]:
        left = everybody(policy, state)
        return left if len(state.broken) < 2 else left & {fact.rank for fact in state.broken}

    monkeypatch.setattr(membership_reform, "_left", fewer)
    _, failures = simulate(SEEDS)
    assert any("not heard" in failure["error"] for failure in failures)


def test_a_lost_node_that_comes_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reform = membership_reform._reform

    def generous(policy: MembershipPolicy, state: State, now: float) -> Step:
        step = reform(policy, state, now)
        return replace(step, state=replace(step.state, members=(*step.state.members, policy.num_nodes)))

    monkeypatch.setattr(membership_reform, "_reform", generous)
    _, failures = simulate(SEEDS)
    assert any("came back" in failure["error"] for failure in failures)
