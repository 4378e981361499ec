"""Claim ``quickstart``: the defaults train a real model on real text within minutes on two cores."""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.events import Evaluation
from megatron_ft.telemetry.read import EVENTS_FILE, read_events
from megatron_ft.testing import leftovers

ID = "quickstart"
MAX_SECONDS = 240.0
MAX_LOSS_RATIO = 0.75
QUICK_MAX_LOSS_RATIO = 1.0
QUICK = (
    "training.train_iterations=8",
    "training.eval_interval_iterations=4",
    "training.eval_iterations=1",
    "optimizer.lr_warmup_iterations=2",
)
SUMMARY_FIELDS = ("iterations", "first_loss", "final_loss", "tokens_per_second", "wall_seconds", "world_size")
GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of one run of the defaults."""

    exit_code: int
    seconds: float
    """Time from the start of the process to its end."""
    summary: dict[str, Any]
    valid_losses: list[float]
    leftover_processes: list[str]

    def problems(self, max_loss_ratio: float) -> list[str]:
        """Everything that breaks the claim; empty when it holds."""
        missing = [name for name in SUMMARY_FIELDS if name not in self.summary]
        checks = [
            (self.exit_code == 0, f"exit code {self.exit_code}"),
            (not missing, f"summary.json without {', '.join(missing)}"),
            (self.seconds <= MAX_SECONDS, f"took {self.seconds:.0f} s"),
            (self.loss_ratio <= max_loss_ratio, f"final loss is {self.loss_ratio:.2f} of the first"),
            (self.valid_falls, f"validation losses {self.valid_losses}"),
            (not self.leftover_processes, f"left behind {self.leftover_processes}"),
        ]
        return [text for holds, text in checks if not holds]

    @property
    def loss_ratio(self) -> float:
        """Last training loss over the first one; NaN when either is missing."""
        return float(self.summary.get("final_loss", math.nan)) / float(self.summary.get("first_loss", math.nan))

    @property
    def valid_falls(self) -> bool:
        """Whether the last validation loss is below the first of at least two."""
        return len(self.valid_losses) >= 2 and self.valid_losses[-1] < self.valid_losses[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the defaults in a fresh folder with a fresh cache and judge what they left."""
    arguments = parse_arguments(__doc__, argv)
    max_loss_ratio = QUICK_MAX_LOSS_RATIO if arguments.quick else MAX_LOSS_RATIO
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        observed = run_defaults(Path(folder), QUICK if arguments.quick else ())
    problems = observed.problems(max_loss_ratio)
    return finish(
        arguments.out,
        ID,
        passed=not problems,
        figure="; ".join(problems) if problems else figure(observed),
        threshold=f"<= {MAX_SECONDS:.0f} s, loss <= {max_loss_ratio:.2f} of the first, validation falls",
        counts={"runs": 1, "iterations": int(observed.summary.get("iterations", 0))},
        details={"summary": observed.summary, "valid_losses": observed.valid_losses, "seconds": observed.seconds},
    )


def run_defaults(folder: Path, overrides: Sequence[str]) -> Observed:
    """``python pretrain_moe.py`` with its defaults; only the places it writes to are moved to ``folder``."""
    places = [f"run.dir={folder / 'runs'}", f"data.cache_dir={folder / 'cache'}"]
    value, environment = leftovers.mark()
    command = [sys.executable, "pretrain_moe.py", *places, *overrides]
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    seconds = time.monotonic() - started
    run_dirs = sorted((folder / "runs").glob("*/"))
    return Observed(
        exit_code=code,
        seconds=round(seconds, 1),
        summary=read_summary(run_dirs[0]) if run_dirs else {},
        valid_losses=read_valid_losses(run_dirs[0]) if run_dirs and (run_dirs[0] / EVENTS_FILE).exists() else [],
        leftover_processes=leftovers.outlive(value, grace_seconds=GRACE_SECONDS),
    )


def read_summary(run_dir: Path) -> dict[str, Any]:
    """``summary.json`` of a run; empty when there is none."""
    path = run_dir / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return summary


def read_valid_losses(run_dir: Path) -> list[float]:
    """Losses of all evaluations of a run, in order."""
    return [record.loss for record in read_events(run_dir) if isinstance(record, Evaluation)]


def figure(observed: Observed) -> str:
    """The measured figures in one phrase."""
    summary, losses = observed.summary, observed.valid_losses
    return (
        f"{observed.seconds:.0f} s, loss {summary['first_loss']:.2f} to {summary['final_loss']:.2f}"
        f" ({observed.loss_ratio:.2f} of the first), validation {losses[0]:.2f} to {losses[-1]:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
