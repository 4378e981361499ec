"""Strict reading of vocabulary files, so that damage is one clear message before anything starts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ft.errors import DataError
from megatron_ft.reading import read_bytes
from megatron_ft.strict_json import parse_json

MAX_BYTES = 1 << 30
"""Largest size of a vocabulary file."""


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises DataError if it is missing, unreadable, empty or not UTF-8."""
    try:
        text = read_bytes(path, max_bytes=MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start}: must be UTF-8") from error
    if not text.strip():
        raise DataError(f"{path}: is empty")
    return text


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: damaged JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return content


def check_vocabulary(path: Path, vocabulary: object) -> dict[str, int]:
    """Return ``vocabulary`` as {entry: id}. Raises DataError unless ids are distinct integers from 0."""
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise DataError(f"{path}: vocabulary: must be a JSON object of entries and their ids, with at least one")
    owner: dict[int, str] = {}
    for entry, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise DataError(f"{path}: id of entry {entry!r}={number!r}: must be an integer from 0 to 2^31 - 1")
        # Decoding an id of two entries would be ambiguous.
        if number in owner:
            raise DataError(f"{path}: id {number}: must belong to one entry, not to {owner[number]!r} and {entry!r}")
        owner[number] = entry
    return vocabulary


def check_merges(vocab_path: Path, vocabulary: dict[str, int], merges: Iterable[tuple[str, str, str]]) -> None:
    """Check that the vocabulary has the entries of all merges (place, left, right). Raises DataError."""
    for place, left, right in merges:
        for entry in (left, right, left + right):
            if entry not in vocabulary:
                raise DataError(f"{vocab_path}: has no entry {entry!r}, which {place} ({left} {right}) needs")


def read_merges(path: Path) -> list[tuple[str, str, str]]:
    """Return the lines of a merges.txt as (place, left, right); a first line ``#version`` is skipped."""
    merges = []
    # ``splitlines`` would also cut at characters that entries may contain, such as U+2028.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2 or not all(parts):
            raise DataError(f"{path}: line {number}: {line[:60]!r}: must be two entries with one space between")
        merges.append((f"{path} line {number}", parts[0], parts[1]))
    if not merges:
        raise DataError(f"{path}: holds no merges")
    return merges


def byte_letters() -> list[str]:
    """Return the 256 letters that stand for bytes in byte-level BPE (GPT-2): printable Latin-1 stands for itself, the
    rest starts at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def check_byte_letters(path: Path, vocabulary: dict[str, int]) -> None:
    """Check that every byte has an entry; otherwise text with that byte would lose it silently. Raises DataError."""
    for byte, letter in enumerate(byte_letters()):
        if letter not in vocabulary:
            raise DataError(f"{path}: has no entry {letter!r}, which byte {byte} needs")
