"""Provides a small complete checkpoint for tests of storage."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.snapshot.storage.files import write_file
from megatron_ft.snapshot.storage.manifest import Manifest


def make_checkpoint(directory: Path, iteration: int = 30, sizes: tuple[int, ...] = (5000, 0, 12)) -> Manifest:
    """Return a function that writes a small complete checkpoint."""
    directory.mkdir(parents=True)
    generator = random.Random(iteration)
    entries = [write_file(directory, f"__{i}_0.distcp", generator.randbytes(size)) for i, size in enumerate(sizes)]
    manifest = Manifest(
        run_id="run-1",
        run_name="first",
        generation=0,
        topology={"world_size": 2},
        iteration=iteration,
        consumed_samples=iteration * 16,
        settings={"optimizer": {"optimizer.lr": 0.001}},
        software={"torch": "2.13.0"},
        files=tuple(entries),
    )
    manifest.write(directory)
    return manifest


@pytest.fixture
def make() -> Callable[..., Manifest]:
    """Write a checkpoint: ``make(directory, iteration, sizes=...)``."""
    return make_checkpoint
