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
from megatron_ft.mcore.moe.placement_manager import PlacementManager, PlacementState
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


def _manager(num_slots: int = 8, **keys: Any) -> PlacementManager:
    placement = {**ALGORITHM, "min_replicas": 1, "num_slots_per_rank": num_slots}
    groups = {"placement": placement, **grouped(num_nodes=4, **keys)}
    return PlacementManager(derive_placement(from_dict(groups)), stage=0)


def test_experts_keep_their_slots_if_only_the_names_of_failure_domains_change() -> None:
    """A spare has replaced a node, so all ranks start again on nodes with other names. With other slots, sums would
    have another order, and no window could be replayed."""
    former = _manager(4, failure_domains=["a", "b", "c", "d"])
    former.loads = [[[float(8 - expert) for expert in range(8)]]]
    content = json.loads(json.dumps(former.to_json()))
    for by_rank in content["stages"][0]["slots"]:
        by_rank.reverse()
    slots = PlacementState.from_json(content).plans[0].slots
    for keeps_slots in (False, True):
        replaced = _manager(4, failure_domains=["a", "spare", "c", "d"])
        assert replaced.plans[0].slots != slots
        replaced.restore(content, keeps_slots=keeps_slots)
        assert replaced.plans[0].slots == slots
        assert replaced.plans[0].domains == ("a", "spare", "c", "d")


def test_a_placement_whose_replicas_are_now_in_one_domain_is_kept_for_a_window_only() -> None:
    former = _manager(4, failure_domains=["a", "b", "c", "d"])
    together = _manager(4, failure_domains=["a", "a", "a", "a"])
    together.restore(former.to_json(), keeps_slots=True)
    assert together.plans[0].slots == former.plans[0].slots
    assert together.plans[0].spread == 1 < former.plans[0].spread


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
