"""Builds covering arrays: small sets of trials in which every combination of values of any two (or k) factors occurs.

A full product of six factors with three values each has 729 rows; an array that covers all pairs has about 15.
Greedy construction over the enumerated product (compare D. M. Cohen et al., "The AETG System", IEEE TSE 23(7),
1997, which samples candidates instead of enumerating them).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megatron_ft.errors import ConfigError

Scalar = str | int | float | bool | None
Row = dict[str, Scalar]
MAX_PRODUCT = 200_000


def covering_array(
    factors: Mapping[str, Sequence[Scalar]], *, strength: int = 2, allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Return rows that contain every combination of values of any ``strength`` factors that occurs in an allowed row.

    The result is deterministic: the next row is always the first row of the product that adds most new combinations.
    Raises ConfigError if ``strength`` exceeds the number of factors or the product has more than ``MAX_PRODUCT`` rows.
    """
    if not 1 <= strength <= len(factors):
        raise ConfigError.of("strength", strength, f"must be between 1 and the number of factors, {len(factors)}")
    rows = _allowed_rows(factors, allowed)
    tuples = _tuples_of_rows(rows, strength)
    uncovered = np.zeros(int(tuples.max()) + 1 if tuples.size else 0, dtype=bool)
    uncovered[tuples] = True
    chosen: list[Row] = []
    while uncovered.any():
        best = int(np.argmax(uncovered[tuples].sum(axis=1)))
        uncovered[tuples[best]] = False
        chosen.append(rows[best])
    return chosen


def combinations_of(row: Row, strength: int) -> set[tuple[tuple[str, Scalar], ...]]:
    """Return all combinations of ``strength`` (factor, value) pairs that a row contains."""
    return set(itertools.combinations(row.items(), strength))


def _allowed_rows(factors: Mapping[str, Sequence[Scalar]], allowed: Callable[[Row], bool]) -> list[Row]:
    size = int(np.prod([len(values) for values in factors.values()], dtype=np.int64))
    if not 0 < size <= MAX_PRODUCT:
        raise ConfigError.of("factors", f"{size} rows", f"must have a product of 1 to {MAX_PRODUCT} rows")
    product = itertools.product(*factors.values())
    return [row for row in (dict(zip(factors, values, strict=True)) for values in product) if allowed(row)]


def _tuples_of_rows(rows: list[Row], strength: int) -> np.ndarray:
    """Return the number that identifies each combination of each row: int64 ``[num_rows,
    num_combinations_per_row]``."""
    numbers: dict[tuple[tuple[str, Scalar], ...], int] = {}
    table = [
        [numbers.setdefault(c, len(numbers)) for c in itertools.combinations(row.items(), strength)] for row in rows
    ]
    return np.array(table, dtype=np.int64)
