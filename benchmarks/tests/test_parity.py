import math

import pytest

from benchmarks.parity import differences

EXPECTED = [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": 1.0}]


def row(**values: float) -> dict[str, float]:
    return {"loss": 2.0, "grad_norm": 1.0, "difference_squares": 0.0, "weight_squares": 4.0, **values}


def test_takes_the_worst_of_all_iterations() -> None:
    ranks = [[row(loss=2.2), row(loss=1.0, difference_squares=1.0)]]
    assert differences(ranks, EXPECTED) == pytest.approx({"loss": 0.1, "grad_norm": 0.0, "weights": 0.5})


@pytest.mark.parametrize("field", ["loss", "grad_norm", "difference_squares"])
def test_what_is_not_a_number_is_no_small_difference(field: str) -> None:
    worst = differences([[row(**{field: math.nan}), row(loss=1.0)]], EXPECTED)
    assert math.inf in worst.values()
