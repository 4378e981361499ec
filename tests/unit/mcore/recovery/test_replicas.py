"""Tests what the ranks of a membership report about the previous one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_ft import failpoints
from megatron_ft.mcore.recovery import replicas
from megatron_ft.mcore.recovery.replicas import ElasticTrainer


def test_an_abandoned_save_is_reported_once(tmp_path: Path) -> None:
    """The checkpoint is on disk, and the report says so, if rank 0 had completed the save."""
    torn, whole = tmp_path / "iter_0000004.1", tmp_path / "iter_0000006"
    whole.mkdir()
    (whole / "manifest.json").touch()
    reported: list[Any] = []
    trainer = object.__new__(ElasticTrainer)
    vars(trainer).update(abandoned_saves=[torn, whole], report=reported.append)
    trainer._report_abandoned_saves()
    trainer._report_abandoned_saves()
    assert [(record.iteration, record.path) for record in reported] == [(4, str(torn)), (6, str(whole))]
    assert ["checkpoint was complete" in record.error for record in reported] == [False, True]


def test_an_iteration_that_a_recovery_finishes_has_its_own_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config_of", "context_in", "check_newcomers_data", "first_of", "MembershipChanged"):
        monkeypatch.setattr(replicas, name, MagicMock())
    monkeypatch.setattr(replicas, "choose_holding", lambda *_, **__: ((0, False), [0]))
    monkeypatch.setattr(failpoints, "enter", MagicMock())
    finished = SimpleNamespace(seconds=0.5)
    carried = SimpleNamespace(finished=finished, batch="batch")
    accounted: list[Any] = []
    trainer = object.__new__(ElasticTrainer)
    vars(trainer).update(
        {name: MagicMock() for name in ("job", "nodes", "report", "_release_groups", "_join", "_move")}
    )
    vars(trainer).update(
        context=SimpleNamespace(rank=0),
        engine=SimpleNamespace(iteration=4, is_built=True, use=lambda config: None),
        carry=lambda target, in_place: carried,
        placement=None,
        abandoned_saves=[],
        _present=lambda carried, groups: ([], [], [], []),
        _recover_in_place=lambda *_: None,
        account=lambda *about: accounted.append(about),
    )
    trainer.reconfigure(MagicMock(keeps_layout=True))
    assert accounted == [(finished, 0.5, "batch")] and carried.finished is None
