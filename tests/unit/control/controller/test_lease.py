"""Tests that only one controller runs at a time, and that every later one has a higher number."""

from pathlib import Path

import pytest

from megatron_ft.control.controller.main import _Lease
from megatron_ft.errors import ControlError


def test_epochs_rise(tmp_path: Path) -> None:
    numbers = []
    for _ in range(12):
        epoch = _Lease.acquire(tmp_path)
        numbers.append(epoch.epoch)
        assert not epoch.is_stale
        epoch.release()
    assert numbers == list(range(1, 13))


def test_a_second_controller_does_not_begin_beside_the_first(tmp_path: Path) -> None:
    first = _Lease.acquire(tmp_path)
    with pytest.raises(ControlError, match="another controller of this run is alive"):
        _Lease.acquire(tmp_path)
    assert not first.is_stale
    first.release()
    assert _Lease.acquire(tmp_path).epoch == 2


def test_one_that_has_been_followed_knows_it(tmp_path: Path) -> None:
    first = _Lease.acquire(tmp_path)
    first.release()  # as if its machine had lost the lock
    second = _Lease.acquire(tmp_path)
    assert first.is_stale and not second.is_stale
    (tmp_path / "epoch").unlink()
    assert second.is_stale


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("seven\n")
    with pytest.raises(ControlError, match="must contain a number"):
        _Lease.acquire(tmp_path)
    (tmp_path / "epoch").write_text("7\n")
    assert _Lease.acquire(tmp_path).epoch == 8
