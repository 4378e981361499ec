"""Jobs that lose nodes and get them back, what they write down, and the scripted jobs that they are compared with."""

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
"""Jobs are stopped when their faults have come and gone; this is the length that learning rates are laid out for."""
HUNG = -1
"""Exit code of a job that was ended because it took too long: a failure like any other."""
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

ABOUT_NODES = ("launch.", "nodes.", "recovery.", "topology.", "limits.", "control.", "testing.")
"""Prefixes of keys about nodes and faults, which a reference run without faults has of its own."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records of a run, by iteration."""

    exit_code: int
    losses: Mapping[int, float]
    digests: Mapping[int, Sequence[str]]
    changes: Sequence[Event]
    """Its changes of membership, in order."""
    orders: Sequence[Event]
    """The controller's, in order."""
    recoveries: Sequence[Event]
    """Recovery of each membership."""
    hits: Sequence[Event]
    """Faults that ranks wrote down before they happened."""
    kills: Sequence[Event]
    """Kills from outside, as they were written down before they happened."""
    placements: Mapping[int, Any]
    """First iteration to the placement that was in force from it on, as it is on disk."""
    problems: list[str]

    @classmethod
    def of(
        cls, run: JobResult, *, restarts: bool = False, first: int = 1, expected_exit: int | None = None
    ) -> "Recorded":
        """Read a run that has ended.

        Args:
            restarts: iterations may have been run again.
            first: the iteration that it began with.
            expected_exit: its exit code; None: 0, or 130 where it was asked to stop.
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
                is_end = name == "state" and iteration == last  # digested once more at the end, or not any more
                is_untold = counts[iteration] == 0 and iteration in unreported
                # What was due after an iteration is done again in each membership that begins with it.
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
        """Newest that it has reported."""
        return max(self.losses, default=0)

    def differences(self, reference: "Recorded", first: int, last: int) -> list[str]:
        """List differences to ``reference`` in the iterations from ``first`` to ``last``."""
        return [
            f"{name} of iteration {iteration}"
            for name, iteration, mine, theirs in self._pairs(reference, first, last)
            if mine is None or mine != theirs
        ]

    def num_compared(self, reference: "Recorded", first: int, last: int) -> int:
        """Losses and digests of these iterations that both runs have recorded and ``differences`` compares."""
        return sum(None not in (mine, theirs) for _, _, mine, theirs in self._pairs(reference, first, last))

    def _pairs(self, reference: "Recorded", first: int, last: int) -> Iterator[tuple[str, int, Any, Any]]:
        """(``loss`` or ``state``, iteration, this run's value or None, the reference's) of all that must be equal.

        The digest of an iteration that survivors finished after a loss is of other ranks than the reference's.
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
        """Largest relative difference of a loss of both, up to iteration ``last``."""
        common = [i for i in self.losses.keys() & other.losses.keys() if i <= last]
        return max((abs(self.losses[i] - other.losses[i]) / abs(other.losses[i]) for i in common), default=math.inf)


@dataclass(slots=True)
class Bench:
    """Runs jobs from one warm fork server."""

    folder: Path
    socket: str
    base: Sequence[str] = _BASE
    """Overrides of all of them."""
    timeout_seconds: float = 300.0
    """Timeout of a job."""
    num_jobs: int = 0
    problems: list[str] = field(default_factory=list)

    def run(self, overrides: Sequence[str], *, first: int = 1) -> Recorded:
        """One job, to its end; one that does not come to it has failed.

        Args:
            first: the iteration that it begins with.
        """
        with self.running(overrides) as run:
            return Recorded.of(run, first=first)

    @property
    def next_run_dir(self) -> Path:
        """Folder of the job that is started next."""
        return self.folder / f"job-{self.num_jobs + 1:03d}"

    @contextlib.contextmanager
    def running(
        self, overrides: Sequence[str], *, until: Callable[[list[Any]], bool] | None = None
    ) -> Iterator[JobResult]:
        """One job, to its end; its folder is there within the block.

        Args:
            until: asked with the events so far; once it says so, the job is asked to stop.
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
    """Thread: ask a job to stop once its events say that it is time."""
    pause, run = threading.Event(), JobResult(0, run_dir, "")
    while poll() is None:
        events: list[Any] = []
        with contextlib.suppress(ValueError):  # a line that is being written
            events = run.records()
        if until(events):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGINT)
            return
        pause.wait(0.1)


def _placements(run_dir: Path) -> dict[int, Any]:
    """Each with the time at which it took over: later ones of an iteration replace earlier ones."""
    files = sorted((run_dir / "placements").glob("iter_*.json"))
    return {int(path.stem.removeprefix("iter_")): json.loads(path.read_text()) for path in files}


def untold(changes: Sequence[Event], reported: Collection[int]) -> set[int]:
    """Iterations that everybody has completed, but whose reporter may have been lost before they were recorded.

    Those up to the one that the next membership begins with: several where the agent that passes on reports was
    stopped.

    Args:
        reported: iterations that were recorded.
    """
    found, reporter = set(), 0
    for change in changes:
        if min(change["nodes"]) != reporter or reporter in change.get("joining", ()):
            found |= before(change["iteration"], reported)
        reporter = min(change["nodes"])
    return found


def before(iteration: int, reported: Collection[int]) -> set[int]:
    """The iteration and those right before it, back to the newest whose loss was recorded: its digest comes later."""
    first = iteration
    while first > 0 and first not in reported:
        first -= 1
    return set(range(first, iteration + 1))


def failpoints(faults: Sequence[Mapping[str, Any]]) -> str:
    """Faults as an override: each ``phase``, ``node`` or ``rank``, and whatever narrows it; ``action`` if not kill."""
    texts = []
    for fault in faults:
        narrowed = ("node", "rank", "at_iteration", "generation", "passes")
        words = [f'phase="{fault["phase"]}"', *(f"{name}={fault[name]}" for name in narrowed if name in fault)]
        texts.append(f"'{fault.get('action', 'kill')}({','.join(words)})'")
    return f"testing.failpoints=[{','.join(texts)}]"
