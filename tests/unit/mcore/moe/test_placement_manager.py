"""Tests the survival probability of the current placement, and a placement that cannot be written to a file."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft import durable
from megatron_ft.config.membership import derive_placement
from megatron_ft.config.serialize import from_dict
from megatron_ft.mcore.moe.placement_manager import PlacementManager
from tests.helpers.keys import grouped

ALGORITHM = {"algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"}}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"min_nodes": 2}, 1.0),
        ({"min_nodes": 4}, 0.0),
        ({"min_nodes": 2, "strategies": ["checkpoint"]}, None),
        ({"min_nodes": 3, "failure_domains": ["a", "a", "b", "c"]}, 2 / 3),
        ({"min_nodes": 2, "failure_domains": ["a", "a", "a", "a"]}, None),
    ],
)
def test_survival_is_that_of_the_job_as_configured(keys: dict[str, Any], expected: float | None) -> None:
    found = _manager(**keys).single_loss_survival
    assert found == (expected if expected is None else pytest.approx(expected))


def _manager(**keys: Any) -> PlacementManager:
    placement = {**ALGORITHM, "min_replicas": 1, "num_slots_per_rank": 8}
    groups = {"placement": placement, **grouped(num_nodes=4, **keys)}
    return PlacementManager(derive_placement(from_dict(groups)), stage=0)


def test_a_full_disk_leaves_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "placements" / "iter_0000003.json"
    _manager().write(path)
    before = path.read_bytes()
    assert json.loads(before) == _manager().to_json()

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", fsync)
    manager = _manager()
    manager.loads = [[[1.0] * 8]]
    with pytest.raises(OSError, match="No space left"):
        manager.write(path)
    assert path.read_bytes() == before


def test_a_placement_that_cannot_be_written_is_reported_and_training_continues(tmp_path: Path) -> None:
    from megatron_ft.mcore.training.trainer import Trainer

    (tmp_path / "placements").write_text("no folder")
    reported: list[Any] = []
    rank: Any = SimpleNamespace(
        placement=_manager(),
        engine=SimpleNamespace(iteration=2),
        context=SimpleNamespace(rank=0, run_dir=tmp_path),
        report=reported.append,
    )
    Trainer.report_placement(rank, "first")
    (record,) = reported
    assert (record.iteration, record.reason) == (3, "first")
    note = record.describe()
    assert note.level == "bad" and "it could not be written to placements/: FileExistsError" in note.text
    (tmp_path / "placements").unlink()
    Trainer.report_placement(rank, "first")
    assert reported[1].file_error is None and (tmp_path / "placements" / "iter_0000003.json").is_file()


@pytest.mark.parametrize(
    ("placement", "backend", "shares"),
    [
        ({}, "CppDispatch", "balanced"),
        ({"dispatch_backend": "reference", "shares": "even"}, "ReferenceDispatch", "even"),
    ],
)
def test_the_backend_and_its_shares_are_those_of_the_configuration(
    placement: dict[str, Any], backend: str, shares: str
) -> None:
    placement = {**ALGORITHM, "min_replicas": 1, "num_slots_per_rank": 8, **placement}
    groups = {"placement": placement, "launch": {"num_nodes": 4}, "training": {"device": "cpu"}}
    manager = PlacementManager(derive_placement(from_dict(groups)), stage=0)
    found = manager.replicas().backend
    assert (type(found).__name__, found.shares) == (backend, shares)
