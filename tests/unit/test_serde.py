"""Tests that dataclasses are converted to JSON and back unchanged, and that an invalid field is refused by its name."""

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

import pytest

from megatron_ft.serde import Between, Length, decode, encode, type_name


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    count: Annotated[int, Between(0, 9)]


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Length(1, 4)]
    share: float
    inner: Inner | None
    colour: Colour = Colour.RED
    kind: Literal["a", "b"] = "a"
    items: tuple[int | None, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    anything: Any = None


VALUE = Outer("x", 1.5, Inner(3), items=(1, None), by_name={"k": Inner(0)}, anything=[{"y": 1}])
PLAIN: dict[str, Any] = {"name": "x", "share": 1.5, "inner": None}


def test_a_value_comes_through_json() -> None:
    assert decode(Outer, json.loads(json.dumps(encode(VALUE)))) == VALUE
    assert decode(Outer, {**PLAIN, "share": 2}) == Outer("x", 2.0, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name: must have 1 to 4 entries or characters, but has 0"),
        ({"name": "abcde"}, "name: must have 1 to 4"),
        ({"name": 1}, "name=1: must be str"),
        ({"share": True}, "share=True: must be float"),
        ({"share": 10**400}, "share: must be an integer within the range of a float"),
        ({"inner": {"count": 10}}, "inner.count=10: must be from 0 to 9"),
        ({"inner": {"count": 1.0}}, "inner.count=1.0: must be int"),
        ({"inner": {"count": True}}, "inner.count=True: must be int"),
        ({"inner": {}}, "inner.count: is missing"),
        ({"inner": 7}, "inner=7: must be an object"),
        ({"colour": "blue"}, "colour='blue': must be 'red'"),
        ({"kind": "c"}, "kind='c': must be 'a' or 'b'"),
        ({"items": [1, "2"]}, r"items\[1\]='2': must be int"),
        ({"items": 1}, "items=1: must be list of int or null"),
        ({"by_name": {"k": 1}}, "by_name.k=1: must be an object"),
        ({"more": 1}, "more: is not a field of Outer"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Outer, {**PLAIN, **changes})


def test_bounds_of_a_float_exclude_what_is_not_finite() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be from 0"):
            decode(Annotated[float, Between(0.0, 1e300)], value)


def test_encode_leaves_nothing_json_lacks() -> None:
    value = {"a": (math.nan, [math.inf, {"b": -math.inf}]), "c": 0.1, "d": None, "e": True}
    text = json.dumps(encode(value), allow_nan=False)
    assert json.loads(text) == {"a": ["NaN", ["Infinity", {"b": "-Infinity"}]], "c": 0.1, "d": None, "e": True}
    assert math.isnan(decode(float, "NaN")) and decode(float, "-Infinity") == -math.inf


@pytest.mark.parametrize("value", [True, None, "1.0", "nan", [1.0], {}])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"loss=.*: must be float"):
        decode(float, value, "loss")


@pytest.mark.parametrize(
    ("hint", "value", "name"),
    [
        (int, 3, "int"),
        (str | None, None, "str or null"),
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
