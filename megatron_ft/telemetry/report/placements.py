"""Where expert replicas have sat over a run: each placement that took over, and the slots of the one in force."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.events import PlacementInForce, Record
from megatron_ft.planning.placement.plan import PlacementPlan, Slots
from megatron_ft.strict_json import decode, parse_json

FOLDER = "placements"
MAX_BYTES = 64 * 2**20
"""A larger file is no placement that a run has written."""
MAX_EXPERTS = 2**16
_TYPES: dict[str, Any] = {
    "num_experts": int,
    "num_slots_per_rank": int,
    "ranks": tuple[int, ...],
    "domains": tuple[str, ...],
    "layer_numbers": tuple[int, ...],
    "slots": Slots,
    "algorithm": str,
}


def newest_plans(run_dir: Path, records: Sequence[Record]) -> tuple[PlacementPlan, ...]:
    """Plans of all pipeline stages, as the newest placement of the run was kept; none where there is no such file.

    Raises:
        ValueError: the file is damaged; names it.
    """
    newest = next((record for record in reversed(records) if isinstance(record, PlacementInForce)), None)
    if newest is None:
        return ()
    path = run_dir / FOLDER / f"iter_{newest.iteration:07d}.json"
    if not path.is_file():
        return ()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"must be at most {MAX_BYTES} bytes")
        return _plans(parse_json(path.read_bytes()))
    except (ValueError, ConfigError) as error:
        raise ValueError(f"{path}: {error}") from None


def _plans(content: object) -> tuple[PlacementPlan, ...]:
    stages = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ValueError("stages: must be a placement for each pipeline stage")
    return tuple(_plan(stage) for stage in stages)


def _plan(stage: dict[str, Any]) -> PlacementPlan:
    if missing := [name for name in _TYPES if name not in stage]:
        raise ValueError(f"stages.{missing[0]}: is required")
    plan = PlacementPlan(**{name: decode(hint, stage[name], f"stages.{name}") for name, hint in _TYPES.items()})
    if not 0 < plan.num_experts <= MAX_EXPERTS:
        raise ValueError(f"stages.num_experts={plan.num_experts}: must be 1 to {MAX_EXPERTS}")
    plan.validate()
    return plan
