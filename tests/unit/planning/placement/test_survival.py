"""Compares survival with an enumeration of every loss and with the paper's figures, and tests the labels of
estimates."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.survival import (
    SurvivalObjective,
    minimal_masks,
    single_loss_survival,
    survival,
    surviving_weights,
)

families = st.lists(st.integers(1, 2**7 - 1), max_size=12)


def survivors(masks: list[int], num_domains: int, lost: int) -> list[tuple[int, ...]]:
    """Return the number of losses that leave every expert a domain, by enumeration."""
    return [
        chosen
        for chosen in combinations(range(num_domains), lost)
        if all(mask & ~sum(1 << d for d in chosen) for mask in masks)
    ]


@given(masks=families)
def test_sweep_counts_what_enumeration_counts(masks: list[int]) -> None:
    expected = [len(survivors(masks, 7, lost)) for lost in range(8)]
    assert surviving_weights(minimal_masks(masks), 7, 7) == expected


@settings(deadline=None)
@given(masks=families, odds=st.lists(st.floats(0.01, 3), min_size=7, max_size=7))
def test_sweep_weighs_unequal_domains(masks: list[int], odds: list[float]) -> None:
    def weight(chosen: tuple[int, ...]) -> float:
        product = 1.0
        for domain in chosen:
            product *= odds[domain]
        return product

    expected = [sum(weight(chosen) for chosen in survivors(masks, 7, lost)) for lost in range(4)]
    assert surviving_weights(minimal_masks(masks), 7, 3, odds) == pytest.approx(expected)


@given(masks=families)
def test_minimal_masks_lose_nothing(masks: list[int]) -> None:
    kept = minimal_masks(masks)
    assert all(any(small & mask == small for small in kept) for mask in masks)
    assert not any(a != b and a & b == a for a in kept for b in kept)


def names(*sets: str) -> list[set[str]]:
    return [set(held) for held in sets]


def failures(held: list[set[str]], lost: int) -> int:
    """Return the number of fatal losses among the ten losses of five nodes."""
    (value,) = survival(held, "12345", [lost])
    return round(10 * (1 - value.probability))


def test_figure_5_cases_one_and_two() -> None:
    assert failures(names("12", "12", "345", "345"), 3) == 4
    assert failures(names("12", "13", "345", "245"), 3) == 7


def test_layers_are_judged_together() -> None:
    first, second = names("12", "345"), names("13", "245")
    alone = [survival(held, "12345", [2])[0].probability for held in (first, second)]
    assert alone == [0.9, 0.9]
    assert survival(first + second, "12345", [2])[0].probability == 0.8
    assert survival(first + first, "12345", [2])[0].probability == 0.9


def test_large_clusters_are_counted_not_sampled() -> None:
    domains = [f"node{n}" for n in range(1024)]
    pairs = [{domains[n], domains[n + 1]} for n in range(0, 1024, 2)]
    (value,) = survival(pairs, domains, [3])
    assert value.exact
    assert value.method == "counting"
    assert value.probability == pytest.approx((1022 / 1023) * (1020 / 1022), rel=1e-12)


def test_estimates_say_so_and_contain_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    domains = [f"n{n}" for n in range(20)]
    held = [{domains[a], domains[b]} for a, b in combinations(range(20), 2) if (a * b) % 7 == 1]
    (exact,) = survival(held, domains, [4])
    monkeypatch.setattr("megatron_ft.planning.placement.survival.MAX_STATES", 1)
    (estimate,) = survival(held, domains, [4], num_samples=20_000)
    assert not estimate.exact
    assert estimate.interval is not None
    assert estimate.interval[0] < exact.probability < estimate.interval[1]
    assert estimate == survival(held, domains, [4], num_samples=20_000)[0]


def test_refused() -> None:
    with pytest.raises(ConfigError, match="lost domains=6"):
        survival(names("12"), "12345", [6])
    with pytest.raises(ConfigError, match="holders"):
        survival([set()], "12345", [1])


def test_objective_scores_as_survival_says() -> None:
    held = names("12", "345")
    objective = SurvivalObjective(lost_weights=(0, 1, 3))
    (two, three) = survival(held, "12345", [2, 3])
    assert objective.score([0b00011, 0b11100], 5) == pytest.approx((two.probability + 3 * three.probability) / 4)


def test_objective_follows_unequal_rates() -> None:
    objective = SurvivalObjective(lost_weights=(0, 1), failure_rates=(0.5, 0.5, 0.1, 0.1))
    masks, values = objective.losses(4, 100)
    weights = dict(zip(masks.tolist(), values.tolist(), strict=True))
    assert sum(weights.values()) == pytest.approx(1)
    assert weights[0b0011] == pytest.approx(81 * weights[0b1100])
    assert objective.score([0b0011], 4) == pytest.approx(1 - weights[0b0011])


@pytest.mark.parametrize(
    "objective",
    [
        SurvivalObjective(lost_weights=(0.0,)),
        SurvivalObjective(lost_weights=(-1.0, 2.0)),
        SurvivalObjective(lost_ratio=1.0),
        SurvivalObjective(failure_rates=(0.1, 0.0)),
        SurvivalObjective(failure_rates=(0.1,)),
    ],
)
def test_objective_refuses(objective: SurvivalObjective) -> None:
    with pytest.raises(ConfigError):
        objective.validate(2)


def test_weights_of_impossible_losses_are_those_of_the_largest_possible_one() -> None:
    objective = SurvivalObjective(lost_weights=(0, 0, 0, 1))
    assert [objective.weights(num_domains) for num_domains in (1, 2, 3)] == [(0, 1), (0, 1), (0, 0, 1)]


def stage_on(domains: tuple[str, ...], *layers: tuple[tuple[int, ...], ...]) -> PlacementPlan:
    numbers = tuple(range(1, len(layers) + 1))
    ranks = tuple(range(len(domains)))
    figures = {"num_experts": 2, "num_slots_per_rank": 2, "ranks": ranks, "layer_numbers": numbers}
    return PlacementPlan(**figures, domains=domains, slots=layers, algorithm="scripted")


def test_survival_of_one_loss_is_joint_over_layers_and_stages() -> None:
    names = ("a", "b", "c", "d")
    whole = ((0, 1), (0, 1), (), ())
    assert single_loss_survival([stage_on(names, whole)]) == 1.0
    lonely = ((0,), (0, 1), (), ())  # expert 1 is on b alone
    assert single_loss_survival([stage_on(names, whole, lonely)]) == 0.75
    other = ((), (), (0,), (1,))  # c and d hold an expert each alone
    assert single_loss_survival([stage_on(names, lonely), stage_on(names, whole, other)]) == 0.25
    assert single_loss_survival([stage_on(("a", "a"), ((0,), (1,)))]) is None, "there is one domain"


def test_survival_of_one_loss_counts_ranks_that_are_left() -> None:
    everywhere = stage_on(("a", "a", "b", "c"), ((0, 1), (0, 1), (0, 1), (0, 1)))
    for min_ranks, expected in ((0, 1.0), (2, 1.0), (3, 2 / 3), (4, 0.0)):
        assert single_loss_survival([everywhere], min_ranks=min_ranks) == pytest.approx(expected)


@settings(deadline=None)
@given(slots=st.lists(st.lists(st.integers(0, 1), max_size=2, unique=True), min_size=2, max_size=6))
def test_survival_of_one_loss_is_what_counting_gives(slots: list[list[int]]) -> None:
    names = tuple(f"domain {place}" for place in range(len(slots)))
    everyone = [[0, 1], *slots[1:]]
    plan = stage_on(names, tuple(map(tuple, everyone)))
    (counted,) = survival(plan.all_expert_domains(), names, [1])
    assert single_loss_survival([plan]) == pytest.approx(counted.probability)
