"""Prepares the test process for Megatron once, because the tests of this folder run Megatron in it."""

from collections.abc import Iterator

import pytest

from megatron_ft.testing import engines


@pytest.fixture(scope="session", autouse=True)
def megatron() -> None:
    """Prepare Megatron for this process's CPU, with one thread as in ranks, because several workers share the cores."""
    import torch

    engines.install()
    torch.set_num_threads(1)
    engines.be_ready_to_fork()  # each test tears an engine down, which collects garbage: not what was imported


@pytest.fixture(autouse=True)
def own_globals() -> Iterator[None]:
    """Reset the global state of Megatron (trackers and scale of auxiliary losses) before every test."""
    from megatron_ft.mcore.moe.router import forget_auxiliary_losses

    yield
    forget_auxiliary_losses()
