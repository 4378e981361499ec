"""Tests of this folder run Megatron in the test process: it is made usable once."""

import pytest

from tests.helpers import engines


@pytest.fixture(scope="session", autouse=True)
def megatron() -> None:
    """Megatron on this process's CPU."""
    engines.install()
