"""One controller at a time, and every later one has a higher number."""

from pathlib import Path

import pytest

from megatron_ft.control.controller.lease import acquire_lease
from megatron_ft.errors import ControlError


def test_epochs_rise(tmp_path: Path) -> None:
    numbers = []
    for _ in range(12):
        epoch = acquire_lease(tmp_path)
        numbers.append(epoch.epoch)
        assert not epoch.is_stale
        epoch.release()
    assert numbers == list(range(1, 13))


def test_a_second_controller_does_not_begin_beside_the_first(tmp_path: Path) -> None:
    first = acquire_lease(tmp_path)
    with pytest.raises(ControlError, match="another controller of this run is alive"):
        acquire_lease(tmp_path)
    assert not first.is_stale
    first.release()
    assert acquire_lease(tmp_path).epoch == 2


def test_one_that_has_been_followed_knows_it(tmp_path: Path) -> None:
    first = acquire_lease(tmp_path)
    first.release()  # as if its machine had lost the lock
    second = acquire_lease(tmp_path)
    assert first.is_stale and not second.is_stale
    (tmp_path / "epoch").unlink()
    assert second.is_stale


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("seven\n")
    with pytest.raises(ControlError, match="must hold a number"):
        acquire_lease(tmp_path)
    (tmp_path / "epoch").write_text("7\n")
    assert acquire_lease(tmp_path).epoch == 8
