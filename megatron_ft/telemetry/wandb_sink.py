"""Records to Weights & Biases: one run through all restarts, online or in an offline folder.

Everything that touches wandb, its import included, happens in a thread of this sink.
"""

import netrc
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.events import Record, RunStarted
from megatron_ft.telemetry.sink import Outcome
from megatron_ft.telemetry.steps import Step, Steps
from megatron_ft.telemetry.wandb_history import Reported, last_offline_step, run_id

MAX_QUEUED_RECORDS = 100_000
CLOSE_SECONDS = 60.0
"""Longest wait at the end of the run for wandb to take what is left."""


class WandbSink:
    """Queues records; a thread sends one wandb step per iteration.

    The step is the iteration, and it only rises: iterations wandb has from an older attempt are not
    sent again; those that were reported but that wandb does not have are sent first.
    """

    name = "wandb"
    retries = False

    def __init__(self, config: TelemetryConfig, run_dir: Path, *, job: Mapping[str, Any]) -> None:
        """``job``: the resolved configuration, shown as the run's config."""
        self._config = config
        self._run_dir = run_dir
        self._job = job
        self._reported = Reported.so_far(run_dir)
        self._queue: queue.Queue[Record | Outcome] = queue.Queue(MAX_QUEUED_RECORDS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
        self._thread.start()

    @property
    def num_lost_records(self) -> int:
        """Records that never reached wandb, once it has failed."""
        return self._queue.qsize() if self._error else 0

    def write(self, record: Record) -> None:
        """Queue the record.

        Raises:
            Exception: what wandb raised since the last call.
            queue.Full: wandb is too far behind.
        """
        if self._error is not None:
            raise self._error
        self._queue.put_nowait(record)

    def close(self, outcome: Outcome) -> None:
        """Wait for what is queued, then end the wandb run.

        Raises:
            Exception: what wandb raised.
            TimeoutError: it did not come to an end in time; the offline folder keeps what it took.
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
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        if mode == "online":
            last_step = max(0, run.starting_step - 1)
        return _Sender(run, self._reported, last_step=last_step)


class _Sender:
    """Sends one wandb step per iteration; what older attempts reported is folded into its figures first."""

    def __init__(self, run: Any, reported: Reported, *, last_step: int) -> None:
        """``last_step``: the newest iteration wandb has from older attempts."""
        self._run = run
        self._steps = Steps(sent=last_step)
        self._missed: dict[int, Step] = {}
        """Of older attempts, those that wandb lost: which of them count is known when this one begins."""
        for record in reported.records(loads_after=last_step):
            if (step := self._steps.take(record)) is not None:
                self._missed[step.iteration] = step

    def take(self, record: Record) -> None:
        """Send what ``record`` completes."""
        step = self._steps.take(record)
        if isinstance(record, RunStarted):
            missed, self._missed = self._missed, {}
            for iteration in sorted(missed):
                if iteration <= (record.resumed_from_iteration or 0):
                    self._send(missed[iteration])
            self._mark_attempts()
        if step is not None:
            self._send(step)

    def finish(self, exit_code: int) -> None:
        """Send the iteration at hand, end the wandb run and wandb's own process."""
        import wandb

        if (step := self._steps.finish()) is not None:
            self._send(step)
        self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code)

    def _send(self, step: Step) -> None:
        self._run.log({"iteration": step.iteration, **step.figures}, step=step.iteration, commit=True)
        self._steps.sent(step.iteration)

    def _mark_attempts(self) -> None:
        """Every start of the run is in its config, beside the figure ``job/attempt`` of each step."""
        attempts = [asdict(attempt) for attempt in self._steps.run.attempts]
        self._run.config.update({"attempts": attempts}, allow_val_change=True)


def wandb_mode(asked: str, environment: Mapping[str, str]) -> str:
    """``online`` or ``offline`` for ``telemetry.wandb=asked``; no network is used to find out.

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
