"""Sends records to Weights & Biases. All jobs of a run share one wandb run, online or in offline folders.

Only a separate thread of this sink imports and uses the package ``wandb``.
"""

import json
import netrc
import os
import secrets
import string
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.durable import replace_file
from megatron_ft.events import RunStarted
from megatron_ft.telemetry.sinks.base import SinkContext
from megatron_ft.telemetry.sinks.queued import QueuedSink, Reported, Step, StepSender

ID_FILE = "wandb_run_id"
INSPECT_TIMEOUT_SECONDS = 60.0

_ALPHABET = string.ascii_lowercase + string.digits


class WandbSink(QueuedSink):
    """Queues records for a separate thread, which sends one wandb step per iteration.

    The wandb step is the number of the iteration, and it never falls. If an earlier job of the run sent an iteration,
    it is not sent again. Iterations that an earlier job reported but did not send are sent first.
    """

    name = "wandb"

    def __init__(self, config: TelemetryConfig, run_dir: Path, *, job: Mapping[str, Any]) -> None:
        """Start the thread. ``job`` is the resolved configuration, which wandb shows as the run's config."""
        self._config = config
        self._run_dir = run_dir
        self._job = job
        super().__init__(run_dir)

    @classmethod
    def open(cls, context: SinkContext) -> "WandbSink | None":
        telemetry = context.config.telemetry
        return None if telemetry.wandb == "disabled" else cls(telemetry, context.run_dir, job=asdict(context.config))

    def start(self) -> "_Sender":
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
        return _Sender(run, self.reported, last_step=last_step)


class _Sender(StepSender):
    def __init__(self, run: Any, reported: Reported, *, last_step: int) -> None:
        super().__init__(reported, last_step=last_step)
        self._run = run

    def begin_attempt(self, record: RunStarted) -> None:
        names = ("time_unix_seconds", "world_size", "resumed_from", "resumed_from_iteration")
        starts = enumerate(self.steps.run.attempts, start=1)
        attempts = [{"number": number} | {name: getattr(start, name) for name in names} for number, start in starts]
        self._run.config.update({"attempts": attempts}, allow_val_change=True)

    def send(self, step: Step) -> None:
        self._run.log({"iteration": step.iteration, **step.figures}, step=step.iteration, commit=True)

    def end(self, exit_code: int) -> None:
        """End the wandb run and wandb's process."""
        import wandb

        self._run.finish(exit_code=exit_code)
        wandb.teardown(exit_code)


def run_id(run_dir: Path) -> str:
    """Return the wandb run id of a run's folder. The first call chooses a random id and stores it in the folder."""
    path = run_dir / ID_FILE
    if not path.exists():
        replace_file(path, "".join(secrets.choice(_ALPHABET) for _ in range(8)).encode() + b"\n")
    return path.read_text(encoding="ascii").strip()


def _last_offline_step(run_dir: Path) -> int:
    """Return the newest step in wandb's offline folders of the run's earlier jobs; 0 if they contain no step.

    Steps only rise from job to job. So the newest folder that contains a step contains the newest step. If wandb was
    killed, the last records are missing, because wandb keeps records in memory for some time.

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


def _wandb_mode(asked: str, environment: Mapping[str, str]) -> str:
    """Return wandb's mode for ``telemetry.wandb=asked``. For ``auto``, return the environment variable ``WANDB_MODE``
    if it is set; otherwise ``online`` if there is a login, and ``offline`` if not.

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
