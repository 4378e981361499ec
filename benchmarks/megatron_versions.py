"""Claim ``megatron-versions``: each supported release of Megatron-Core trains the same bits, and recovers from a kill.

Four jobs run without a fault on the oldest release. Then each of them runs on every release, and a rank is killed in
it. A fifth run starts on the oldest release, and each release resumes it. Loss, gradient norm, auxiliary losses and the
digest of every rank's whole state are compared for each iteration, with ``atol=0``, with the run without a fault. A job
with replicas continues on fewer ranks, so it is compared with the run on the oldest release that lost the same rank.

Each release has an environment, ``FOLDER/RELEASE``, which ``make`` builds if it is missing. ``MEGATRON_VENVS`` names
FOLDER. All environments must have the same Python, torch and numpy. The quick variant kills the first job in another
phase, with the installed release alone.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.doctor.supported import MEGATRON
from megatron_ft.errors import ConfigError
from megatron_ft.testing.jobs import JobResult, forkserver, run_job

ID = "megatron-versions"
VARIABLE = "MEGATRON_VENVS"
WARM = "megatron_ft.mcore.rank_main:warm"
TIMEOUT_SECONDS = 600.0
NUM_ITERATIONS, KILLED_AT, STOPPED_AT = 9, 8, 4
NUM_WORKERS = 3
VALUES = ("loss", "grad_norm", "aux_loss", "z_loss", "learning_rate")
"""Values of each iteration that are compared, besides the digests of all ranks."""
COMMON = (
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.digest_interval_iterations=1",
    "training.eval_interval_iterations=0",
    "telemetry.wandb=disabled",
)
SMALL = ("model=moe_micro", "training.micro_batch_size=1", "checkpoint.save_at_end=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, the fault in it, and the recovery that must follow."""

    name: str
    overrides: tuple[str, ...]
    rank: int
    """Rank that is killed."""
    phase: str
    """Phase of iteration ``KILLED_AT`` in which it is killed."""
    recovery: str
    """Strategy with which the job must recover."""
    keeps_layout: bool = True
    """Whether the job continues with as many ranks as before."""

    @property
    def kill(self) -> str:
        """Return the override that kills the rank in the first generation."""
        call = f'kill(rank={self.rank},generation=0,at_iteration={KILLED_AT},phase=\\"{self.phase}\\")'
        return f'testing.failpoints=["{call}"]'


DEFAULT = Job(
    name="default",
    overrides=("checkpoint.save_interval_iterations=2", "recovery=checkpoint"),
    rank=0,
    phase="backward",
    recovery="checkpoint",
)
JOBS = (
    DEFAULT,
    Job(
        name="pp2-ep2-windows",
        overrides=(
            *SMALL,
            "parallel=pp2_ep2",
            "launch.num_nodes=4",
            "training.global_batch_size=4",
            "snapshot=sparse_window",
            "snapshot.policy.min_window_iterations=2",
            "recovery=localized_replay",
            "nodes.restart_lost_nodes=true",
            "model.moe_shared_expert_intermediate_size=64",
        ),
        rank=2,
        phase="backward",
        recovery="localized_replay",
    ),
    Job(
        name="replicas",
        overrides=(
            *SMALL,
            "launch.num_nodes=4",
            "training.global_batch_size=8",
            "parallel.use_distributed_optimizer=false",
            "placement=overlap_search",
            "placement.num_slots_per_rank=6",
            "recovery.min_nodes=2",
            "model.moe_router_score_function=sigmoid",
            "model.moe_router_enable_expert_bias=true",
        ),
        rank=1,
        phase="update",
        recovery="living_state",
        keeps_layout=False,
    ),
    Job(
        name="tp2-windows",
        overrides=(
            *SMALL,
            "precision=bf16",
            "parallel.tensor_model_parallel_size=2",
            "launch.num_nodes=2",
            "training.global_batch_size=4",
            "snapshot=sparse_window",
            "snapshot.policy.min_window_iterations=2",
            "snapshot.num_peer_copies=1",
            "recovery=rollback",
            "model.hidden_dropout=0.1",
            "model.moe_z_loss_coeff=1e-3",
            "model.moe_router_load_balancing_type=seq_aux_loss",
        ),
        rank=1,
        phase="forward",
        recovery="rollback",
    ),
)


@dataclass(slots=True)
class Bench:
    """Runs jobs in environments of several releases, and counts what was compared."""

    folder: Path
    pythons: Mapping[str, Path]
    """Interpreter of each release."""
    sockets: Mapping[str, str]
    """Fork server of each release, which has imported Megatron."""
    problems: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_recovered: int = 0

    def run(self, release: str, name: str, overrides: Sequence[str]) -> JobResult:
        """Run a job with ``release``. Its folder is ``RELEASE/NAME``."""
        here = (f"run.name={name}", f"data.cache_dir={self.folder / 'cache'}")
        runs, python = self.folder / release, self.pythons[release]
        server = self.sockets[release]
        run = run_job([*overrides, *here], runs=runs, timeout_seconds=TIMEOUT_SECONDS, python=python, forkserver=server)
        used = {event["versions"]["megatron-core"] for event in run.records() if event["kind"] == "run_started"}
        if run.exit_code or used != {release}:
            self.problems.append(f"{release} {name}: exit code {run.exit_code}, {used}: {run.output[-1500:]}")
        print(f"{release} {name}: {len(run.losses)} iterations", flush=True)
        return run

    def compare(self, label: str, run: JobResult, reference: JobResult) -> None:
        """Compare all that ``run`` recorded with ``reference``, in every bit."""
        theirs = dict(recorded(reference))
        found = recorded(run)
        missing = {("loss", number) for number in range(1, NUM_ITERATIONS + 1)} - {key for key, _ in found}
        self.num_compared += len(found)
        self.problems += [f"{label}: {key} was not recorded" for key in sorted(missing)]
        self.problems += [
            f"{label}: {key}: {value} != {theirs.get(key)}" for key, value in found if theirs.get(key) != value
        ]

    def resume(self, release: str, stopped: JobResult) -> JobResult:
        """Resume a copy of the run of another release with ``release``."""
        run_dir = self.folder / release / stopped.run_dir.name
        shutil.copytree(stopped.run_dir, run_dir)
        # ``run`` checks the release of every start, so the copy has no record of the start of the other release.
        events = [line for line in (run_dir / "events.jsonl").read_text().splitlines(True) if "run_started" not in line]
        (run_dir / "events.jsonl").write_text("".join(events))
        return self.run(release, run_dir.name, ["run.resume=must"])

    def killed(self, release: str, job: Job) -> JobResult:
        """Run ``job`` and kill a rank in it. The records must show the kill and the recovery."""
        run = self.run(release, f"{job.name}-{job.phase}", [*COMMON, *job.overrides, job.kill])
        hits = [hit for hit in run.records("failpoints.jsonl") if hit["action"] == "kill" and hit["rank"] == job.rank]
        recovered = [event["strategy"] for event in run.records() if event["kind"] == "recovery_started"]
        if len(hits) == 1 and recovered == [job.recovery]:
            self.num_recovered += 1
        else:
            self.problems.append(f"{release} {job.name}: {len(hits)} kills, recovered by {recovered}")
        return run


PACKAGES = ("megatron-core", "torch", "numpy")
_PRINT_VERSIONS = """
import importlib.metadata, json, platform, sys
print(json.dumps([*map(importlib.metadata.version, sys.argv[1:]), platform.python_version()]))
"""


def recorded(run: JobResult) -> list[tuple[tuple[str, int], Any]]:
    """Return all values to be compared, each with (name, iteration). A repeated iteration has several values."""
    found: list[tuple[tuple[str, int], Any]] = []
    for record in run.records("metrics.jsonl"):
        found += [((name, record["iteration"]), record[name]) for name in VALUES if "loss" in record and name in record]
    states = [event for event in run.records() if event["kind"] == "state_digest"]
    return found + [(("state", event["iteration"]), tuple(event["digests"])) for event in states]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs on all releases. The quick variant uses the installed release alone."""
    arguments = parse_arguments(__doc__, argv)
    if arguments.quick:
        installed = environment_of(Path(sys.executable))
        pythons = {installed["megatron-core"]: Path(sys.executable)}
        environments = {installed["megatron-core"]: installed}
    else:
        try:
            pythons, environments = open_environments(
                Path(os.environ.get(VARIABLE) or ROOT / ".cache/megatron-versions")
            )
        except ConfigError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    with tempfile.TemporaryDirectory(prefix="megatron-versions-") as folder, contextlib.ExitStack() as stack:
        sockets = {release: stack.enter_context(forkserver(WARM, python=path)) for release, path in pythons.items()}
        bench = Bench(Path(folder), pythons, sockets)
        if arguments.quick:
            _quick(bench)
        else:
            _full(bench)
    for problem in bench.problems:
        print(problem, file=sys.stderr)
    expected = len(pythons) * (1 if arguments.quick else len(JOBS))
    figure = (
        f"{bench.num_compared} values and states compared, {len(bench.problems)} problems; "
        f"{bench.num_recovered} of {expected} kills recovered"
    )
    return finish(
        arguments.out,
        ID,
        passed=not bench.problems and bench.num_recovered == expected,
        figure=figure,
        threshold=f"all equal (atol=0) on {', '.join(MEGATRON)}, every kill recovered",
        counts={
            "releases": len(pythons),
            "jobs": 1 if arguments.quick else len(JOBS),
            "compared": bench.num_compared,
            "recovered": bench.num_recovered,
            "problems": len(bench.problems),
        },
        details={"environments": environments, "problems": bench.problems[:50]},
    )


def _quick(bench: Bench) -> None:
    (release,) = bench.pythons
    reference = bench.run(release, DEFAULT.name, [*COMMON, *DEFAULT.overrides])
    bench.compare(f"{release} default", bench.killed(release, replace(DEFAULT, phase="update")), reference)


def _full(bench: Bench) -> None:
    first, *others = bench.pythons
    stop = f"training.exit_at_iteration={STOPPED_AT}"
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        # Runs wait for processes to start more than they compute, so several run at the same time.
        references = {job.name: pool.submit(bench.run, first, job.name, [*COMMON, *job.overrides]) for job in JOBS}
        stopped = pool.submit(bench.run, first, "resumed", [*COMMON, *DEFAULT.overrides, stop])
        killed = {
            (job.name, release): pool.submit(bench.killed, release, job) for job in JOBS for release in bench.pythons
        }
        resumed = {release: pool.submit(bench.resume, release, stopped.result()) for release in others}
    for job in JOBS:
        reference = references[job.name].result()
        own = killed[job.name, first].result()
        if job.keeps_layout:
            bench.compare(f"{first} {job.name}", own, reference)
        else:
            # Both are equal up to the loss. From then on, this run is the reference of the other releases.
            _compare_before_kill(bench, f"{first} {job.name}", own, reference)
            reference = own
        for release in others:
            bench.compare(f"{release} {job.name}", killed[job.name, release].result(), reference)
    for release, run in resumed.items():
        bench.compare(f"{release} resumed", run.result(), references[DEFAULT.name].result())


def _compare_before_kill(bench: Bench, label: str, run: JobResult, reference: JobResult) -> None:
    theirs, mine = dict(recorded(reference)), dict(recorded(run))
    before = [key for key in theirs if 0 < key[1] < KILLED_AT]
    bench.num_compared += len(before)
    bench.problems += [
        f"{label}: {key}: {mine.get(key)} != {theirs[key]}" for key in before if mine.get(key) != theirs[key]
    ]


def open_environments(folder: Path) -> tuple[dict[str, Path], dict[str, dict[str, str]]]:
    """Return the interpreters of all releases and the versions in their environments. Build those that are missing.

    Raises:
        ConfigError: an environment has another release of Megatron-Core, or another Python, torch or numpy than the
            others, or cannot be built.
    """
    pythons = {release: folder / release / "bin/python" for release in MEGATRON}
    for release, python in pythons.items():
        if not python.exists():
            _build(release, folder / release)
    environments = {release: environment_of(python) for release, python in pythons.items()}
    for release, versions in environments.items():
        if versions["megatron-core"] != release:
            found = versions["megatron-core"]
            raise ConfigError.of(VARIABLE, str(pythons[release]), f"has Megatron-Core {found}: must have {release}")
    others = {tuple(v for name, v in versions.items() if name != "megatron-core") for versions in environments.values()}
    if len(others) != 1:
        raise ConfigError.of(VARIABLE, str(folder), f"must have one Python, torch and numpy, not {sorted(others)}")
    return pythons, environments


def environment_of(python: Path) -> dict[str, str]:
    """Return the versions of Megatron-Core, torch, numpy and Python in the environment of an interpreter."""
    command = [str(python), "-c", _PRINT_VERSIONS, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(zip([*PACKAGES, "python"], json.loads(done.stdout), strict=True))


def _build(release: str, venv: Path) -> None:
    """Build the environment of a release with ``make``."""
    python = next((name for name in ("python3.12", "python3.13") if _works(name)), None)
    if python is None:
        raise ConfigError.of(
            VARIABLE, str(venv), "does not exist, and there is no python3.12 or python3.13 to build it"
        )
    other = [] if release == next(iter(MEGATRON)) else [f"MEGATRON={release}"]
    print(f"building {venv}", flush=True)
    subprocess.run(["make", "install", f"VENV={venv}", f"PYTHON={python}", *other], cwd=ROOT, check=True)


def _works(name: str) -> bool:
    if shutil.which(name) is None:
        return False
    return (
        subprocess.run([name, "-c", "import ensurepip"], capture_output=True, timeout=60, check=False).returncode == 0
    )


if __name__ == "__main__":
    sys.exit(main())
