"""What the ranks of a membership report of the one before."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_ft.mcore.recovery import replicas


def test_an_abandoned_save_is_reported_once(tmp_path: Path) -> None:
    """One that rank 0 had completed is on disk: the report says so."""
    torn, whole = tmp_path / "iter_0000004.1", tmp_path / "iter_0000006"
    whole.mkdir()
    (whole / "manifest.json").touch()
    reported: list[Any] = []
    trainer: Any = SimpleNamespace(abandoned_saves=[torn, whole], report=reported.append)
    replicas._report_abandoned_saves(trainer)
    replicas._report_abandoned_saves(trainer)
    assert [(record.iteration, record.path) for record in reported] == [(4, str(torn)), (6, str(whole))]
    assert ["it is complete" in record.error for record in reported] == [False, True]
