"""Tests policies whose windows leave out experts, and the counts of tokens that a recovery loses."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.operators import OperatorId
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.expert_choice import LoadAware, Sequential, TokenRisk
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger, mean_share
from megatron_ft.planning.snapshot.partial_experts import (
    ChoiceBasis,
    ExpertBytes,
    ExpertPolicy,
    PartialExperts,
    SelectiveExperts,
)
from megatron_ft.planning.snapshot.partial_windows import PartialWindows
from megatron_ft.planning.snapshot.plan import Piece, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.testing.demands import equal_experts, expert, rest, shard

LAYERS, EXPERTS, RANKS = (1, 2, 4), 8, 4


def demand() -> Demand:
    """Make a demand of four ranks, each with two experts of every MoE layer; layer 3 is dense."""
    by_rank = []
    for rank in range(RANKS):
        own = [shard(expert(layer, number), 100) for layer in LAYERS for number in (2 * rank, 2 * rank + 1)]
        by_rank.append((*own, *(shard(rest(layer), 40) for layer in (1, 2, 3, 4))))
    return Demand(shards_by_rank=tuple(by_rank))


def given(budget_bytes: float) -> SnapshotContext:
    return SnapshotContext(bandwidth_bytes_per_second=budget_bytes, iteration_seconds=1.0)


def basis(at_risk: np.ndarray, **changes: Any) -> ChoiceBasis:
    values: dict[str, Any] = {
        "number": 0,
        "at_risk": at_risk,
        "iteration_loads": np.ones(at_risk.shape),
        "lost_share": 0.0,
        "planned_tokens": 10**9,
        "budget_bytes": 10**9,
        **changes,
    }
    return ChoiceBasis(**values)


ALWAYS = 4 * (40 * 12 + 4) + 6 * 4  # four layers of other operators, and the step counts of six experts
EXPERT = 100 * 12


@pytest.mark.parametrize(("budget", "wanted"), [(ALWAYS + EXPERT, 1), (ALWAYS + 2 * EXPERT, 2), (10**6, 8), (1, 1)])
def test_the_largest_number_that_does_not_stall_is_taken(budget: int, wanted: int) -> None:
    plan = PartialExperts(choice=Sequential()).plan(demand(), given(budget))
    assert plan.partial is not None and plan.partial.num_experts == wanted
    state = ExpertBytes.of(demand(), plan.partial.components)
    assert state.num_groups == RANKS and int(state.always.max()) == ALWAYS
    peaks = [
        max(
            int(state.captured(Sequential().choose(turn, number, np.zeros((3, 8), dtype=np.int64), RANKS)).max())
            for turn in range(EXPERTS)
        )
        for number in range(1, EXPERTS + 1)
    ]
    fitting = [number for number, peak in enumerate(peaks, start=1) if peak <= budget]
    assert wanted == max(fitting, default=1), "checked against every number"
    assert f"captures {wanted} of 8 experts" in plan.reason


def test_a_choice_by_load_is_planned_for_the_busiest_rank() -> None:
    plan = PartialExperts(choice=LoadAware()).plan(demand(), given(ALWAYS + 3 * EXPERT))
    assert plan.partial is not None and plan.partial.num_experts == 1, "all three layers may choose the same rank"


@pytest.mark.parametrize(
    ("leave_out", "components"), [(("moments",), ("exp_avg", "exp_avg_sq")), (("masters",), ("master",))]
)
def test_parts_that_are_not_left_out_are_always_captured(leave_out: tuple[str, ...], components: Sequence[str]) -> None:
    plan = PartialExperts(num_experts=1, leave_out=leave_out).plan(demand(), given(10**6))
    assert plan.partial is not None and plan.partial.components == components
    state = ExpertBytes.of(demand(), components)
    assert state.left_out[0, 0].tolist() == [100 * 4 * len(components), 0, 0, 0]
    assert int(state.always[0] + state.left_out[..., 0].sum()) == ALWAYS + 6 * EXPERT, "nothing is counted twice"


def test_more_experts_are_captured_before_the_bound_is_exceeded() -> None:
    policy = PartialExperts(num_experts=1, max_lost_share=0.01)
    plan, state = policy.plan(demand(), given(10**6)), ExpertBytes.of(demand(), ("master", "exp_avg", "exp_avg_sq"))
    at_risk = np.zeros((3, 8), dtype=np.int64)

    def number(**changes: Any) -> int:
        return int(policy.choose(plan, basis(at_risk, **changes), state).sum(axis=1).max())

    # With one token for each expert in an iteration, one failure loses at most 0 + 1 + ... + 7 = 28 tokens of a layer.
    assert number(planned_tokens=2800) == 1
    assert number(planned_tokens=2799) == 2
    assert number(planned_tokens=2800, lost_share=0.001) == 2, "what is lost already counts"
    assert number(planned_tokens=2800, lost_share=0.02) == 8, "nothing more may be lost"
    at_risk[:, 7] = 200
    assert number(planned_tokens=10_000) == 8, "what this window leaves out counts, however it came to be"
    at_risk[:, 7] = 0
    assert (
        int(
            PartialExperts(num_experts=1, max_lost_share=None).choose(plan, basis(at_risk, lost_share=0.5), state).sum()
        )
        == 3
    )


def test_ranks_that_would_wait_for_the_busiest_one_capture_further_experts() -> None:
    """Three layers on four ranks: with K=1, one rank captures no expert. It can capture one at no cost."""
    policy = PartialExperts(num_experts=1, choice=Sequential(), max_lost_share=None)
    plan, state = policy.plan(demand(), given(10**6)), ExpertBytes.of(demand(), ("master", "exp_avg", "exp_avg_sq"))
    at_risk = np.arange(24).reshape(3, 8) + 1
    filling = replace(policy, fill_ranks=True)
    for turn in range(8):
        chosen = policy.choose(plan, basis(at_risk, number=turn), state)
        filled = filling.choose(plan, basis(at_risk, number=turn), state)
        assert chosen.sum() == 3 and filled.sum() == 4 and (filled | ~chosen).all()
        assert state.captured(filled).tolist() == [ALWAYS + EXPERT] * 4, "the busiest rank captures no byte more"
        (added,) = at_risk[filled & ~chosen]
        idle = int(np.argmin(state.captured(chosen)))
        assert added == at_risk[:, 2 * idle : 2 * idle + 2].max(), "the expert with the most tokens at risk"
    nothing = filling.choose(plan, basis(at_risk * 0), state)
    assert nothing.sum() == 3, "experts without tokens at risk are not captured"


def test_a_budget_holds_on_the_rank_with_the_most_experts_at_risk() -> None:
    policy = SelectiveExperts()
    budget = ALWAYS + 2 * EXPERT
    plan = policy.plan(demand(), given(budget))
    assert plan.partial is not None and plan.partial.num_experts == 2, "of a layer: 6 experts on 4 ranks of at most 2"
    state = ExpertBytes.of(demand(), plan.partial.components)
    at_risk = np.arange(24).reshape(3, 8)[:, ::-1] * np.array([[1], [2], [3]])  # most on the first rank
    wanted = TokenRisk().choose(0, 2, at_risk, RANKS)
    assert int(state.captured(wanted).max()) > budget
    mask = policy.choose(plan, basis(at_risk, budget_bytes=budget), state)
    assert int(state.captured(mask).max()) <= budget and mask.sum() == wanted.sum()
    first = np.unravel_index(int(np.argmax(np.where(wanted, at_risk, -1))), at_risk.shape)
    assert mask[first], "the expert with the most tokens at risk is captured"
    assert policy.choose(plan, basis(at_risk, budget_bytes=1), state).sum() == 1, "one expert is always captured"


@pytest.mark.parametrize("remote", [None, 1.5, 0.2])
def test_the_smaller_budget_counts(remote: float | None) -> None:
    local = ALWAYS + 3 * EXPERT
    bandwidth = None if remote is None else remote * local
    plan = SelectiveExperts(remote_bandwidth_bytes_per_second=bandwidth).plan(demand(), given(local))
    assert plan.partial is not None and plan.partial.num_experts == (1 if remote == 0.2 else 4)


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (PartialExperts(num_experts=0), "num_experts=0"),
        (PartialExperts(interval_iterations=0), "interval_iterations=0"),
        (PartialExperts(leave_out=("weights",)), "leave_out"),
        (PartialExperts(leave_out=()), "leave_out"),
        (PartialExperts(leave_out=("moments", "moments")), "leave_out"),
        (PartialExperts(max_lost_share=1.0), "max_lost_share=1.0"),
        (PartialExperts(replan_drift=-0.1), "replan_drift"),
        (SelectiveExperts(remote_bandwidth_bytes_per_second=0.0), "remote_bandwidth_bytes_per_second=0.0"),
        (SelectiveExperts(num_experts=-1), "num_experts=-1"),
    ],
)
def test_fields_out_of_range_are_refused(policy: ExpertPolicy, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        policy.plan(demand(), given(10**6))


def test_a_model_without_experts_is_captured_whole() -> None:
    plan = PartialExperts().plan(Demand(shards_by_rank=((shard(rest(1), 10),),)), given(10**6))
    assert plan.partial is None and "no experts" in plan.reason


def pieces(layers: Sequence[int], experts: int) -> tuple[Piece, ...]:
    names = [
        (f"decoder.layers.{layer - 1}.mlp.experts.local_experts.{number}.linear_fc1.weight", component)
        for layer in layers
        for number in range(experts)
        for component in ("master", "exp_avg", "step")
    ]
    names.append(("decoder.layers.0.self_attention.linear_qkv.weight", "master"))
    return tuple(Piece(name, 0, component, "float32", 0, 1, 64 * row, 4) for row, (name, component) in enumerate(names))


@pytest.mark.parametrize("seed", range(100))
def test_lost_tokens_equal_a_recount_from_the_log_of_all_tokens(seed: int) -> None:
    """Runs random schedules of windows, abandoned windows and failures. The recount has its own record of what every
    window captured, and adds up the tokens of the iterations since then."""
    generator = random.Random(seed)
    model_layers, experts = 4, 8
    policy: Any = generator.choice(
        [
            PartialExperts(num_experts=generator.randint(1, 3), interval_iterations=generator.randint(1, 3)),
            PartialExperts(num_experts=2, choice=LoadAware(), max_lost_share=None),
            SelectiveExperts(num_experts=generator.randint(1, 4)),
        ]
    )
    plan = policy.plan(demand(), given(10**6))
    assert plan == WindowPlan.from_json(plan.to_json())
    planned = 60 * 800

    def loads() -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(generator.randint(0, 200) if layer in LAYERS else 0 for _ in range(experts))
            for layer in range(1, model_layers + 1)
        )

    ledger = TokenLedger.empty([[0] * experts] * len(LAYERS))
    log: list[tuple[tuple[int, ...], ...]] = []  # tokens of each iteration of the present history, from iteration 1
    windows, held = PartialWindows(policy, plan, demand(), planned), []
    saved: dict[int, tuple[TokenLedger, Any]] = {}
    recount = np.zeros((len(LAYERS), experts), dtype=np.int64)
    lost_before: dict[int, np.ndarray] = {}
    num_failures = 0
    while len(log) < 60:
        log.append(loads())
        ledger = ledger.after([log[-1][layer - 1] for layer in LAYERS])
        now = len(log)
        if now % policy.interval_iterations == 0:
            windows.begin(now, held, ledger, log[-8:])
            held = [*held[-generator.randint(1, 2) :], now]
            saved[now] = (ledger, windows.at_risk(now))
            lost_before[now] = recount.copy()
            found = windows.captured_at(now, pieces(LAYERS, experts), model_layers)
            if generator.random() < 0.15:
                held.remove(now)  # a rank gave the window up
            elif found is not None:
                by_expert = np.array(found[:-1]).reshape(len(LAYERS), experts, 3)
                assert (by_expert[..., 2] == now).all() and found[-1] == now, "step counts and other operators are new"
                assert (by_expert[..., 0] == by_expert[..., 1]).all()
                at_risk = [
                    [sum(row[layer - 1][number] for row in log[at:now]) for number, at in enumerate(ats)]
                    for layer, ats in zip(LAYERS, by_expert[..., 0].tolist(), strict=True)
                ]
                assert [list(row) for row in saved[now][1]] == at_risk
        if held and generator.random() < 0.08 and num_failures < 6:
            num_failures += 1
            back = held[-1]
            ledger, at_risk_then = saved[back]
            ledger = ledger.after_loss(at_risk_then)
            recount = lost_before[back] + np.array(at_risk_then)
            log = log[:back]
            windows, held = PartialWindows(policy, plan, demand(), planned), []
    assert np.array_equal(np.array(ledger.lost), recount)
    plt = float(np.mean([row.sum() / planned for row in recount]))
    assert ledger.lost_share(planned) == pytest.approx(plt)
    layers = zip(recount, ledger.processed, strict=True)
    assert ledger.momentary(recount.tolist()) == pytest.approx(sum(row.sum() / sum(total) for row, total in layers))
    assert TokenLedger.from_json({"processed": [list(row) for row in ledger.processed], "lost": ledger.lost}) == ledger


def test_a_share_without_layers_is_zero() -> None:
    assert mean_share((), 10) == 0.0 == mean_share(((1,),), 0)


def test_groups_are_found_only_where_experts_are_together() -> None:
    assert ExpertBytes.of(equal_experts(6), ("master",)).num_groups == 1
    mixed = Demand(
        shards_by_rank=tuple((shard(expert(1, rank), 10), shard(expert(1, 3 - rank), 10)) for rank in range(2))
    )
    assert ExpertBytes.of(mixed, ("master",)).num_groups == 1, "experts 0 and 3 are on the same rank"
    assert OperatorId(layer=1, kind="expert", expert=3) in mixed.operators


@pytest.mark.parametrize("kind", [PartialExperts, SelectiveExperts])
def test_a_fixed_number_of_experts_needs_no_measurement(kind: type[PartialExperts] | type[SelectiveExperts]) -> None:
    fixed = kind(num_experts=2, interval_iterations=3).plan_unmeasured(demand())
    measured = kind(num_experts=2, interval_iterations=3).plan(demand(), given(10**6))
    assert fixed.partial == measured.partial and fixed.partial is not None
    assert (fixed.num_iterations, fixed.interval_iterations, fixed.slices) == (1, 3, measured.slices)
    assert fixed.partial.captured_bytes is not None and 0 < fixed.partial.captured_bytes < 10**6
    assert WindowPlan.from_json(fixed.to_json()) == fixed
    assert kind().plan_unmeasured(demand()).partial is None


def test_a_plan_of_an_earlier_version_has_no_captured_bytes() -> None:
    content = PartialExperts(num_experts=2).plan_unmeasured(demand()).to_json()
    del content["partial"]["captured_bytes"]
    found = WindowPlan.from_json(content).partial
    assert found is not None and found.captured_bytes is None


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (PartialExperts(), "at most 3.75 % of the whole training's tokens"),
        (PartialExperts(max_lost_share=None, num_experts=3, interval_iterations=5), "updates of at most 10 iterations"),
        (PartialExperts(max_lost_share=None), "updates of at most 7 iterations"),
        (PartialExperts(max_lost_share=None, choice=LoadAware()), "no key limits their number"),
        (SelectiveExperts(num_experts=2), "no key limits their number"),
    ],
)
def test_the_bound_of_lost_updates_is_stated(policy: ExpertPolicy, words: str) -> None:
    assert words in policy.update_loss(8)


def test_the_stated_number_of_iterations_bounds_the_age_of_experts() -> None:
    choice, last, ages = Sequential(), np.zeros((3, 8), dtype=np.int64), []
    for number in range(1, 40):
        last[choice.choose(number, 3, np.zeros((3, 8), dtype=np.int64), 4)] = number
        ages.append(int((number - last).max()))
    assert max(ages) == 2, "8 experts, 3 in each window: two windows ago at most"


def test_records_are_kept_for_a_plan_of_the_same_slices_only() -> None:
    plan = PartialExperts(num_experts=1).plan(demand(), given(10**6))
    windows = PartialWindows(PartialExperts(num_experts=1), plan, demand(), 10**9)
    ledger = TokenLedger.empty([[5] * EXPERTS] * len(LAYERS))
    windows.begin(1, (), ledger, ())
    assert windows.replan(PartialExperts(num_experts=2).plan(demand(), given(10**6)))
    windows.begin(2, (1,), ledger, ())
    found = windows.captured_at(2, pieces(LAYERS, EXPERTS), 4)
    assert found is not None and found.count(1) == len(LAYERS) * 2 * (EXPERTS - 2)
    assert not windows.replan(PartialExperts(num_experts=2, leave_out=("moments",)).plan(demand(), given(10**6)))
    assert not windows.replan(replace(plan, partial=None))
    assert not windows.replan(replace(plan, slices=(plan.slices[0][::-1],)))
    assert windows.shares(3, ledger) == (None, 0.0), "the window is not known"
