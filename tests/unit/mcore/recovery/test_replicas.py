"""Tests what the ranks of a membership report about the previous one."""

from pathlib import Path
from typing import Any

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
