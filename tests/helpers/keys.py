"""Names the keys of the groups about nodes by their last parts."""

import dataclasses
from typing import Any

from megatron_ft.config.job import JobConfig

_GROUPS = ("launch", "nodes", "recovery", "topology", "limits", "control", "testing")
_GROUP_OF = {field.name: group for group in _GROUPS for field in dataclasses.fields(getattr(JobConfig(), group))}


def dotted(**values: Any) -> dict[str, Any]:
    """Return values by dotted key: ``dotted(min_nodes=2)`` is ``{"recovery.min_nodes": 2}``."""
    return {f"{_GROUP_OF[name]}.{name}": value for name, value in values.items()}


def grouped(**values: Any) -> dict[str, Any]:
    """Return values by group, for ``from_dict``: ``grouped(min_nodes=2)`` is ``{"recovery": {"min_nodes": 2}}``."""
    groups: dict[str, Any] = {}
    for name, value in values.items():
        groups.setdefault(_GROUP_OF[name], {})[name] = value
    return groups
