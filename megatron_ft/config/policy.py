"""Builds the policy that a configuration names: a frozen dataclass, by the dotted path in ``_target_``.

An outside package extends the project with a class and a YAML file; there is no registry to edit. Only dataclasses
are built, so that a configuration cannot call arbitrary code.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from megatron_ft.errors import ConfigError


def build_policy(key: str, spec: Mapping[str, Any]) -> Any:
    """The policy of ``spec``; ``key`` is where the configuration holds it.

    Raises:
        ConfigError: no ``_target_``, a path that leads to no frozen dataclass, or fields that do not fit it.
    """
    path = spec.get("_target_")
    if not isinstance(path, str) or "." not in path:
        raise ConfigError.of(f"{key}._target_", path, "must be the dotted path of a policy class")
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(f"{key}._target_", path, f"must be importable ({error})") from None
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise ConfigError.of(f"{key}._target_", path, "must name a frozen dataclass")
    arguments = {field: value for field, value in spec.items() if field != "_target_"}
    known = {field.name for field in dataclasses.fields(found) if field.init}
    for field in arguments:
        if field not in known:
            raise ConfigError.of(
                f"{key}.{field}", arguments[field], f"is no field of {name}: {', '.join(sorted(known))}"
            )
    return found(**arguments)
