"""Pytest fixtures for tests that start jobs. To use them, name this module in ``pytest_plugins``."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.control.launcher import PRELOAD
from megatron_ft.testing.jobs import forkserver


@pytest.fixture(scope="session")
def warm_forkserver() -> Iterator[str]:
    """Yield the socket of a fork server that has imported the training loop, for ``run_job(..., forkserver=...)``."""
    with forkserver(*PRELOAD) as socket_path:
        yield socket_path


@pytest.fixture
def short_tmpdir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set ``TMPDIR`` to a private folder whose path is short enough for unix sockets. The path of pytest's
    ``tmp_path`` may be too long."""
    tmp_path_factory.getbasetemp()  # pytest must create this folder before TMPDIR changes
    with tempfile.TemporaryDirectory(prefix="mft-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def runs(tmp_path: Path, short_tmpdir: Path) -> Path:
    """Return the folder for the runs of a test's jobs. The jobs create their sockets in ``short_tmpdir``."""
    return tmp_path / "runs"
