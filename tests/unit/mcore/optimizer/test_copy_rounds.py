"""Tests how the parameters of state copies are divided into exchanges."""

from typing import Any

import pytest

LARGE = 1 << 18


def rounds(*pairs: list[int]) -> list[tuple[int, int]]:
    """Return the parts for pairs of ranks, each given by the sizes of its parameters."""
    from megatron_ft.mcore.optimizer.state_copies import _rounds

    described: list[list[Any]] = [[{"shape": [size]} for size in sizes] for sizes in pairs]
    return [(part.start, part.stop) for part in _rounds(described)]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], []),
        ([[], []], []),
        ([[1, 2, 3], [4]], [(0, 3)]),
        ([[LARGE, LARGE], [1, 1, 1]], [(0, 1), (1, 2), (2, 3)]),
        ([[5 * LARGE, 1, 1]], [(0, 1), (1, 3)]),
        ([[LARGE - 2, 1, 1, 1]], [(0, 3), (3, 4)]),
    ],
    ids=["no pair", "nothing to send", "small", "large", "above the limit", "up to the limit"],
)
def test_a_part_has_one_parameter_or_few_values(pairs: list[list[int]], expected: list[tuple[int, int]]) -> None:
    assert rounds(*pairs) == expected
