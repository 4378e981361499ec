"""Tests which experts a window captures."""

import random

import numpy as np
import pytest

from megatron_ft.planning.snapshot.expert_choice import (
    LoadAware,
    RoundRobin,
    Sequential,
    TokenRisk,
    _per_layer,
    worst_next_loss,
)


def zeros(layers: int, experts: int) -> np.ndarray:
    return np.zeros((layers, experts), dtype=np.int64)


def chosen(mask: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in mask]


def test_the_turns_are_those_of_figure_4() -> None:
    """MoC-System, figure 4: four MoE layers (1, 3, 5, 7) of three experts, one of each saved."""
    choice = Sequential()
    assert chosen(choice.choose(0, 1, zeros(4, 3), 3)) == [[0], [1], [2], [0]]
    assert chosen(choice.choose(1, 1, zeros(4, 3), 3)) == [[1], [2], [0], [1]]


@pytest.mark.parametrize("choice", [Sequential(), RoundRobin()])
@pytest.mark.parametrize(("experts", "number", "groups"), [(8, 1, 2), (8, 3, 4), (16, 4, 8), (6, 6, 3), (7, 2, 1)])
def test_every_expert_has_its_turn_in_every_cycle(
    choice: Sequential | RoundRobin, experts: int, number: int, groups: int
) -> None:
    ages = zeros(3, experts)
    for window in range(5 * experts):
        mask = choice.choose(window, number, zeros(3, experts), groups)
        assert mask.sum(axis=1).tolist() == [number] * 3
        ages = np.where(mask, 0, ages + 1)
        if window >= experts:
            assert ages.max() < -(-experts // number), "no expert waits for longer than a cycle"


@pytest.mark.parametrize(("layers", "experts", "number", "groups"), [(24, 16, 1, 8), (12, 8, 2, 4), (4, 8, 1, 2)])
def test_the_turns_of_a_window_are_spread_over_ranks(layers: int, experts: int, number: int, groups: int) -> None:
    for window in range(experts):
        mask = Sequential().choose(window, number, zeros(layers, experts), groups)
        by_group = mask.reshape(layers, groups, -1).sum(axis=(0, 2))
        # The lower bound, plus one module (MoC-System, equation 9: equality is possible only if the groups divide it).
        assert by_group.max() <= -(-layers * number // groups) + 1


def test_the_experts_with_the_most_tokens_at_risk_are_taken() -> None:
    at_risk = np.array([[5, 9, 1, 9], [0, 0, 0, 0]])
    assert chosen(LoadAware().choose(3, 2, at_risk, 1)) == [[1, 3], [0, 1]]
    # Algorithm 1 of MoEtion: layers share in proportion to their risk, up to all experts of a layer.
    assert chosen(TokenRisk().choose(3, 2, at_risk, 1)) == [[0, 1, 2, 3], []]
    assert chosen(TokenRisk().choose(3, 3, at_risk, 1)) == [[0, 1, 2, 3], [0, 1]]


def test_all_experts_of_the_budget_are_given_to_layers() -> None:
    generator = random.Random(5)
    for _ in range(300):
        layers, experts = generator.randint(1, 6), generator.randint(1, 9)
        risk = [generator.choice([0, generator.randint(0, 10**12)]) for _ in range(layers)]
        total = generator.randint(0, layers * experts)
        shares = _per_layer(risk, total, experts)
        assert int(shares.sum()) == total and shares.min() >= 0 and shares.max() <= experts
    assert _per_layer([3, 1], 4, 8).tolist() == [3, 1]


def test_the_bound_of_the_next_loss_is_reached_and_not_exceeded() -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        experts, number, interval = int(generator.integers(2, 9)), int(generator.integers(1, 4)), 3
        loads = generator.integers(0, 100, size=experts).astype(float)
        bound = worst_next_loss(loads, interval, number)
        worst = 0.0
        for _ in range(200):
            order = generator.permutation(experts)
            last = np.zeros(experts)
            last[order] = np.arange(experts) // number  # windows since each expert was captured
            worst = max(worst, float(loads @ last) * interval)
        order = np.argsort(loads)
        last = np.zeros(experts)
        last[order] = np.arange(experts) // number
        assert worst <= bound == float(loads @ last) * interval
