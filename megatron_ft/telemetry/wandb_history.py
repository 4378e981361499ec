"""What older attempts left of their wandb run: the id, how far wandb came, and all that was reported."""

import heapq
import json
import secrets
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.durable import replace_file
from megatron_ft.events import ExpertLoad, Record
from megatron_ft.strict_json import JsonValue
from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE, read_lines

ID_FILE = "wandb_run_id"
INSPECT_TIMEOUT_SECONDS = 60.0

_ALPHABET = string.ascii_lowercase + string.digits


def run_id(run_dir: Path) -> str:
    """The wandb run id of this run directory; chosen at the first call, the same ever after."""
    path = run_dir / ID_FILE
    if not path.exists():
        replace_file(path, "".join(secrets.choice(_ALPHABET) for _ in range(8)).encode() + b"\n")
    return path.read_text(encoding="ascii").strip()


def last_offline_step(run_dir: Path) -> int:
    """The newest step in the offline folders of earlier attempts, 0 if there is none.

    Steps only rise from attempt to attempt, so the newest folder that has one tells. wandb keeps its
    last records in memory for a while: those are missing here if it was killed.

    Raises:
        subprocess.SubprocessError: wandb's own reader failed.
    """
    for folder in sorted(run_dir.glob("wandb/offline-run-*"), reverse=True):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=INSPECT_TIMEOUT_SECONDS)
        if step := json.loads(done.stdout)["step"]:
            return int(step)
    return 0


@dataclass(frozen=True, slots=True)
class Reported:
    """What older attempts of a run have reported: its files as far as they are filled now."""

    run_dir: Path
    num_bytes: Mapping[str, int]
    """Of each file."""

    @classmethod
    def so_far(cls, run_dir: Path) -> "Reported":
        """Whatever is written from now on is of this attempt."""
        paths = [path for name in (METRICS_FILE, EVENTS_FILE) if (path := run_dir / name).exists()]
        return cls(run_dir, {path.name: path.stat().st_size for path in paths})

    def records(self, *, loads_after: int) -> Iterator[Record]:
        """All of them, oldest first; of expert loads only those after iteration ``loads_after``: they are long.

        Raises:
            ValueError: a line other than an unfinished last one is damaged; names file and line.
        """

        def parse(line: dict[str, JsonValue]) -> Record | None:
            iteration = line.get("iteration")
            is_old = isinstance(iteration, int) and iteration <= loads_after
            return None if is_old and line.get("kind") == ExpertLoad.kind else Record.from_record(line)

        files = (
            read_lines(self.run_dir / name, parse, num_bytes=num_bytes) for name, num_bytes in self.num_bytes.items()
        )
        known = ((record for record in file if record is not None) for file in files)
        return heapq.merge(*known, key=lambda record: record.time_unix_seconds or 0.0)
