"""Runs jobs that lose nodes and get them back, reads their records, and runs the scripted jobs with which they are
compared."""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.failures.injecting import INJECTED_FILE
from megatron_ft.testing.jobs import REPOSITORY, JobResult, start, wait

NUM_NODES = 8
MOST_ITERATIONS = 600
"""Number of iterations for which learning rates are planned. Jobs are stopped earlier, when their faults are over."""
HUNG = -1
"""Exit code of a job that was killed because it took too long. It counts as a failure."""
_BASE = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    f"training.train_iterations={MOST_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "parallel.use_distributed_optimizer=false",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    f"launch.num_nodes={NUM_NODES}",
    "launch.ranks_per_node=1",
    "placement=overlap_search",
    "placement.min_replicas=2",
)

MIGRATING = (
    "placement.shares=even",
    "placement.load_smoothing=0.0",
    "placement.rebalance_bytes_per_token=1e12",
)
"""Overrides with which every rebalance moves experts, if ``rebalance_min_gain`` is 0. With the default ``shares``,
replicas soon divide the tokens of the small models exactly equally. Then no placement is better, and no rebalance moves
an expert. With even shares, the best placement depends on the loads; without smoothing, these differ every time."""
ABOUT_NODES = ("launch.", "nodes.", "recovery.", "topology.", "limits.", "control.", "testing.")
"""Prefixes of keys about nodes and faults. A reference run without faults has its own values of these keys."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records of a run, by iteration."""

    exit_code: int
    losses: Mapping[int, float]
    digests: Mapping[int, Sequence[str]]
    changes: Sequence[Event]
    """Changes of membership, in order."""
    orders: Sequence[Event]
    """Orders of the controller, in order."""
    recoveries: Sequence[Event]
    """Recovery event of each membership."""
    hits: Sequence[Event]
    """Faults that ranks recorded before they happened."""
    kills: Sequence[Event]
    """Kills from outside, as recorded before they happened."""
    placements: Mapping[int, Any]
    """Placements as stored on disk, by the first iteration that used each."""
    problems: list[str]

    @classmethod
    def of(
        cls, run: JobResult, *, restarts: bool = False, first: int = 1, expected_exit: int | None = None
    ) -> "Recorded":
        """Read the records of a run that has ended.

        Args:
            restarts: Whether iterations may have run again.
            first: First iteration of the run.
            expected_exit: Expected exit code. None stands for 0, or 130 if the job was requested to stop.
        """
        events = run.records()
        losses = [(m["iteration"], m["loss"]) for m in run.records("metrics.jsonl") if "loss" in m]
        digests = [(e["iteration"], e["digests"]) for e in events if e["kind"] == "state_digest"]
        changes = [event for event in events if event["kind"] == "membership_changed"]
        stopped = any(event["kind"] == "stop_requested" for event in events)
        ended_well = run.exit_code == ((130 if stopped else 0) if expected_exit is None else expected_exit)
        problems = [] if ended_well else [f"exit code {run.exit_code}: {run.output[-4000:]}"]
        last = max((iteration for iteration, _ in losses), default=0)
        began = Counter(change["iteration"] for change in changes)
        unreported = untold(changes, {iteration for iteration, _ in losses})
        for name, found in (("loss", losses), ("state", digests)):
            counts = Counter(iteration for iteration, _ in found)
            for iteration in range(first, 0 if restarts else last + 1):
                is_end = name == "state" and iteration == last  # the last iteration may have one more digest, or none
                is_untold = counts[iteration] == 0 and iteration in unreported
                # Each membership that begins after an iteration records the digest of this iteration's state again.
                is_again = name == "state" and 1 < counts[iteration] <= 1 + began[iteration]
                if counts[iteration] != 1 and not is_end and not is_untold and not is_again:
                    problems.append(f"{name} of iteration {iteration} recorded {counts[iteration]} times")
        return cls(
            exit_code=run.exit_code,
            losses=dict(losses),
            digests=dict(digests),
            changes=changes,
            orders=run.records("decisions.jsonl"),
            recoveries=[event for event in events if event["kind"] == "recovery_started"],
            hits=run.records("failpoints.jsonl"),
            kills=[line for line in run.records(INJECTED_FILE) if line["action"] == "kill"],
            placements=_placements(run.run_dir),
            problems=problems,
        )

    @property
    def last_iteration(self) -> int:
        """Return the newest reported iteration."""
        return max(self.losses, default=0)

    def differences(self, reference: "Recorded", first: int, last: int) -> list[str]:
        """Return the differences from ``reference`` in the iterations ``first`` to ``last``."""
        return [
            f"{name} of iteration {iteration}"
            for name, iteration, mine, theirs in self._pairs(reference, first, last)
            if mine is None or mine != theirs
        ]

    def num_compared(self, reference: "Recorded", first: int, last: int) -> int:
        """Return the number of losses and digests of these iterations that both runs have recorded."""
        return sum(None not in (mine, theirs) for _, _, mine, theirs in self._pairs(reference, first, last))

    def _pairs(self, reference: "Recorded", first: int, last: int) -> Iterator[tuple[str, int, Any, Any]]:
        """Yield (``loss`` or ``state``, iteration, this run's value or None, the reference's value) of everything that
        must be equal.

        The digest of an iteration that survivors finished after a loss is left out, because it covers other ranks than
        the reference's.
        """
        seen_later = {
            change["iteration"]
            for change in self.changes
            if len(self.digests.get(change["iteration"], ())) == change["world_size"]
        }
        unreported = untold(self.changes, self.losses)
        for iteration in range(first, last + 1):
            if iteration in self.losses or iteration not in unreported:
                yield "loss", iteration, self.losses.get(iteration), reference.losses.get(iteration)
            if iteration not in seen_later and (iteration in self.digests or iteration not in unreported):
                yield "state", iteration, self.digests.get(iteration), reference.digests.get(iteration)

    def distance(self, other: "Recorded", last: int) -> float:
        """Return the largest relative difference between losses of the two runs, up to iteration ``last``."""
        common = [i for i in self.losses.keys() & other.losses.keys() if i <= last]
        return max((abs(self.losses[i] - other.losses[i]) / abs(other.losses[i]) for i in common), default=math.inf)


@dataclass(slots=True)
class Bench:
    """Runs jobs with ranks from one fork server, which has already imported all modules."""

    folder: Path
    socket: str
    base: Sequence[str] = _BASE
    """Overrides of all jobs."""
    timeout_seconds: float = 300.0
    """Time limit of a job."""
    num_jobs: int = 0
    problems: list[str] = field(default_factory=list)

    def run(self, overrides: Sequence[str], *, first: int = 1) -> Recorded:
        """Run one job until it ends. A job that does not end in time has failed.

        Args:
            first: First iteration of the job.
        """
        with self.running(overrides) as run:
            return Recorded.of(run, first=first)

    @property
    def next_run_dir(self) -> Path:
        """Return the folder of the job that starts next."""
        return self.folder / f"job-{self.num_jobs + 1:03d}"

    @contextlib.contextmanager
    def running(
        self, overrides: Sequence[str], *, until: Callable[[list[Any]], bool] | None = None
    ) -> Iterator[JobResult]:
        """Run one job until it ends. Its folder exists within the block.

        Args:
            until: Called with the events so far. When it returns True, the job is requested to stop.
        """
        run_dir = self.next_run_dir
        self.num_jobs += 1
        words = [*self.base, *overrides, f"run.dir={self.folder}", f"run.name={run_dir.name}"]
        words += [f"data.cache_dir={self.folder / 'cache'}", f"launch.forkserver_socket={self.socket}"]
        console = start([sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words])
        stopper = threading.Thread(target=_stop, args=(console.pid, run_dir, until, console.poll), daemon=True)
        if until is not None:
            stopper.start()
        try:
            run = JobResult(0, run_dir, wait(console, self.timeout_seconds))
            run = JobResult(console.returncode, run_dir, run.output)
        except AssertionError as error:
            run = JobResult(HUNG, run_dir, str(error))
        if until is not None:
            stopper.join()
        try:
            yield run
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)


def _stop(process_id: int, run_dir: Path, until: Callable[[list[Any]], bool], poll: Callable[[], int | None]) -> None:
    """Request a job to stop when ``until`` is true for its events. Runs in a thread."""
    pause, run = threading.Event(), JobResult(0, run_dir, "")
    while poll() is None:
        events: list[Any] = []
        with contextlib.suppress(ValueError):  # the last line is still being written
            events = run.records()
        if until(events):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGINT)
            return
        pause.wait(0.1)


def _placements(run_dir: Path) -> dict[int, Any]:
    """Return the placements by first iteration. If an iteration has several, the newest is returned."""
    files = sorted((run_dir / "placements").glob("iter_*.json"))
    return {int(path.stem.removeprefix("iter_")): json.loads(path.read_text()) for path in files}


def untold(changes: Sequence[Event], reported: Collection[int]) -> set[int]:
    """Return the iterations that all ranks completed but that no record contains, because the rank that reports, or its
    agent, was lost before the report.

    They are the last iterations before a new membership. There are several if the agent, which forwards reports, was
    stopped.

    Args:
        reported: Iterations that were recorded.
    """
    found, reporter = set(), 0
    for change in changes:
        if min(change["nodes"]) != reporter or reporter in change.get("joining", ()):
            found |= before(change["iteration"], reported)
        reporter = min(change["nodes"])
    return found


def before(iteration: int, reported: Collection[int]) -> set[int]:
    """Return the iterations from the newest one whose loss was recorded to ``iteration``. The first of them is included
    because its digest may be missing: a digest is recorded after the loss."""
    first = iteration
    while first > 0 and first not in reported:
        first -= 1
    return set(range(first, iteration + 1))


def failpoints(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return faults as an override. Each fault has ``phase``, ``node`` or ``rank``, optional conditions, and ``action``
    if it is not a kill."""
    texts = []
    for fault in faults:
        narrowed = ("node", "rank", "at_iteration", "generation", "passes")
        words = [f'phase="{fault["phase"]}"', *(f"{name}={fault[name]}" for name in narrowed if name in fault)]
        texts.append(f"'{fault.get('action', 'kill')}({','.join(words)})'")
    return f"testing.failpoints=[{','.join(texts)}]"
