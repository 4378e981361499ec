"""What a controller has taken in, on disk: one that takes over does the same again and stands where it stood.

One JSON object a line. An entry is in the file before anything follows from it, so that it outlives its writer;
``sync`` makes it outlive the machine.
"""

import json
import os
from pathlib import Path

from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.strict_json import parse_json


class Journal:
    """Appends entries to one file. One writer at a time, see ``epochs``."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, or begin it; ``entries`` is what it holds.

        The last line, where it was cut short, was never acted upon: it goes.

        Raises:
            ControlError: another line is no JSON object.
        """
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.entries = [_parse(line, path, number) for number, line in enumerate(whole.splitlines(), start=1)]
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, len(whole))
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def first(self, name: str, value: float) -> float:
        """The value that the job's first controller noted under ``name``: ``value``, where this is it."""
        for entry in self.entries:
            if name in entry:
                return float(entry[name])
        self.append({name: value})
        return value

    def append(self, entry: Message) -> None:
        """Write one entry; it is the kernel's when this returns.

        Raises:
            OSError: the disk did not take it.
        """
        left = memoryview(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        while left:
            left = left[os.write(self._descriptor, left) :]

    def sync(self) -> None:
        """Return when everything is on disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Write no more."""
        os.close(self._descriptor)


def _parse(line: bytes, path: Path, number: int) -> Message:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ControlError(f"{path}, line {number}: no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ControlError(f"{path}, line {number}: must be an object, is {type(entry).__name__}")
    return entry
