"""Reads a run's wandb folders with wandb's own reader, and compares them with the run's own records.

``history_of(run_dir).problems()`` is empty if wandb will show one run: with one id, and with each iteration once, in
rising order without a gap over all attempts, with a loss that the run has reported. This module starts no job and needs
only the folder.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.events import MembershipChanged, Record, RunFinished, RunStarted, RunStopped
from megatron_ft.telemetry.read import METRICS_FILE, read_events, read_lines, to_metrics
from megatron_ft.telemetry.sinks.wandb import ID_FILE

TIMEOUT_SECONDS = 120.0
MOST_TOLD = 5
"""Limit of reported problems of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbStep:
    """History record of one wandb step."""

    folder: int
    """Number of the record's offline folder, counted from 1 in the order of creation."""
    step: int
    figures: Mapping[str, Any]

    @property
    def iteration(self) -> int:
        """Return the iteration, which is wandb's x axis; -1 if the record has none."""
        return int(self.figures.get("iteration", -1))

    @property
    def attempt(self) -> int:
        """Return the attempt to which the figures belong; 0 if the record has none."""
        return int(self.figures.get("job/attempt", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbHistory:
    """Content of a run's wandb folders, and the run's own reports."""

    run_ids: tuple[str, ...]
    """Run id of each folder that has one, in the order of the folders."""
    own_id: str | None
    """Id in the file ``wandb_run_id`` of the run; None without this file."""
    steps: tuple[WandbStep, ...]
    begins: Mapping[int, int]
    """Attempt with which the job of each folder began, from the restart marker in its config. Folders without a marker
    are left out."""
    losses: Mapping[int, Sequence[float]]
    """Losses of each iteration in ``metrics.jsonl``, the newest last."""
    events: tuple[Record, ...]

    @property
    def num_attempts(self) -> int:
        """Return the number of times that the ranks of the run were started."""
        return sum(isinstance(event, RunStarted) for event in self.events)

    @property
    def untold(self) -> frozenset[int]:
        """Return iterations that all ranks completed, but whose reporting rank died before its report. A membership
        begins after each of them."""
        begins = {event.iteration for event in self.events if isinstance(event, MembershipChanged)}
        return frozenset(begins - self.losses.keys() - {0})

    @property
    def num_sent_late(self) -> int:
        """Return the number of iterations that wandb lost with a process and that a later job has sent."""
        return sum(step.attempt < self.begins.get(step.folder, 0) for step in self.steps)

    @property
    def num_run_again(self) -> int:
        """Return the number of iterations that ``metrics.jsonl`` contains more than once."""
        return sum(len(losses) > 1 for losses in self.losses.values())

    def problems(self) -> list[str]:
        """Return problems as text; empty for a run that has ended and that wandb has as one run."""
        return [*self._of_ids(), *self._of_axis(), *self._of_losses(), *self._of_attempts()]

    def _of_ids(self) -> Iterator[str]:
        if set(self.run_ids) != {self.own_id}:
            yield f"run ids {sorted(set(self.run_ids))} in the folders, {self.own_id} in {ID_FILE}"

    def _of_axis(self) -> Iterator[str]:
        if not any(isinstance(event, RunFinished | RunStopped) for event in self.events[-MOST_TOLD:]):
            yield "the run has not ended, or was killed: wandb keeps its newest steps in memory"
        if axes := [step for step in self.steps if step.step != step.iteration]:
            yield f"step {axes[0].step} is iteration {axes[0].iteration}"
        iterations = [step.iteration for step in self.steps]
        yield from _told(
            f"iteration {after} comes after {before}"
            for before, after in itertools.pairwise(iterations)
            if after <= before
        )
        there, last = set(iterations), max(self.losses, default=0)
        yield from _told(
            f"iteration {iteration} is missing"
            for iteration in range(1, last + 1)
            if iteration not in there and iteration not in self.untold
        )

    def _of_losses(self) -> Iterator[str]:
        yield from _told(
            f"loss {step.figures.get('loss')} of iteration {step.iteration} was never reported"
            for step in self.steps
            if step.figures.get("loss") not in self.losses.get(step.iteration, ())
        )

    def _of_attempts(self) -> Iterator[str]:
        attempts = [step.attempt for step in self.steps]
        if attempts != sorted(attempts) or set(attempts) - set(range(1, self.num_attempts + 1)):
            yield f"attempts {sorted(set(attempts))} in wandb, {self.num_attempts} in the events, or out of order"
        if unmarked := sorted({step.folder for step in self.steps} - self.begins.keys()):
            yield f"folders {unmarked} have no restart marker"


def history_of(run_dir: Path) -> WandbHistory:
    """Read all offline folders of a run.

    Raises:
        subprocess.SubprocessError: wandb's reader failed.
        OSError: ``metrics.jsonl`` or ``events.jsonl`` of the run does not exist.
        ValueError: a line of these files is damaged.
    """
    ids: list[str] = []
    steps: list[WandbStep] = []
    begins: dict[int, int] = {}
    folders = sorted(path for path in run_dir.glob("wandb/offline-run-*") if any(path.glob("*.wandb")))
    for number, folder in enumerate(folders, start=1):
        for record in _records(folder):
            if record["type"] == "run":
                ids.append(record["run"]["run_id"])
            elif record["type"] == "history":
                figures = record["history"]["item"]
                steps.append(WandbStep(folder=number, step=int(figures["_step"]), figures=figures))
            elif record["type"] == "config" and (attempts := record["config"].get("update", {}).get("attempts")):
                begins.setdefault(number, len(attempts))
    losses: dict[int, list[float]] = {}
    for metrics in read_lines(run_dir / METRICS_FILE, to_metrics):
        losses.setdefault(metrics.iteration, []).append(float(metrics.values["loss"]))
    own = run_dir / ID_FILE
    return WandbHistory(
        run_ids=tuple(ids),
        own_id=own.read_text(encoding="ascii").strip() if own.exists() else None,
        steps=tuple(steps),
        begins=begins,
        losses=losses,
        events=tuple(read_events(run_dir)),
    )


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield all records of an offline folder, as wandb prints them. An incomplete end is no error."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    return map(json.loads, done.stdout.splitlines())


def _told(problems: Iterator[str]) -> list[str]:
    """Return the first problems, and the number of the others."""
    found = list(problems)
    more = [f"... and {len(found) - MOST_TOLD} more"] if len(found) > MOST_TOLD else []
    return found[:MOST_TOLD] + more
