"""Tests of this folder run Megatron in the test process: it is made usable once."""

from collections.abc import Iterator

import pytest

from megatron_ft.testing import engines


@pytest.fixture(scope="session", autouse=True)
def megatron() -> None:
    """Megatron on this process's CPU, with one thread, as ranks have it; several workers share the cores."""
    import torch

    engines.install()
    torch.set_num_threads(1)
    engines.be_ready_to_fork()  # each test tears an engine down, which collects garbage: not what was imported


@pytest.fixture(autouse=True)
def own_globals() -> Iterator[None]:
    """What Megatron keeps per process (trackers and scale of auxiliary losses) starts anew with every test."""
    from megatron_ft.mcore.moe.observation import forget_auxiliary_losses

    yield
    forget_auxiliary_losses()
