"""Tests how documents are read from text and JSONL."""

from pathlib import Path

import pytest

from megatron_ft.corpus.documents import json_documents, text_documents
from megatron_ft.errors import DataError


def put(folder: Path, content: bytes) -> Path:
    path = folder / "input"
    path.write_bytes(content)
    return path


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    content = "á\r\n\nb".encode()
    assert list(text_documents(put(tmp_path, content))) == [content.decode()]


def test_blank_lines_split(tmp_path: Path) -> None:
    path = put(tmp_path, b"\xef\xbb\xbf\n\none\ntwo\n \r\n\nthree")
    assert list(text_documents(path, split_on_blank_lines=True)) == ["one\ntwo\n", "three"]


def test_json_lines(tmp_path: Path) -> None:
    path = put(tmp_path, b'{"text": "a\\u00e9"}\n\n{"text": "", "more": 1}\r\n{"text": "b"}')
    assert list(json_documents(path, "text")) == ["aé", "", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"text": "a"}\n{"text": \n', r"line 2: damaged JSON"),
        (b"[1]\n", "line 1: must be a JSON object, not list"),
        (b'{"body": "a"}\n', r"line 1: has no key 'text'; its keys are \['body'\]"),
        (b'{"text": 3}\n', "line 1: text=3: must be a string"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2, byte 10 \(0xff\): must be UTF-8"),
        (b'{"text": "\\ud800"}\n', "surrogate"),
    ],
)
def test_bad_json_lines(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(json_documents(put(tmp_path, content), "text"))


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"a\nb\xff", r"line 2, byte 1 \(0xff\)")])
def test_bad_text(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(text_documents(put(tmp_path, content)))


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        list(text_documents(tmp_path / "nope"))
    with pytest.raises(DataError, match="no such file"):
        list(text_documents(tmp_path))
