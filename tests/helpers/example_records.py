"""Makes an example of every kind of record from the types of its fields."""

import dataclasses
import types
import typing

from megatron_ft.events import Record


def example_of(kind: type[Record]) -> Record:
    """Return a record of ``kind`` with a value in each field."""
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: _example(hints[field.name]) for field in dataclasses.fields(kind)})


def _example(hint: object) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _example(arguments[0])
    if origin is tuple:
        return (_example(arguments[0]), _example(arguments[0]))
    if origin is dict:
        return {"loss": _example(arguments[1])}
    return {int: 3, float: 0.1 + 0.2, str: "text", bool: True}[hint]  # type: ignore[index]
