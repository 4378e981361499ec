"""Reads documents from text and JSONL files. An error names the file and the line that cannot be read."""

from collections.abc import Iterator
from pathlib import Path

from megatron_ft.errors import DataError
from megatron_ft.serde import parse_json

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_documents(path: Path, *, split_on_blank_lines: bool = False) -> Iterator[str]:
    """Yield the text of ``path`` as one document. With ``split_on_blank_lines``, blank lines separate documents.

    Raises:
        DataError: the file is missing, empty or not UTF-8.
    """
    gathered: list[str] = []
    for _, line in _lines(path):
        if split_on_blank_lines and not line.strip():
            yield from _joined(gathered)
            gathered = []
        else:
            gathered.append(line)
    yield from _joined(gathered)


def json_documents(path: Path, key: str) -> Iterator[str]:
    """Yield the text at ``key`` from each line of the JSONL file ``path``. Blank lines are skipped.

    Raises:
        DataError: the file is missing or empty, or a line is not UTF-8, not a JSON object, or has no string at ``key``.
    """
    for number, line in _lines(path):
        if line.strip():
            yield _json_text(f"{path}: line {number}", line, key)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of ``path``: its number, counted from 1, and its text with the line end."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if not path.stat().st_size:
        raise DataError(f"{path}: is empty")
    try:
        # The file is read as bytes, so that an error can name the line and the byte that are not UTF-8.
        with open(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield number, _decoded(path, number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: line {number}, byte {error.start} ({line[error.start]:#04x}): must be UTF-8"
        ) from error


def _joined(lines: list[str]) -> Iterator[str]:
    if lines:
        yield "".join(lines)


def _json_text(place: str, line: str, key: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{place}: damaged JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: must be a JSON object, not {type(row).__name__}")
    if key not in row:
        raise DataError(f"{place}: has no key {key!r}; its keys are {sorted(row)[:8]}: choose one with --json-key")
    text = row[key]
    if not isinstance(text, str):
        raise DataError(f"{place}: {key}={text!r:.60}: must be a string")
    # A JSON escape can represent half a surrogate pair. Encoding it would fail much later, without the line number.
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{place}: {key} contains half of a character (an unpaired surrogate); UTF-8 cannot encode it")
    return text
