"""Checks of one value, such as a lower bound. Each raises ``ConfigError``, which names key, value and constraint."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from megatron_ft.config.serialize import close_matches
from megatron_ft.errors import ConfigError


def require(condition: bool, key: str, value: object, constraint: str) -> None:
    """Raise ``ConfigError`` with key, value and constraint if ``condition`` is false."""
    if not condition:
        raise ConfigError.of(key, show(value), constraint)


def at_least(smallest: float, key: str, value: float | None) -> None:
    """Check that the value is at least ``smallest``; None is accepted."""
    require(value is None or value >= smallest, key, value, f"must be at least {smallest}")


def above(bound: float, key: str, value: float | None) -> None:
    """Check that the value is greater than ``bound``; None is accepted."""
    require(value is None or value > bound, key, value, f"must be greater than {bound}")


def share(key: str, value: float, *, closed: bool = False) -> None:
    """Check that the value is at least 0 and below 1. With ``closed``, 1 is accepted, too."""
    inside = 0 <= value <= 1 if closed else 0 <= value < 1
    require(inside, key, value, f"must be in [0, 1{']' if closed else ')'}")


def one_of(choices: Iterable[str], key: str, value: str | None) -> None:
    """Check that the value is one of ``choices``; None is accepted."""
    known = list(choices)
    if value is not None and value not in known:
        raise ConfigError.of(key, value, f"must be one of {', '.join(known)}{close_matches(value, known)}")


def divides(divisor: int, key: str, value: int, of_what: str) -> None:
    """Check that ``value`` is a multiple of ``divisor``. ``of_what`` is the divisor's name in the error message."""
    require(value % divisor == 0, key, value, f"must be a multiple of {of_what}={divisor}")


def finite_numbers(group: str, values: Any) -> None:
    """Check that no field of a config dataclass is NaN or infinite."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError.of(f"{group}.{field.name}", show(value), "must be a finite number")


def show(value: object) -> str:
    """Write a value in the syntax of YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
