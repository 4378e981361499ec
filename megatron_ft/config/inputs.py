"""Reads two kinds of files that a configuration names: recorded expert loads, and placements.

The package ``planning`` checks that the content fits the job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.config.findings import Findings
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.expert_loads import MAX_BYTES, ExpertLoads
from megatron_ft.reading import read_bytes
from megatron_ft.serde import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledPlacement:
    """A placement that a file in ``placement.schedule`` contains."""

    path: str
    stages: tuple[Mapping[str, Any], ...]
    """Plan of each pipeline stage: the experts in the slots of each rank, as JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputs:
    """Recorded expert loads and placements, read from files. A field is None or empty if no file is configured."""

    loads: ExpertLoads | None = None
    schedule: Mapping[int, ScheduledPlacement] = field(default_factory=dict)
    """Maps the first iteration that uses a placement to this placement."""
    trace: ExpertLoads | None = None

    @classmethod
    def read(cls, config: JobConfig) -> "JobInputs":
        """Read the files that ``placement.loads_file``, ``placement.schedule`` and ``model.router_trace_file`` name.

        Raises:
            ConfigError, DataError: a file or an entry is invalid; the message names the key. SeveralErrors: several
                files or entries are invalid.
        """
        found = Findings()
        loads = trace = None
        schedule: dict[int, ScheduledPlacement] = {}
        with found.collecting(at_fault=()):
            loads = read_first_loads(config)
        with found.collecting(at_fault=()):
            schedule = read_schedule(config)
        with found.collecting(at_fault=()):
            trace = read_trace(config) if config.model.router == "trace" else None
        found.raise_errors()
        return cls(loads=loads, schedule=schedule, trace=trace)


def read_first_loads(config: JobConfig) -> ExpertLoads | None:
    """Read the expert loads in ``placement.loads_file``; return None if the key is null."""
    path = config.placement.loads_file
    return None if path is None else _read_loads("placement.loads_file", path)


def read_trace(config: JobConfig) -> ExpertLoads:
    """Read the expert loads in ``model.router_trace_file``."""
    path = config.model.router_trace_file
    assert path is not None, "model.router_trace_file must be given with model.router=trace"
    return _read_loads("model.router_trace_file", path)


def read_schedule(config: JobConfig) -> dict[int, ScheduledPlacement]:
    """Read the files of ``placement.schedule``. Map the first iteration of each placement to the placement.

    Raises:
        ConfigError: an entry is not ITERATION:FILE, or an iteration occurs twice.
        DataError: a file cannot be read or does not contain placements.
    """
    schedule: dict[int, ScheduledPlacement] = {}
    for entry in config.placement.schedule:
        number, found, path = entry.partition(":")
        if not found or not number.isdecimal() or int(number) < 1:
            raise ConfigError.of("placement.schedule", entry, "must be ITERATION:FILE with an iteration of at least 1")
        if int(number) in schedule:
            raise ConfigError.of("placement.schedule", entry, f"must be the only entry for iteration {int(number)}")
        schedule[int(number)] = ScheduledPlacement(path=path, stages=_stages(path))
    return schedule


def _read_loads(key: str, path: str) -> ExpertLoads:
    try:
        return ExpertLoads.read(Path(path))
    except DataError as error:
        raise DataError(f"{key}={path}: {error}") from None


def _stages(path: str) -> tuple[Mapping[str, Any], ...]:
    try:
        # The size is limited before parsing, because the key may name any file of the machine.
        document = parse_json(read_bytes(Path(path), max_bytes=MAX_BYTES))
    except DataError as error:
        raise DataError(f"placement.schedule={path}: {error}") from None
    except ValueError as error:
        raise DataError(f"placement.schedule={path}: is not JSON: {error}") from None
    stages = document.get("stages") if isinstance(document, dict) else None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise DataError(f'placement.schedule={path}: must be {{"stages": [a placement for each pipeline stage]}}')
    return tuple(stages)
