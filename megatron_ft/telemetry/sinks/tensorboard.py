"""Writes metrics to TensorBoard's event files in the run's folder. All jobs of a run share one folder of event files.

Only a separate thread of this sink imports and uses the package ``tensorboard``.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from megatron_ft.events import RunStarted
from megatron_ft.telemetry.sinks.base import SinkContext
from megatron_ft.telemetry.sinks.queued import QueuedSink, Reported, Step, StepSender

FOLDER = "tensorboard"
_FILE = re.compile(r"events\.out\.tfevents\.\d+\..*")


class TensorBoardSink(QueuedSink):
    """Queues records for a separate thread, which writes one step per iteration to ``<run>/tensorboard``.

    The step is the number of the iteration. When the ranks start, some iterations may run again. The sink then orders
    TensorBoard to drop the earlier values of these iterations (``purge_step`` in other writers).
    """

    name = "tensorboard"
    needs = ("tensorboard",)

    def __init__(self, run_dir: Path) -> None:
        """Start the thread that writes the event files."""
        self._folder = run_dir / FOLDER
        super().__init__(run_dir)

    @classmethod
    def open(cls, context: SinkContext) -> "TensorBoardSink":
        return cls(context.run_dir)

    def start(self) -> "_Sender":
        return _Sender(self._folder, self.reported, last_step=_last_step(self._folder))


class _Sender(StepSender):
    def __init__(self, folder: Path, reported: Reported, *, last_step: int) -> None:
        super().__init__(reported, last_step=last_step)
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events: Any = event_pb2
        folder.mkdir(exist_ok=True)
        self._file = _next_file(folder).open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._file.flush()

    def begin_attempt(self, record: RunStarted) -> None:
        """Make TensorBoard drop the values after the iteration from which ranks resume. New values replace them."""
        iteration = record.resumed_from_iteration or 0
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=iteration + 1, session_log=start)
        self.steps.repeat_after(iteration)

    def send(self, step: Step) -> None:
        values = [{"tag": name, "simple_value": float(value)} for name, value in step.figures.items()]
        self._write(step=step.iteration, summary={"value": values})

    def pause(self) -> None:
        self._file.flush()

    def end(self, exit_code: int) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **content)
        self._records.write(event.SerializeToString())


def _last_step(folder: Path) -> int:
    """Return the newest step in earlier jobs' event files, without steps that TensorBoard drops; 0 if there is none."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    newest = 0
    for path in _files(folder):
        for event in LegacyEventFileLoader(str(path)).Load():  # skips an unfinished last event
            if event.HasField("session_log"):
                newest = min(newest, event.step - 1)
            elif event.HasField("summary"):
                newest = max(newest, event.step)
    return newest


def _files(folder: Path) -> list[Path]:
    # TensorBoard reads the files of a folder in the order of their names.
    return sorted(path for path in folder.glob("*") if _FILE.fullmatch(path.name))


def _next_file(folder: Path) -> Path:
    """Return a new path that sorts after all event files in ``folder``, even if the clock was set back."""
    newest = max((int(path.name.split(".")[3]) for path in _files(folder)), default=0)
    seconds = max(int(time.time()), newest + 1)
    return folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.0"
