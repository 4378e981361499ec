"""Builds policies: frozen dataclasses that a configuration names by the dotted path in ``_target_``.

Another package extends the project with a class and a YAML file; no registry has to be edited. Only frozen dataclasses
are built. This catches mistakes but is no protection: the module in ``_target_`` is imported, even by a dry run, and
the import runs code of the module. Users who can write a configuration can therefore run code (SECURITY.md).
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, get_origin, get_type_hints

from megatron_ft.errors import ConfigError


def build_policy(key: str, spec: Mapping[str, Any]) -> Any:
    """Build the policy that ``spec``, the value of ``key``, describes.

    The value of a dataclass field is a mapping. ``_target_`` in it chooses another class than the type of the field.
    Lists become tuples where the field is a tuple.

    Raises:
        ConfigError: there is no ``_target_``, the path names no frozen dataclass, or the fields do not fit it.
    """
    found = find_target(key, spec)
    # Ranks build their policies independently: one that changed while it runs would plan differently on each of them.
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or not _is_frozen(found):
        raise ConfigError.of(f"{key}._target_", spec["_target_"], "must name a frozen dataclass")
    return _build(key, found, {field: value for field, value in spec.items() if field != "_target_"})


def find_target(key: str, spec: Mapping[str, Any]) -> Any:
    """Import and return the object that ``spec`` names by ``_target_``.

    Raises:
        ConfigError: there is no ``_target_``, or the path cannot be imported.
    """
    path = spec.get("_target_")
    if not isinstance(path, str) or not all(path.split(".")) or "." not in path:
        raise ConfigError.of(f"{key}._target_", path, "must be the dotted path of a class")
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(f"{key}._target_", path, f"must be importable ({error})") from None


def _build(key: str, found: type, values: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(found) if field.init}
    for name in values:
        if name not in fields:
            what = f"must be one of the fields of {found.__name__}: {', '.join(sorted(fields))}"
            raise ConfigError.of(f"{key}.{name}", values[name], what)
    # Checked before the call, whose TypeError would name arguments of a class and no key.
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError.of(f"{key}.{name}", None, f"must be given: {found.__name__} has no default for it")
    hints = get_type_hints(found)
    return found(**{name: _value(f"{key}.{name}", hints[name], value) for name, value in values.items()})


def _value(key: str, hint: Any, value: Any) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build_policy(key, value)
    if isinstance(value, Mapping) and isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(key, hint, value)
    return tuple(value) if isinstance(value, list) and get_origin(hint) is tuple else value


def _is_frozen(found: type) -> bool:
    return bool(found.__dataclass_params__.frozen)  # type: ignore[attr-defined]
