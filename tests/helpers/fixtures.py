"""Fixtures for tests that start jobs; ``tests/conftest.py`` names this module in ``pytest_plugins``."""

from collections.abc import Iterator

import pytest

from megatron_ft.control.launch import PRELOAD
from tests.helpers.jobs import forkserver


@pytest.fixture(scope="session")
def warm_forkserver() -> Iterator[str]:
    """Socket of a fork server that has imported the training loop, for ``run_job(..., forkserver=...)``."""
    with forkserver(*PRELOAD) as socket_path:
        yield socket_path
