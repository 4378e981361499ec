"""Journal of a controller's inputs: a new controller reads it and reaches the same state.

Each line is a JSON object; the first line contains the ``format``. An entry is written before it has any effect, so it
survives the death of the controller; ``sync`` makes it survive a power failure.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from megatron_ft.durable import write_whole
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.serde import parse_json

FORMAT = 2
"""Version of the format, increased when an entry changes its meaning; a journal of another version is refused."""

Do = Callable[[Callable[[], None]], None]


def _at_once(write: Callable[[], None]) -> None:
    write()


class Journal:
    """Appends entries to one file. Only one process may write at a time, see ``lease``."""

    def __init__(self, path: Path, do: Do = _at_once) -> None:
        """Open or create the journal at ``path``, remove an incomplete last line, and read the other lines into
        ``entries``.

        Args:
            do: function that calls a write, again if it failed, see ``EssentialWrites.do``.

        Raises:
            ControlError: a complete line is not a JSON object, or another version of this package wrote the journal.
        """
        content = path.read_bytes() if path.exists() else b""
        # The writer of half a line died before anything could follow from it.
        whole = content[: content.rfind(b"\n") + 1]
        lines = [_parse(line, path, number) for number, line in enumerate(whole.splitlines(), start=1)]
        if lines and lines[0].get("format") != FORMAT:
            raise ControlError(
                f"{path}: has format {lines[0].get('format', 1)}, must have format {FORMAT}: another version "
                "of this package wrote it; start the job again, which continues from its newest checkpoint"
            )
        self.entries = lines[1:]
        # Not O_APPEND: a write that failed in part is repeated at the same offset.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, len(whole))
        self._num_bytes = len(whole)
        self._unsynced = b""
        """Bytes at the end of the file that may not be on disk yet."""
        self._do = do
        if not lines:
            self.append({"format": FORMAT})

    def first(self, name: str, value: float) -> float:
        """Return the value that the job's first controller wrote under ``name``; if this is the first one, write
        ``value``."""
        for entry in self.entries:
            if name in entry:
                return float(entry[name])
        self.append({name: value})
        return value

    def append(self, entry: Message) -> None:
        """Write one entry. It then survives the death of this process, but not yet a power failure.

        Raises:
            OSError: the entry could not be written; no part of it is in the file.
        """
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._do(lambda: self._write(self._num_bytes, line))
        self._num_bytes += len(line)
        self._unsynced += line

    def _write(self, begin: int, content: bytes) -> None:
        try:
            os.lseek(self._descriptor, begin, os.SEEK_SET)
            write_whole(self._descriptor, content)
        except OSError:
            # A full disk may have taken a part of the line, which a reader would take for damage.
            os.ftruncate(self._descriptor, begin)
            raise

    def sync(self) -> None:
        """Force all entries to the disk.

        Raises:
            OSError: an entry cannot be written.
        """
        self._do(self._sync)
        self._unsynced = b""

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError:
            # The kernel reports a failure once and may drop what it could not write: write it again.
            self._write(self._num_bytes - len(self._unsynced), self._unsynced)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _parse(line: bytes, path: Path, number: int) -> Message:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ControlError(f"{path}, line {number}: is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ControlError(f"{path}, line {number}: must be an object, is {type(entry).__name__}")
    return entry
