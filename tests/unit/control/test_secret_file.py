"""Tests that only the owner can read files with a token."""

import os
import stat
from pathlib import Path

import pytest

from megatron_ft.control.secret_file import MAX_BYTES, read_secret, write_secret
from megatron_ft.errors import ControlError


def test_it_is_the_users_alone_whatever_the_mask(tmp_path: Path) -> None:
    path, mask = tmp_path / "token.json", os.umask(0)
    try:
        write_secret(path, b"secret")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(path) == b"secret"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_one_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token.json"
    write_secret(path, b"secret")
    path.chmod(mode)
    with pytest.raises(ControlError, match=f"token.json: has mode {mode:04o}, which lets other users access it"):
        read_secret(path)


def test_no_link_no_folder_and_nothing_large_is_read(tmp_path: Path) -> None:
    path, link = tmp_path / "token.json", tmp_path / "link.json"
    with pytest.raises(FileNotFoundError):
        read_secret(path)
    write_secret(path, b"x" * MAX_BYTES)
    assert len(read_secret(path)) == MAX_BYTES
    link.symlink_to(path)
    with pytest.raises(ControlError, match="link.json: cannot be read"):
        read_secret(link)
    write_secret(path, b"x" * (MAX_BYTES + 1))
    with pytest.raises(ControlError, match=f"must have at most {MAX_BYTES} bytes"):
        read_secret(path)
    with pytest.raises(ControlError, match="must be a regular file that belongs to the user"):
        read_secret(tmp_path)
