"""Tests numbers and types in strict JSON."""

import json
import math
from typing import Any

import pytest

from megatron_ft.strict_json import _to_float, decode, encode, to_number, type_name


def test_encode_leaves_nothing_json_lacks() -> None:
    value = {"a": (math.nan, [math.inf, {"b": -math.inf}]), "c": 0.1, "d": None, "e": True}
    text = json.dumps(encode(value), allow_nan=False)
    assert json.loads(text) == {"a": ["NaN", ["Infinity", {"b": "-Infinity"}]], "c": 0.1, "d": None, "e": True}


@pytest.mark.parametrize("value", [True, None, "1.0", "nan", [1.0], {}])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        _to_float(value)
    with pytest.raises(ValueError, match="loss="):
        to_number(value, "loss")


def test_numbers_keep_their_type_unless_a_float_is_wanted() -> None:
    assert type(to_number(3, "x")) is int and type(to_number(3, "x", always_float=True)) is float
    assert math.isnan(_to_float("NaN")) and _to_float("-Infinity") == -math.inf


def test_an_integer_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="within the range of a float"):
        _to_float(10**400)


@pytest.mark.parametrize(
    ("hint", "value", "name"),
    [
        (int, 3, "int"),
        (str | None, None, "str"),
        (tuple[tuple[int, ...], ...], ((1, 2), ()), "list of list of int"),
        (dict[str, float], {"a": 1.5}, "object of float"),
    ],
)
def test_decode_is_the_inverse_of_encode(hint: Any, value: object, name: str) -> None:
    assert decode(hint, json.loads(json.dumps(encode(value))), "here") == value
    assert type_name(hint) == name


@pytest.mark.parametrize(
    ("hint", "value"), [(int, 1.0), (int, True), (bool, 1), (str, 1), (dict[str, float], {"a": "b"})]
)
def test_decode_refuses_and_says_where(hint: Any, value: object) -> None:
    with pytest.raises(ValueError, match=r"^here"):
        decode(hint, value, "here")
