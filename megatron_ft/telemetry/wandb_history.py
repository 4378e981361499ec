"""What an older attempt left of its wandb run: the id, how far wandb came, and what it missed."""

import json
import os
import secrets
import string
import subprocess
import sys
from pathlib import Path

from megatron_ft.events import Evaluation, ExpertLoad, Metrics, Record
from megatron_ft.telemetry.read import read_events, read_metrics

ID_FILE = "wandb_run_id"
INSPECT_TIMEOUT_SECONDS = 60.0

_ALPHABET = string.ascii_lowercase + string.digits


def run_id(run_dir: Path) -> str:
    """The wandb run id of this run directory; chosen at the first call, the same ever after."""
    path = run_dir / ID_FILE
    if not path.exists():
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(secrets.choice(_ALPHABET) for _ in range(8)) + "\n", encoding="ascii")
        os.replace(temporary, path)
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


def reported_between(run_dir: Path, *, after: int, until: int) -> list[Record]:
    """What the run reported about iterations ``after + 1`` to ``until``, in their order, newest attempt's first choice.

    Per iteration: metrics, then expert load, then evaluation, as far as there are any.
    """
    newest: dict[tuple[int, int], Record] = {}
    for record in [*read_metrics(run_dir), *read_events(run_dir)]:
        if isinstance(record, (Metrics, ExpertLoad, Evaluation)) and after < record.iteration <= until:
            newest[record.iteration, (Metrics, ExpertLoad, Evaluation).index(type(record))] = record
    return [newest[key] for key in sorted(newest)]
