"""Tests object stores whose client fails: the backend raises an OSError that names the object and the reason."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage.backends import _RemoteBackend
from tests.helpers.failing_store import ClientError, FailingStore

CALLS: dict[str, tuple[str, Callable[[_RemoteBackend], object]]] = {
    "a folder": ("makedirs", lambda backend: backend.write("window", "rank", [b"new"])),
    "a begun upload": ("open wb", lambda backend: backend.write("window", "rank", [b"new"])),
    "a part of an upload": ("write", lambda backend: backend.write("window", "rank", [b"new"])),
    "a rename": ("mv", lambda backend: backend.write("window", "rank", [b"new"])),
    "whether it is there": ("exists", lambda backend: backend.exists("window", "rank")),
    "an object": ("open rb", lambda backend: backend.open("window", "rank")),
    "bytes": ("read", lambda backend: backend.open("window", "rank").read_into(0, memoryview(bytearray(3)))),
    "a list": ("ls", lambda backend: backend.list_directories()),
    "a move": ("mv", lambda backend: backend.move("window", "aside")),
    "a deletion": ("rm", lambda backend: backend.delete("window")),
}


@pytest.mark.parametrize("what", CALLS)
def test_an_error_of_a_client_is_one_of_storage(store: type[FailingStore], what: str) -> None:
    refused, call = CALLS[what]
    url = f"failing://{uuid4().hex}"
    backend = _RemoteBackend(url)
    backend.write("window", "rank", [b"old"])
    store.refused = {refused}
    with pytest.raises(OSError, match=rf"^{url}.*ClientError: {refused}: the token has expired"):
        call(backend)
    store.refused = set()
    content = bytearray(3)
    backend.open("window", "rank").read_into(0, memoryview(content))
    assert content == b"old"


def test_an_error_of_the_bytes_is_not_one_of_storage(store: type[FailingStore]) -> None:
    def damaged() -> Iterator[bytes]:
        yield b"half"
        raise CheckpointError("damaged in memory")

    backend = _RemoteBackend(f"failing://{uuid4().hex}")
    with pytest.raises(CheckpointError, match="damaged in memory"):
        backend.write("window", "rank", damaged())
    assert not backend.exists("window", "rank")


def test_a_client_that_cannot_be_opened_is_named() -> None:
    class Unusable(FailingStore):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            raise ClientError("no credentials")

    fsspec.register_implementation("unusable", Unusable, clobber=True)
    with pytest.raises(CheckpointError, match="unusable://bucket/windows: no credentials"):
        _RemoteBackend("unusable://bucket/windows")
