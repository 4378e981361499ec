"""Sends records to Weights & Biases: one wandb run for all restarts, online or in an offline folder.

A thread of this sink does everything that uses wandb, including the import.
"""

import heapq
import json
import netrc
import os
import queue
import secrets
import string
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_ft import events
from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.durable import replace_file
from megatron_ft.events import Evaluation, ExpertLoad, Metrics, Record, RunStarted
from megatron_ft.records import read_record
from megatron_ft.strict_json import JsonValue
from megatron_ft.telemetry.expert_load import load_figures
from megatron_ft.telemetry.read import EVENTS_FILE, METRICS_FILE, read_lines
from megatron_ft.telemetry.run_figures import RunFigures
from megatron_ft.telemetry.sinks.base import Outcome, Sink, SinkContext

ID_FILE = "wandb_run_id"
MAX_QUEUED_RECORDS = 100_000
INSPECT_TIMEOUT_SECONDS = 60.0
CLOSE_SECONDS = 60.0
"""Longest time that the end of the run waits for wandb."""

_ALPHABET = string.ascii_lowercase + string.digits


class WandbSink(Sink):
    """Queues records; a thread sends one wandb step per iteration.

    The step is the iteration, and it only rises. Iterations that wandb has from an older attempt are not sent again.
    Iterations that an older attempt reported and wandb lacks are sent first.
    """

    name = "wandb"
    retries = False

    def __init__(self, config: TelemetryConfig, run_dir: Path, *, job: Mapping[str, Any]) -> None:
        """Prepare the queue. ``job`` is the resolved configuration; wandb shows it as the run's config."""
        self._config = config
        self._run_dir = run_dir
        self._job = job
        # Before the thread starts and before any record of this attempt is written to these files.
        self._reported = Reported.so_far(run_dir)
        self._queue: queue.Queue[Record | Outcome] = queue.Queue(MAX_QUEUED_RECORDS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, context: SinkContext) -> "WandbSink | None":
        telemetry = context.config.telemetry
        return None if telemetry.wandb == "disabled" else cls(telemetry, context.run_dir, job=asdict(context.config))

    @property
    def num_lost_records(self) -> int:  # type: ignore[override]
        """Return the number of records that never reached wandb after it failed."""
        return self._queue.qsize() if self._error else 0

    def write(self, record: Record) -> None:
        """Queue the record.

        Raises:
            Exception: wandb raised it since the last call.
            queue.Full: wandb is too slow.
        """
        if self._error is not None:
            raise self._error
        # Never waits: the sink is called by the process that feeds all others.
        self._queue.put_nowait(record)

    def close(self, outcome: Outcome) -> None:
        """Wait until the queue is sent, then end the wandb run.

        Raises:
            Exception: wandb raised it.
            TimeoutError: wandb did not finish in time. The offline folder keeps the data that wandb took.
        """
        if self._error is None:
            self._queue.put(outcome, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"wandb did not finish within {CLOSE_SECONDS:.0f} s")

    def _work(self) -> None:
        try:
            sender = self._start()
            while not isinstance(item := self._queue.get(), Outcome):
                sender.take(item)
            sender.finish(item.exit_code)
        except Exception as error:  # noqa: BLE001 (handed to the next write or close)
            self._error = error

    def _start(self) -> "_Sender":
        # In the thread: the import takes seconds, and ``init`` may wait for the network.
        import wandb

        mode = wandb_mode(self._config.wandb, os.environ)
        last_step = last_offline_step(self._run_dir) if mode == "offline" else 0
        run = wandb.init(
            project=self._config.wandb_project,
            entity=self._config.wandb_entity,
            dir=self._run_dir,
            id=run_id(self._run_dir),
            name=self._run_dir.name,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # a plain string, checked by wandb
            config=dict(self._job),
            # wandb would otherwise wrap standard output, and record the repository of the working directory.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        # wandb drops steps that do not rise, so the newest one that the server has decides what is sent.
        if mode == "online":
            last_step = max(0, run.starting_step - 1)
        return _Sender(run, self._reported, last_step=last_step)


class _Sender:
    def __init__(self, run: Any, reported: "Reported", *, last_step: int) -> None:
        """Continue after ``last_step``, the newest iteration that wandb has from older attempts."""
        self._run = run
        self._steps = Steps(sent=last_step)
        # Iterations of older attempts that wandb lost. Which of them count is known when this attempt begins.
        self._missed: dict[int, Step] = {}
        for record in reported.records(loads_after=last_step):
            if (step := self._steps.take(record)) is not None:
                self._missed[step.iteration] = step

    def take(self, record: Record) -> None:
        step = self._steps.take(record)
        if isinstance(record, RunStarted):
            missed, self._missed = self._missed, {}
            for iteration in sorted(missed):
                if iteration <= (record.resumed_from_iteration or 0):
                    self._send(missed[iteration])
            names = ("time_unix_seconds", "world_size", "resumed_from", "resumed_from_iteration")
            starts = enumerate(self._steps.run.attempts, start=1)
            attempts = [{"number": number} | {name: getattr(start, name) for name in names} for number, start in starts]
            self._run.config.update({"attempts": attempts}, allow_val_change=True)
        if step is not None:
            self._send(step)

    def finish(self, exit_code: int) -> None:
        """Send the newest iteration, then end the wandb run and the process of wandb."""
        import wandb

        if (step := self._steps.finish()) is not None:
            self._send(step)
        self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code)

    def _send(self, step: "Step") -> None:
        self._run.log({"iteration": step.iteration, **step.figures}, step=step.iteration, commit=True)
        self._steps.sent(step.iteration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All figures of one iteration."""

    iteration: int
    figures: Mapping[str, float]
    """Metric name to figure."""


class Steps:
    """Groups records into steps, oldest first. A step is complete when the next iteration is reported.

    An iteration that is reported again replaces the earlier report, unless a ``sent`` step contains it.
    """

    def __init__(self, *, sent: int) -> None:
        """Begin after the iteration ``sent``, the newest one that wandb has."""
        self.run = RunFigures()
        self._sent = sent
        self._iteration = self._highest = 0
        self._figures: dict[str, float] = {}

    def sent(self, iteration: int) -> None:
        """Note that wandb has all steps up to ``iteration``. They are not returned again."""
        self._sent = max(self._sent, iteration)

    def take(self, record: Record) -> Step | None:
        """Add a record. Return the step that it completes."""
        complete = None
        match record:
            case RunStarted():
                complete = self._resume(record.resumed_from_iteration or 0)
            case events.MembershipChanged() | events.RecoveryStarted():
                if record.generation > 0 and record.iteration < self._iteration:
                    # The job continues in its ranks: the newest iteration is void, and wandb was never given it.
                    self._figures, self._iteration = {}, record.iteration
            case Metrics() | ExpertLoad() | Evaluation():
                if record.iteration > self._iteration:
                    complete, self._iteration = self.finish(), record.iteration
        self.run.take(record)
        if isinstance(record, (Metrics, ExpertLoad, Evaluation)) and record.iteration == self._iteration > self._sent:
            self._figures |= _figures(record)
        return complete

    def finish(self) -> Step | None:
        """Return the step of the newest iteration with everything reported so far."""
        is_first_time, self._highest = self._iteration > self._highest, max(self._highest, self._iteration)
        figures, self._figures = self._figures, {}
        if not figures:
            if is_first_time and self._iteration <= self._sent:
                self.run.hand_out()  # these figures are in the step that wandb has of this iteration
            return None
        return Step(iteration=self._iteration, figures=figures | self.run.hand_out())

    def _resume(self, iteration: int) -> Step | None:
        # A started job continues after ``iteration``; what was reported of later ones is void.
        if self._iteration > iteration:
            self._figures = {}
        complete, self._iteration = self.finish(), min(self._iteration, iteration)
        return complete


def _figures(record: Metrics | ExpertLoad | Evaluation) -> Mapping[str, float]:
    match record:
        case Metrics():
            return record.values
        case ExpertLoad():
            return load_figures(record)
        case Evaluation():
            return {"evaluation_loss": record.loss}


def run_id(run_dir: Path) -> str:
    """Return the wandb run id of this run directory. The first call chooses it; later calls return the same."""
    path = run_dir / ID_FILE
    if not path.exists():
        replace_file(path, "".join(secrets.choice(_ALPHABET) for _ in range(8)).encode() + b"\n")
    return path.read_text(encoding="ascii").strip()


def last_offline_step(run_dir: Path) -> int:
    """Return the newest step in the offline folders of earlier attempts, 0 if there is none.

    Steps only rise from attempt to attempt, so the newest folder that has a step has the newest one. wandb keeps its
    last records in memory for some time. If wandb was killed, these records are missing.

    Raises:
        subprocess.SubprocessError: the reader of wandb failed.
    """
    for folder in sorted(run_dir.glob("wandb/offline-run-*"), reverse=True):
        # wandb's own reader in a process of its own: an error in it cannot end this one.
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=INSPECT_TIMEOUT_SECONDS)
        if step := json.loads(done.stdout)["step"]:
            return int(step)
    return 0


@dataclass(frozen=True, slots=True)
class Reported:
    """Reports of older attempts: the files of the run up to their current length."""

    run_dir: Path
    num_bytes: Mapping[str, int]
    """Length of each file."""

    @classmethod
    def so_far(cls, run_dir: Path) -> "Reported":
        """Return everything that the files hold now. Later lines belong to this attempt."""
        paths = [path for name in (METRICS_FILE, EVENTS_FILE) if (path := run_dir / name).exists()]
        return cls(run_dir, {path.name: path.stat().st_size for path in paths})

    def records(self, *, loads_after: int) -> Iterator[Record]:
        """Yield all records, oldest first. Expert loads are long, so they are included only after iteration
        ``loads_after``.

        Raises:
            ValueError: a line is damaged, other than an unfinished last one. The message names file and line.
        """

        def parse(line: dict[str, JsonValue]) -> Record | None:
            iteration = line.get("iteration")
            is_old = isinstance(iteration, int) and iteration <= loads_after
            return None if is_old and line.get("kind") == ExpertLoad.kind else read_record(line)

        files = (
            read_lines(self.run_dir / name, parse, num_bytes=num_bytes) for name, num_bytes in self.num_bytes.items()
        )
        known = ((record for record in file if record is not None) for file in files)
        # Each file is in the order of writing, which a merge keeps.
        return heapq.merge(*known, key=lambda record: record.time_unix_seconds or 0.0)


def wandb_mode(asked: str, environment: Mapping[str, str]) -> str:
    """Choose ``online`` or ``offline`` for ``telemetry.wandb=asked``, without use of the network.

    Raises:
        netrc.NetrcParseError: the login file is damaged.
    """
    if asked != "auto":
        return asked
    if environment.get("WANDB_MODE"):
        return environment["WANDB_MODE"]
    return "online" if _logged_in(environment) else "offline"


def _logged_in(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    home = Path(environment.get("HOME") or Path.home())
    files = [Path(environment["NETRC"])] if environment.get("NETRC") else [home / ".netrc", home / "_netrc"]
    return any(file.is_file() and netrc.netrc(file).authenticators(host) is not None for file in files)
