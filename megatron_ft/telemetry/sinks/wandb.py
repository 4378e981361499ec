"""Sends records to Weights & Biases. All restarts of a run share one wandb run, online or in an offline folder.

Only a thread of this sink uses wandb; the thread also imports it.
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
from megatron_ft.config.job import TelemetryConfig
from megatron_ft.durable import replace_file
from megatron_ft.events import Evaluation, ExpertLoad, Metrics, Record, RunStarted
from megatron_ft.serde import JsonValue
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
    """Queues records for a thread, which sends one wandb step per iteration.

    The wandb step is the number of the iteration, and it never falls. Iterations that an earlier attempt has sent are
    not sent again. Iterations that an earlier attempt reported but did not send are sent first.
    """

    name = "wandb"
    retries = False

    def __init__(self, config: TelemetryConfig, run_dir: Path, *, job: Mapping[str, Any]) -> None:
        """Prepare the queue. ``job`` is the resolved configuration, which wandb shows as the run's config."""
        self._config = config
        self._run_dir = run_dir
        self._job = job
        # The files must be read before the thread starts, and before this attempt writes to them.
        self._reported = _Reported.so_far(run_dir)
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
        """Return the number of records that were not sent because wandb failed."""
        return self._queue.qsize() if self._error else 0

    def write(self, record: Record) -> None:
        """Queue the record.

        Raises:
            Exception: any exception that wandb has raised since the last call.
            queue.Full: wandb is too slow, so the queue is full.
        """
        if self._error is not None:
            raise self._error
        # This must not block, because the calling thread also writes to all other sinks.
        self._queue.put_nowait(record)

    def close(self, outcome: Outcome) -> None:
        """Wait until all queued records are sent, then end the wandb run.

        Raises:
            Exception: any exception that wandb has raised.
            TimeoutError: wandb did not finish within ``CLOSE_SECONDS``. Even then, in offline mode, its folder contains
                the records that it has accepted.
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
        # This runs in the thread, because the import takes seconds and ``init`` may wait for the network.
        import wandb

        mode = _wandb_mode(self._config.wandb, os.environ)
        last_step = _last_offline_step(self._run_dir) if mode == "offline" else 0
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
        # wandb drops steps that do not rise, so the newest step that the server has determines what must be sent.
        if mode == "online":
            last_step = max(0, run.starting_step - 1)
        return _Sender(run, self._reported, last_step=last_step)


class _Sender:
    def __init__(self, run: Any, reported: "_Reported", *, last_step: int) -> None:
        """Continue after iteration ``last_step``, the newest one that wandb has from earlier attempts."""
        self._run = run
        self._steps = _Steps(sent=last_step)
        # Iterations of earlier attempts that wandb lost. They are sent when this attempt has started, because its start
        # shows after which iteration the run continues. Later iterations of earlier attempts are void.
        self._missed: dict[int, _Step] = {}
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
        """Send the newest iteration, then end the wandb run and wandb's process."""
        import wandb

        if (step := self._steps.finish()) is not None:
            self._send(step)
        self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code)

    def _send(self, step: "_Step") -> None:
        self._run.log({"iteration": step.iteration, **step.figures}, step=step.iteration, commit=True)
        self._steps.sent(step.iteration)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """All metrics of one iteration."""

    iteration: int
    figures: Mapping[str, float]
    """Value of each metric by name."""


class _Steps:
    """Groups records into steps, oldest first. A step is complete when the next iteration is reported.

    If an iteration is reported again, the new report replaces the earlier one, unless ``sent`` was called for it.
    """

    def __init__(self, *, sent: int) -> None:
        """Begin after iteration ``sent``, the newest one that wandb has."""
        self.run = RunFigures()
        self._sent = sent
        self._iteration = self._highest = 0
        self._figures: dict[str, float] = {}

    def sent(self, iteration: int) -> None:
        """Note that wandb has all steps up to ``iteration``, so that they are not returned again."""
        self._sent = max(self._sent, iteration)

    def take(self, record: Record) -> _Step | None:
        """Add a record. Return the step that it completes."""
        complete = None
        match record:
            case RunStarted():
                complete = self._resume(record.resumed_from_iteration or 0)
            case events.MembershipChanged() | events.RecoveryStarted():
                if record.generation > 0 and record.iteration < self._iteration:
                    # The job continues without a restart. The newest iteration is void, and was not sent to wandb yet.
                    self._figures, self._iteration = {}, record.iteration
            case Metrics() | ExpertLoad() | Evaluation():
                if record.iteration > self._iteration:
                    complete, self._iteration = self.finish(), record.iteration
        self.run.take(record)
        if isinstance(record, (Metrics, ExpertLoad, Evaluation)) and record.iteration == self._iteration > self._sent:
            self._figures |= _figures(record)
        return complete

    def finish(self) -> _Step | None:
        """Return the step of the newest iteration with all figures reported so far."""
        is_first_time, self._highest = self._iteration > self._highest, max(self._highest, self._iteration)
        figures, self._figures = self._figures, {}
        if not figures:
            if is_first_time and self._iteration <= self._sent:
                self.run.hand_out()  # wandb already has these figures, in this step
            return None
        return _Step(iteration=self._iteration, figures=figures | self.run.hand_out())

    def _resume(self, iteration: int) -> _Step | None:
        # A started job continues after ``iteration``, so reports about later iterations are void.
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
    """Return the wandb run id of this run directory. The first call chooses the id; later calls return the same id."""
    path = run_dir / ID_FILE
    if not path.exists():
        replace_file(path, "".join(secrets.choice(_ALPHABET) for _ in range(8)).encode() + b"\n")
    return path.read_text(encoding="ascii").strip()


def _last_offline_step(run_dir: Path) -> int:
    """Return the newest step in the offline folders of earlier attempts, or 0 if there is none.

    Steps only rise from attempt to attempt, so the newest folder that contains a step contains the newest step. If
    wandb was killed, the last records are missing, because wandb keeps records in memory for some time.

    Raises:
        subprocess.SubprocessError: wandb's command that reads a folder failed.
    """
    for folder in sorted(run_dir.glob("wandb/offline-run-*"), reverse=True):
        # wandb's reader runs in a separate process, so that an error in it cannot end this process.
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=INSPECT_TIMEOUT_SECONDS)
        if step := json.loads(done.stdout)["step"]:
            return int(step)
    return 0


@dataclass(frozen=True, slots=True)
class _Reported:
    """Records of earlier attempts: the run's files up to the length that they had when this attempt began."""

    run_dir: Path
    num_bytes: Mapping[str, int]
    """Length of each file in bytes, by name."""

    @classmethod
    def so_far(cls, run_dir: Path) -> "_Reported":
        """Return the current content of the run's files. Lines that are added later belong to this attempt."""
        paths = [path for name in (METRICS_FILE, EVENTS_FILE) if (path := run_dir / name).exists()]
        return cls(run_dir, {path.name: path.stat().st_size for path in paths})

    def records(self, *, loads_after: int) -> Iterator[Record]:
        """Yield all records, oldest first. Skip the long ``ExpertLoad`` records of iterations up to ``loads_after``.

        Raises:
            ValueError: a line is damaged; the message names file and line. An unfinished last line is no error.
        """

        def parse(line: dict[str, JsonValue]) -> Record | None:
            iteration = line.get("iteration")
            is_old = isinstance(iteration, int) and iteration <= loads_after
            return None if is_old and line.get("kind") == ExpertLoad.kind else Record.read(line)

        files = (
            read_lines(self.run_dir / name, parse, num_bytes=num_bytes) for name, num_bytes in self.num_bytes.items()
        )
        known = ((record for record in file if record is not None) for file in files)
        # Each file is in the order of writing, and a merge keeps that order.
        return heapq.merge(*known, key=lambda record: record.time_unix_seconds or 0.0)


def _wandb_mode(asked: str, environment: Mapping[str, str]) -> str:
    """Choose ``online`` or ``offline`` for ``telemetry.wandb=asked`` without using the network.

    Raises:
        netrc.NetrcParseError: the file with the login (``.netrc``) is damaged.
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
