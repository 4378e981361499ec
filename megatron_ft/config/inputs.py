"""Reads the recorded loads and placements that a configuration names. Planning checks that they fit the job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.expert_loads import MAX_BYTES, ExpertLoads, read_expert_loads
from megatron_ft.reading import read_bytes
from megatron_ft.strict_json import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledPlacement:
    """Scheduled placement as read from a file."""

    path: str
    stages: tuple[Mapping[str, Any], ...]
    """Plan of each pipeline stage, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputs:
    """Contents of placement and routing files; None or empty if the configuration names none."""

    loads: ExpertLoads | None = None
    schedule: Mapping[int, ScheduledPlacement] = field(default_factory=dict)
    """Placements by the first iteration that uses them."""
    trace: ExpertLoads | None = None


def read_inputs(config: JobConfig) -> JobInputs:
    """Read every placement and routing file of ``config``.

    Raises:
        ConfigError, DataError: the message names the key.
    """
    trace = read_trace(config) if config.model.router == "trace" else None
    return JobInputs(loads=read_first_loads(config), schedule=read_schedule(config), trace=trace)


def read_first_loads(config: JobConfig) -> ExpertLoads | None:
    """Read ``placement.loads_file``, if given."""
    path = config.placement.loads_file
    return None if path is None else _read_loads("placement.loads_file", path)


def read_trace(config: JobConfig) -> ExpertLoads:
    """Read ``model.router_trace_file``."""
    path = config.model.router_trace_file
    assert path is not None, "model.router=trace needs a file"
    return _read_loads("model.router_trace_file", path)


def read_schedule(config: JobConfig) -> dict[int, ScheduledPlacement]:
    """Read the files of ``placement.schedule``, by iteration.

    Raises:
        ConfigError: an entry is not ITERATION:FILE, or an iteration occurs twice.
        DataError: a file cannot be read or does not contain placements.
    """
    schedule: dict[int, ScheduledPlacement] = {}
    for entry in config.placement.schedule:
        number, found, path = entry.partition(":")
        if not found or not number.isdecimal() or int(number) < 1:
            raise ConfigError.of("placement.schedule", entry, "must be ITERATION:FILE, iterations counted from 1")
        if int(number) in schedule:
            raise ConfigError.of("placement.schedule", entry, f"must be the only entry for iteration {int(number)}")
        schedule[int(number)] = ScheduledPlacement(path=path, stages=_stages(path))
    return schedule


def _read_loads(key: str, path: str) -> ExpertLoads:
    try:
        return read_expert_loads(Path(path))
    except DataError as error:
        raise DataError(f"{key}={path}: {error}") from None


def _stages(path: str) -> tuple[Mapping[str, Any], ...]:
    try:
        # Limited before it is parsed: the key may name any file of the machine.
        document = parse_json(read_bytes(Path(path), max_bytes=MAX_BYTES))
    except DataError as error:
        raise DataError(f"placement.schedule={path}: {error}") from None
    except ValueError as error:
        raise DataError(f"placement.schedule={path}: is not JSON: {error}") from None
    stages = document.get("stages") if isinstance(document, dict) else None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise DataError(f'placement.schedule={path}: must be {{"stages": [a placement for each pipeline stage]}}')
    return tuple(stages)
