"""Tests of this folder run Megatron in the test process: it is made usable once."""

from collections.abc import Iterator

import pytest

from tests.helpers import engines


@pytest.fixture(scope="session", autouse=True)
def megatron() -> None:
    """Megatron on this process's CPU."""
    engines.install()


@pytest.fixture(autouse=True)
def own_globals() -> Iterator[None]:
    """What Megatron keeps per process (trackers and scale of auxiliary losses) starts anew with every test."""
    from megatron_ft.mcore.moe.observation import forget_auxiliary_losses

    yield
    forget_auxiliary_losses()
