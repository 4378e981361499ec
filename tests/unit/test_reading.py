"""Tests that every exception of a parser becomes an error that names the file."""

import os
from pathlib import Path

import pytest

from megatron_ft.errors import CheckpointError, ConfigError, DataError
from megatron_ft.serde import means_every_interface, read_bytes, reading

PanicException = type("PanicException", (BaseException,), {})


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "/a/b: cannot be read: MemoryError"),
        (RecursionError("too deep"), "/a/b: cannot be read: RecursionError: too deep"),
        (NotImplementedError("method 99"), "/a/b: cannot be read: NotImplementedError: method 99"),
        (PanicException("regex"), "/a/b: cannot be read: PanicException: regex"),
        (OSError(5, "Input/output error"), "/a/b: cannot be read: Input/output error"),
    ],
)
def test_errors_of_parsers_name_the_file(error: BaseException, text: str) -> None:
    for kind in (DataError, CheckpointError):
        with pytest.raises(kind) as caught, reading("/a/b", kind):
            raise error
        assert str(caught.value) == text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ConfigError("already says it")])
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading("/a/b"):
        raise error
    assert caught.value is error


def test_sizes_and_kinds_of_files_are_looked_at_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, max_bytes=5) == b"12345"
    with pytest.raises(DataError, match=f"{path}: 5 bytes: must be at most 4"):
        read_bytes(path, max_bytes=4)
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="1099511627776 bytes: must be at most"):
        read_bytes(path, max_bytes=1 << 30)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(DataError, match=f"^{tmp_path / name}: "):
            read_bytes(tmp_path / name, max_bytes=5)


@pytest.mark.parametrize("host", ["", "*", "0", "0x0", "0.0", "0.0.0.0", "::", "[::]", "::ffff:0.0.0.0"])
def test_all_interfaces_are_recognised(host: str) -> None:
    assert means_every_interface(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "[fd00::1]", "::1", "::ffff:10.0.0.7", "node1", "ib0"])
def test_one_interface_is_not_all(host: str) -> None:
    assert not means_every_interface(host)
