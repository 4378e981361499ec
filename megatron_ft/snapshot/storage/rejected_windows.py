"""Windows whose replay differed from the logged iterations although they verify; they are not tried again.

They are listed in ``refused_windows.json`` in the run's folder by their content, not by their names, because a run that
resumes from an earlier iteration captures other windows with the same names.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage.files import write_atomically
from megatron_ft.strict_json import JsonValue, decode, parse_json

REJECTED_NAME = "refused_windows.json"
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedWindow:
    """A window that is not tried again."""

    start_iteration: int
    generation: int
    """Membership that captured it."""
    digest: str
    """Its ``window_digest``."""
    reason: str

    @classmethod
    def from_json(cls, content: JsonValue) -> "RejectedWindow":
        """Read the values of ``dataclasses.asdict``. Raises ValueError for anything else."""
        names = [entry.name for entry in fields(cls)]
        if not isinstance(content, dict) or sorted(content) != sorted(names):
            raise ValueError(f"{str(content)[:80]}: must be an object of {', '.join(names)}")
        window = cls(**{entry.name: decode(entry.type, content[entry.name], entry.name) for entry in fields(cls)})
        if not _DIGEST.fullmatch(window.digest):
            raise ValueError(f"digest={window.digest[:80]!r}: must be 32 hexadecimal digits")
        return window


def window_digest(manifests: Sequence[str]) -> str:
    """Return the checksum over the content of all ranks' parts: 32 hexadecimal digits.

    A manifest contains the plan, the votes and a checksum of every piece.
    """
    # In rank order, and each manifest as canonical JSON: every restart computes the same digest for the same content.
    return xxhash.xxh3_128("\n".join(manifests).encode()).hexdigest()


def read_rejected(run_dir: Path) -> list[RejectedWindow]:
    """Read all rejected windows of a run, oldest first; none without the file.

    Raises:
        CheckpointError: the file cannot be read, or has another content than ``add_rejected`` writes.
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


def add_rejected(run_dir: Path, window: RejectedWindow) -> None:
    """Add a window to the file, durably: readers see the old list or the new one. Call it in one process of the job.

    Raises:
        CheckpointError: the file cannot be read or written; its earlier content is unchanged.
    """
    rejected = [asdict(entry) for entry in [*read_rejected(run_dir), window]]
    try:
        write_atomically(run_dir, REJECTED_NAME, json.dumps(rejected, indent=1).encode() + b"\n")
    except OSError as error:
        raise CheckpointError(f"{run_dir / REJECTED_NAME}: cannot be written: {error}") from error
