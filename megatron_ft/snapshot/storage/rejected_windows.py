"""List of windows that are not tried again, because their replay gave other results than the logged iterations.

Their files are intact. The list is ``refused_windows.json`` in the run's folder. It identifies windows by their content
and not by their names, because a run that resumes from an earlier iteration captures other windows with the same names.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from megatron_ft.errors import CheckpointError
from megatron_ft.serde import JsonValue, decode, parse_json
from megatron_ft.snapshot.storage.files import write_atomically

REJECTED_NAME = "refused_windows.json"
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedWindow:
    """A window that must not be replayed again."""

    start_iteration: int
    generation: int
    """Generation that captured the window."""
    digest: str
    """Digest of the window, from ``window_digest``."""
    reason: str

    @classmethod
    def from_json(cls, content: JsonValue) -> "RejectedWindow":
        """Read the result of ``dataclasses.asdict``. Raises ValueError for anything else."""
        names = [entry.name for entry in fields(cls)]
        if not isinstance(content, dict) or sorted(content) != sorted(names):
            raise ValueError(f"{str(content)[:80]}: must be an object of {', '.join(names)}")
        window = cls(**{entry.name: decode(entry.type, content[entry.name], entry.name) for entry in fields(cls)})
        if not _DIGEST.fullmatch(window.digest):
            raise ValueError(f"digest={window.digest[:80]!r}: must be 32 hexadecimal digits")
        return window

    def add_to(self, run_dir: Path) -> None:
        """Add a window to the list and sync the file. Readers see the old or new list. Call it in one process only.

        Raises:
            CheckpointError: the file cannot be read or written; its content is unchanged.
        """
        rejected = [asdict(entry) for entry in [*RejectedWindow.read_all(run_dir), self]]
        try:
            write_atomically(run_dir, REJECTED_NAME, json.dumps(rejected, indent=1).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(f"{run_dir / REJECTED_NAME}: cannot be written: {error}") from error

    @classmethod
    def read_all(cls, run_dir: Path) -> "list[RejectedWindow]":
        """Read the list of rejected windows of a run, the oldest first; empty if the file does not exist.

        Raises:
            CheckpointError: the file cannot be read, or ``RejectedWindow.add_to`` has not written it.
        """
        path = run_dir / REJECTED_NAME
        try:
            content = parse_json(path.read_bytes())
            if not isinstance(content, list):
                raise ValueError("must be a list")
            return [RejectedWindow.from_json(entry) for entry in content]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}; delete the file to try rejected windows again") from error


def window_digest(manifests: Sequence[str]) -> str:
    """Return a checksum of the manifests of all ranks' parts of a window: 32 hexadecimal digits.

    The checksum identifies the content, because a manifest contains the plan, the votes and a checksum of every piece.
    """
    # In rank order, and each manifest as canonical JSON: every restart computes the same digest for the same content.
    return xxhash.xxh3_128("\n".join(manifests).encode()).hexdigest()
