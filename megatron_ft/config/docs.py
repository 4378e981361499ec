"""Reads the name, type, default and documentation of every key from the source of the dataclasses."""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import typing
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import type_name


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDoc:
    """Documentation of a key such as ``training.train_iterations``. ``doc`` is the docstring, joined to one line."""

    key: str
    type: str
    default: str
    doc: str


def key_docs() -> list[KeyDoc]:
    """List every key of ``JobConfig`` in the order of its dataclasses."""
    return list(_walk(JobConfig, ""))


def group_docs() -> dict[str, str]:
    """Map the name of each group to the first paragraph of its dataclass's docstring, joined to one line."""
    groups = {name: hint for name, hint in typing.get_type_hints(JobConfig).items() if dataclasses.is_dataclass(hint)}
    return {name: " ".join((hint.__doc__ or "").strip().split("\n\n")[0].split()) for name, hint in groups.items()}


def _walk(cls: type[Any], prefix: str) -> typing.Iterator[KeyDoc]:
    hints, docs = typing.get_type_hints(cls), _field_docstrings(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _walk(hint, f"{prefix}{field.name}.")
        else:
            yield KeyDoc(
                key=prefix + field.name, type=type_name(hint), default=_default(field), doc=docs.get(field.name, "")
            )


def _default(field: "dataclasses.Field[Any]") -> str:
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(value)
    return "null" if value is None else str(value)


def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    body = _classes_of(cls.__module__)[cls.__name__].body
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


@functools.cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    # The module is parsed once. ``inspect.getsource`` of each class would parse the whole module for every class.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {statement.name: statement for statement in tree.body if isinstance(statement, ast.ClassDef)}
