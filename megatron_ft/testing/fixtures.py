"""Pytest fixtures for tests that start jobs: name this module in ``pytest_plugins``."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.control.launcher import PRELOAD
from megatron_ft.testing.jobs import forkserver


@pytest.fixture(scope="session")
def warm_forkserver() -> Iterator[str]:
    """Socket of a fork server that has imported the training loop, for ``run_job(..., forkserver=...)``."""
    with forkserver(*PRELOAD) as socket_path:
        yield socket_path


@pytest.fixture
def short_tmpdir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A private ``TMPDIR`` whose path is short enough for sockets, as that of ``tmp_path`` is not in every worker."""
    tmp_path_factory.getbasetemp()  # pytest makes it below TMPDIR at its first use: not in a folder that goes again
    with tempfile.TemporaryDirectory(prefix="mft-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def runs(tmp_path: Path, short_tmpdir: Path) -> Path:
    """Folder of runs; the sockets of their jobs go to ``short_tmpdir``."""
    return tmp_path / "runs"
