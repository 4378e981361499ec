"""Fixtures for tests of storage and of the snapshot server."""

from collections.abc import Iterator

import fsspec
import pytest

from tests.helpers.failing_store import FailingStore


@pytest.fixture
def store() -> Iterator[type[FailingStore]]:
    """Yield a file system at ``failing://`` that refuses the calls in ``refused``."""
    fsspec.register_implementation("failing", FailingStore, clobber=True)
    yield FailingStore
    FailingStore.refused = set()
