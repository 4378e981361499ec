"""Claim ``resume-bitwise``: identical runs are equal in every bit, and so is a run that was stopped and resumed.

After every iteration a run records its loss and a digest of every rank's whole state (weights, master weights, moments,
step counts, buffers, each by its global name). A trial stops a run in one of several ways, resumes it, and compares
everything that it recorded with an undisturbed run, with ``atol=0``.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, run_campaign
from benchmarks.covering import Row, covering_array
from benchmarks.report import finish, parse_arguments
from megatron_ft.testing.jobs import REPOSITORY, JobResult, forkserver, run_job, start, wait

ID = "resume-bitwise"
NUM_ITERATIONS = 8
TIMEOUT_SECONDS = 240.0
WARM = "megatron_ft.mcore.rank_main:warm"

LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp1": (),
    "dp2": ("launch.ranks_per_node=2",),
    "pp2": ("launch.ranks_per_node=2", "parallel.pipeline_model_parallel_size=2"),
    "ep2": ("launch.ranks_per_node=2", "parallel.expert_model_parallel_size=2"),
    "tp2": ("launch.ranks_per_node=2", "parallel.tensor_model_parallel_size=2"),
}
KILLED_IN = {"kill_backward": "backward", "kill_update": "update", "kill_gather": "gather", "kill_saving": "checkpoint"}
FACTORS: dict[str, Sequence[Any]] = {
    "layout": list(LAYOUTS),
    "precision": ["fp32", "bf16"],
    "distributed_optimizer": [True, False],
    "dropout": [0.0, 0.1],
    "async_save": [True, False],
    "stop": ["exit", "interrupt", *KILLED_IN],
    "killed_rank": [0, 1],
    "stop_at": [2, 3, 5, 6],  # Ctrl-C stops after the next iteration, which must not be the last
}
QUICK_ROWS: tuple[Row, ...] = tuple(
    {
        "layout": "ep2",
        "precision": "bf16",
        "distributed_optimizer": True,
        "dropout": 0.1,
        "async_save": True,
        "stop": stop,
        "killed_rank": int(stop in KILLED_IN),
        "stop_at": stop_at,
    }
    for stop, stop_at in (("kill_update", 5), ("interrupt", 3))
)
BASE = (
    "model=moe_micro",
    f"training.train_iterations={NUM_ITERATIONS}",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "checkpoint.save_interval_iterations=1",
    "model.moe_router_score_function=sigmoid",
    "model.moe_router_enable_expert_bias=true",
    "telemetry.wandb=disabled",
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records of all attempts of a run: the values of each iteration, earlier attempts first."""

    digests: list[tuple[int, tuple[str, ...]]]
    losses: list[tuple[int, float]]

    @classmethod
    def of(cls, run: JobResult) -> "Recorded":
        """Read the records from the run's folder."""
        events, metrics = run.records(), run.records("metrics.jsonl")
        return cls(
            digests=[(e["iteration"], tuple(e["digests"])) for e in events if e["kind"] == "state_digest"],
            losses=[(m["iteration"], m["loss"]) for m in metrics if m.get("kind", "metrics") == "metrics"],
        )

    def differences(self, reference: "Recorded") -> list[str]:
        """Return the differences from the reference, and iterations that are missing at the end; empty if all bits
        agree."""
        found = []
        for name, mine, theirs in (
            ("state", self.digests, dict(reference.digests)),
            ("loss", self.losses, dict(reference.losses)),
        ):
            found += [f"{name} of iteration {at}: {value}" for at, value in mine if theirs.get(at) != value]
            missing = set(range(1, NUM_ITERATIONS + 1)) - {at for at, _ in mine}
            found += [f"{name} of iterations {sorted(missing)} never recorded"] if missing else []
        return found


@dataclass(slots=True)
class Bench:
    """Runs jobs with ranks from one fork server, and stores undisturbed runs for later trials."""

    folder: Path
    socket: str
    references: dict[str, tuple[Recorded, list[str]]] = field(default_factory=dict)
    num_trials: int = 0

    def execute(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Execute trials and yield their outcomes. Each trial is one stopped and resumed run."""
        for trial in trials:
            self.num_trials += 1
            reference, problems = self.reference(trial.parameters)
            if problems:
                yield (
                    trial,
                    Outcome(proven=True, passed=False, num_compared=0, details={"identical runs": problems[:5]}),
                )
            else:
                yield trial, self.stop_and_resume(f"trial-{self.num_trials:03d}", trial.parameters, reference)

    def reference(self, row: Row) -> tuple[Recorded, list[str]]:
        """Return the undisturbed run of a row's configuration, and differences between two such runs. Both run at the
        first call."""
        overrides = configuration(row)
        key = json.dumps(overrides)
        if key not in self.references:
            runs = [self.run(f"reference-{len(self.references):03d}{twin}", overrides) for twin in "ab"]
            first, second = (Recorded.of(run) for run in runs)
            problems = [*filter(None, map(ended, runs)), *first.differences(first), *second.differences(first)]
            self.references[key] = first, problems
        return self.references[key]

    def stop_and_resume(self, name: str, row: Row, reference: Recorded) -> Outcome:
        """Stop a run as the row specifies, resume it, and compare it with the reference."""
        stopped, event = self.stopped(name, row)
        if not event:
            return Outcome(proven=False, passed=False, num_compared=0, details={"output": stopped.output[-2000:]})
        resumed = self.run(name, [*configuration(row), *saving(row), "run.resume=must"])
        recorded = Recorded.of(resumed)
        begun = [e.get("resumed_from_iteration") or 0 for e in resumed.records() if e["kind"] == "run_started"]
        differences = [*filter(None, [ended(resumed)]), *recorded.differences(reference)]
        if len(begun) != 2 or not 0 < begun[-1] < NUM_ITERATIONS:
            differences.append(f"attempts started from iterations {begun}")
        details = {
            "event": event,
            "resumed_from_iteration": begun[-1],
            "configuration": json.dumps(configuration(row)),
            "num_digests": sum(len(digests) for _, digests in recorded.digests),
            "num_losses": len(recorded.losses),
            "differences": differences[:5],
        }
        shutil.rmtree(resumed.run_dir, ignore_errors=True)
        num_compared = details["num_digests"] + details["num_losses"]
        return Outcome(proven=True, passed=not differences, num_compared=num_compared, details=details)

    def stopped(self, name: str, row: Row) -> tuple[JobResult, str]:
        """Run until the stop that the row specifies. Return the run, and the proof that the stop happened; empty if
        there is none."""
        overrides = [*configuration(row), *saving(row)]
        at, kind = int(str(row["stop_at"])), str(row["stop"])
        if kind == "exit":
            run = self.run(name, [*overrides, f"training.exit_at_iteration={at}"])
            last = max((iteration for iteration, _ in Recorded.of(run).losses), default=0)
            return run, f"ended after iteration {last}" if run.exit_code == 0 and last == at else ""
        if kind == "interrupt":
            return self.interrupted(name, overrides, at)
        phase = KILLED_IN[kind]
        rank = int(str(row["killed_rank"]))
        run = self.run(name, [*overrides, failpoint(f'kill(rank={rank},at_iteration={at + 1},phase="{phase}")')])
        hits = [hit for hit in run.records("failpoints.jsonl") if hit["action"] == "kill" and hit["rank"] == rank]
        return run, f"rank {rank} killed in {phase}" if hits and run.exit_code else ""

    def interrupted(self, name: str, overrides: list[str], at: int) -> tuple[JobResult, str]:
        """Interrupt a run as Ctrl-C does after iteration ``at`` is reported. A failpoint delays the next iteration
        until then."""
        words = [*overrides, failpoint(f'delay(seconds=3.0,rank=0,at_iteration={at + 1},phase="data")')]
        process = start(self.command(name, words))
        run_dir = self.folder / name
        seen = wait_for_iteration(process, run_dir, at)
        if seen:
            os.killpg(process.pid, signal.SIGINT)
        run = JobResult(0, run_dir, wait(process, TIMEOUT_SECONDS))
        return run, "interrupted" if seen and process.returncode == 130 else ""

    def run(self, name: str, overrides: Sequence[str]) -> JobResult:
        """Run one job until it ends."""
        words = [*overrides, f"run.name={name}", f"data.cache_dir={self.folder / 'cache'}"]
        return run_job(words, forkserver=self.socket, runs=self.folder, timeout_seconds=TIMEOUT_SECONDS)

    def command(self, name: str, overrides: Sequence[str]) -> list[str]:
        """Return the command line of the job."""
        places = [f"run.name={name}", f"run.dir={self.folder}", f"data.cache_dir={self.folder / 'cache'}"]
        socket = f"launch.forkserver_socket={self.socket}"
        return [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *overrides, *places, socket]


def allowed(row: Row) -> bool:
    """Return whether a row is possible. Rows name a victim only for kills, and rank 1 only in jobs that have it."""
    second = row["killed_rank"] == 1
    return not second or (row["layout"] != "dp1" and row["stop"] in KILLED_IN)


def configuration(row: Row) -> list[str]:
    """Return the overrides that determine the bits of a run."""
    return [
        *BASE,
        *LAYOUTS[str(row["layout"])],
        f"precision.params_dtype={row['precision']}",
        f"parallel.use_distributed_optimizer={str(row['distributed_optimizer']).lower()}",
        f"model.hidden_dropout={row['dropout']}",
    ]


def saving(row: Row) -> list[str]:
    """Return the overrides about how checkpoints are written."""
    return [f"checkpoint.async_save={str(row['async_save']).lower()}"]


def failpoint(text: str) -> str:
    """Return a fault as an override."""
    return f"testing.failpoints=['{text}']"


def ended(run: JobResult) -> str:
    """Return the problem of how the job ended; empty if it ended as planned."""
    return "" if run.exit_code == 0 else f"exit code {run.exit_code}: {run.output[-1500:]}"


def wait_for_iteration(process: "subprocess.Popen[str]", run_dir: Path, iteration: int) -> bool:
    """Wait until the run reports ``iteration``. Return False if it ends or takes too long before that."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        path = run_dir / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        if any(json.loads(line).get("iteration") == iteration for line in lines if line.endswith("\n")):
            return True
        time.sleep(0.05)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__, argv)
    rows = list(QUICK_ROWS) if arguments.quick else covering_array(FACTORS, allowed=allowed)
    with tempfile.TemporaryDirectory(prefix="resume-bitwise-") as folder, forkserver(WARM) as socket:
        bench = Bench(Path(folder), socket)
        counts, outcomes = run_campaign(ID, rows, bench.execute, script=Path(__file__), quick=arguments.quick)
    details = [outcome.details for _, outcome in outcomes if outcome.passed]
    num_digests, num_losses = (sum(detail[name] for detail in details) for name in ("num_digests", "num_losses"))
    num_identical = len({detail["configuration"] for detail in details})
    figure = (
        f"{counts.passed} of {counts.planned} stopped and resumed runs and {num_identical} pairs of identical runs"
        f" equal in every bit ({num_digests} rank states, {num_losses} losses)"
    )
    return finish(
        arguments.out,
        ID,
        passed=counts.complete,
        figure=figure + counts.again if counts.complete else counts.summary(),
        threshold="all equal, atol=0",
        counts={
            **counts.to_counts(),
            "identical_pairs": num_identical,
            "rank_states_compared": num_digests,
            "losses_compared": num_losses,
        },
        details={"failures": [{**t.parameters, **o.details} for t, o in outcomes if not o.passed]},
    )


if __name__ == "__main__":
    sys.exit(main())
