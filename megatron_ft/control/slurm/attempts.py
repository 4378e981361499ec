"""Files in which a Slurm job records its launchers, and the marker that the job is over.

``slurm/attempts.jsonl`` of the run's folder has a line for each launcher that has ended. For a Slurm array, the file
has a line only for a launcher whose node died or was taken away. ``slurm/JOB.json`` marks a job that is over.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ft.durable import append_line, fsync_folder, replace_file
from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.job_attempts import Asked, Attempt
from megatron_ft.serde import parse_json

FOLDER = "slurm"
"""Subfolder of the run's folder for files about the Slurm jobs of the run."""
_FILE = "attempts.jsonl"
_EVENTS, _METRICS = "events.jsonl", "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Witness:
    """The attempt of one launcher to run the job, and the part of the run's event file that the attempt wrote."""

    run_dir: Path
    hosts: Sequence[str]
    """Host of each node of the attempt, in the order of node numbers."""
    first_byte: int
    """Offset in the run's event file at which the attempt's events begin."""

    @staticmethod
    def begin(run_dir: Path, hosts: Sequence[str]) -> "Witness":
        """Return the object for an attempt that begins now. Events already in the event file are ignored."""
        return Witness(run_dir, hosts, _num_whole_bytes(run_dir / _EVENTS))

    def lost_hosts(self) -> tuple[str, ...]:
        """Return the host of each node loss that the attempt's events report; a host can appear several times."""
        return self._hosts_of(line for line in self._events() if line["kind"] == "node_lost")

    def failed_hosts(self) -> tuple[str, ...]:
        """Return the host of the rank that failed first, for each failed generation of the attempt."""
        return self._hosts_of(line for line in self._events() if line["kind"] == "rank_failed" and line.get("first"))

    def is_complete(self) -> bool:
        """Return whether the attempt's events report that the run is complete."""
        ends = [line for line in self._events() if line["kind"] == "run_finished"]
        return any(line.get("is_complete", True) for line in ends)

    def has_timed_out(self) -> bool:
        """Return whether the attempt's events report that only ``training.exit_after_minutes`` requested the stop."""
        sources = [line["source"] for line in self._events() if line["kind"] == "stop_requested"]
        return bool(sources) and all(source.startswith("training.exit_after_minutes=") for source in sources)

    def _events(self) -> list[Mapping[str, Any]]:
        return _lines(self.run_dir / _EVENTS, self.first_byte)

    def _hosts_of(self, events: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        nodes = [event.get("node") for event in events]
        return tuple(self.hosts[node] for node in nodes if node is not None and node < len(self.hosts))


@dataclass(frozen=True, slots=True)
class RunAttempts:
    """The attempts (launchers) of a run, and the markers of the run's jobs that are over."""

    run_dir: Path

    def newest_iteration(self) -> int:
        """Return the newest iteration that any attempt of the run has reported; 0 if no iteration was reported.

        Raises:
            ControlError: the run's metrics are damaged.
        """
        path = self.run_dir / _METRICS
        try:
            return max((int(line["iteration"]) for line in _lines(path, 0)), default=0)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ControlError(f"{path}: damaged: {error!r}") from None

    def read(self) -> list[Attempt]:
        """Return the attempts of the run so far, oldest first; empty if ``attempts.jsonl`` does not exist.

        Raises:
            ControlError: the file is damaged.
        """
        path = self.run_dir / FOLDER / _FILE
        try:
            return [_parse(line) for line in _lines(path, 0)]
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ControlError(f"{path}: damaged: {error!r}") from None

    def add(self, attempt: Attempt) -> None:
        """Append an attempt to the file, and return when it is on disk. The run's folder must exist."""
        path = self.run_dir / FOLDER / _FILE
        path.parent.mkdir(exist_ok=True)
        # The subfolder may be new: if its entry is lost in a power failure, so are its files.
        fsync_folder(self.run_dir)
        content = {**asdict(attempt), "asked": None if attempt.asked is None else attempt.asked.value}
        append_line(path, json.dumps(content).encode() + b"\n")
        fsync_folder(path.parent)

    def leave_marker(self, job_id: str, *, exit_code: int, reason: str, is_final: bool) -> Path:
        """Write the job's exit code and reason to ``slurm/JOB.json`` atomically, and return when they are on disk.

        Args:
            is_final: whether no other job should continue the run: it is complete, or a user must repair it.
        """
        path = self.marker_of(job_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        fsync_folder(self.run_dir)
        content = {"job_id": job_id, "exit_code": exit_code, "reason": reason, "is_final": is_final}
        replace_file(path, json.dumps(content).encode() + b"\n")
        return path

    def read_end(self, job_id: str) -> int | None:
        """Return the exit code of a job that has ended, or None if it has no marker.

        Raises:
            ControlError: the marker is damaged.
        """
        path = self.marker_of(job_id)
        try:
            return int(parse_json(path.read_bytes())["exit_code"])
        except FileNotFoundError:
            return None
        except (OverflowError, ValueError, KeyError, TypeError) as error:
            raise ControlError(f"{path}: damaged: {error!r}") from None

    def marker_of(self, job_id: str) -> Path:
        """Return the path of the marker that a job is over."""
        return self.run_dir / FOLDER / f"{job_id}.json"


def _parse(line: Mapping[str, Any]) -> Attempt:
    asked = None if line["asked"] is None else Asked(line["asked"])
    return Attempt(
        job_id=str(line["job_id"]),
        hosts=tuple(line["hosts"]),
        exit_code=None if line["exit_code"] is None else int(line["exit_code"]),
        asked=asked,
        iteration=int(line["iteration"]),
        lost_hosts=tuple(line["lost_hosts"]),
        failed_hosts=tuple(line["failed_hosts"]),
        is_complete=bool(line.get("is_complete", False)),
        has_timed_out=bool(line.get("has_timed_out", False)),
    )


def _num_whole_bytes(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def _lines(path: Path, first_byte: int) -> list[Mapping[str, Any]]:
    # Return the complete lines of a log from a byte on; a partial last line is left out.
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(first_byte)
        return [parse_json(line) for line in file if line.endswith(b"\n")]
