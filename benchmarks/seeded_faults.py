"""Claim ``seeded-faults``: random faults in the code, one per subsystem, are each caught by the tests.

A subsystem is a few files of the package. A seed chooses one of them, weighted by its length, and a fault in it. The
fault is put into a copy of the repository. The tests of ``make test`` run on this copy until one fails; tests of the
same part of the package run first. A fault counts as caught if a test fails with the fault, fails again when it runs
alone, and passes without the fault.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.campaign import Outcome, Trial, run_campaign
from benchmarks.mutants import Mutant, choose
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT

ID = "seeded-faults"
SEED = 15
TESTS_SECONDS = 1800.0
SUBSYSTEMS: dict[str, tuple[str, ...]] = {
    "checks of the configuration": ("config/checks/*.py",),
    "configuration": ("config/*.py",),
    "tokens and documents": ("corpus/*.py",),
    "doctor": ("doctor/*.py",),
    "injected faults": ("failures/*.py", "failpoints.py"),
    "expert loads": ("expert_loads.py",),
    "records and durable files": ("records.py", "serde.py", "durable.py", "framing.py"),
    "commit vote": ("planning/iteration.py",),
    "token dispatch, planned": ("planning/dispatch.py", "planning/balanced_shares.py"),
    "token dispatch, executed": ("runtime/dispatch/re*.py", "runtime/dispatch/rows.py"),
    "replica counts and placement": ("planning/placement/al*.py", "planning/placement/m*_overlap.py"),
    "placement search": ("planning/placement/overlap_search.py", "planning/placement/copies.py"),
    "survival": ("planning/placement/survival.py",),
    "migration of experts": ("planning/placement/migration.py", "mcore/state/tensors.py"),
    "costs": ("planning/cost/*.py",),
    "commit point": ("planning/recovery/membership.py",),
    "strategies of recovery": (
        "planning/recovery/l*.py",
        "planning/recovery/r*.py",
        "planning/recovery/c*.py",
        "planning/recovery/facts.py",
    ),
    "snapshot policies": ("planning/snapshot/*.py",),
    "batches and pipelines": ("planning/pipeline.py", "planning/upstream_log.py"),
    "broken connections": ("runtime/transport/*.py",),
    "capture": ("snapshot/capture/*.py",),
    "snapshot server": ("snapshot/server/*.py",),
    "stored manifests": ("snapshot/window.py", "snapshot/storage/manifest.py", "snapshot/storage/files.py"),
    "stored windows and checkpoints": ("snapshot/storage/w*.py", "snapshot/storage/[bcr]*.py"),
    "upstream log": ("runtime/upstream_log/*.py",),
    "membership": ("control/membership/*.py",),
    "controller": ("control/controller/*.py",),
    "controller's server": ("control/rpc.py", "control/controller/se*.py"),
    "detector and reports": ("control/detector.py", "control/node/ranks.py", "control/report.py"),
    "agent and ranks": ("control/node/*.py",),
    "launch": ("control/launchers/*.py", "control/launcher.py", "control/rundir.py"),
    "Slurm": ("control/slurm/*.py",),
    "dense checkpoints": ("mcore/checkpoint/*.py",),
    "training iteration": ("mcore/training/engine.py", "mcore/training/trainer.py"),
    "reconfiguration": ("mcore/recovery/replicas.py", "mcore/state/*.py", "mcore/groups.py"),
    "localized recovery": ("mcore/recovery/localized.py", "mcore/recovery/upstream_log.py"),
    "replay": ("mcore/snapshot/*.py",),
    "mixture layers and the optimizer": ("mcore/moe/*.py", "mcore/optimizer/*.py"),
    "sinks and figures": ("telemetry/*.py", "telemetry/sinks/*.py"),
    "page of a run": ("telemetry/report/*.py",),
}
UNREACHED = ("cuda.py", "extension.py", "__init__.py", "__main__.py")
"""Names of files without a function, or whose code only runs on a GPU or when a compiler fails."""
QUICK = ("commit vote", "survival")


def main(argv: Sequence[str] | None = None) -> int:
    """Put one fault into each subsystem, and run the tests against it."""
    arguments = parse_arguments(__doc__, argv)
    names = QUICK if arguments.quick else tuple(SUBSYSTEMS)
    rows = [{"subsystem": name, "seed": SEED} for name in names]
    counts, outcomes = run_campaign(ID, rows, execute, script=Path(__file__), quick=arguments.quick)
    caught = sum(outcome.proven and outcome.passed for _, outcome in outcomes)
    return finish(
        arguments.out,
        ID,
        passed=counts.complete,
        figure=f"{caught} of {len(rows)} faults, one a subsystem, fail a test that passes without them",
        threshold="all of 40",
        counts={"faults": len(rows), "caught": caught, "resumed": counts.resumed},
        details={str(trial.parameters["subsystem"]): dict(outcome.details) for trial, outcome in outcomes},
    )


def execute(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
    """Run the tests against one fault after the other, in the same copy of the repository."""
    with tempfile.TemporaryDirectory(prefix="seeded-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for trial in trials:
            name, seed = str(trial.parameters["subsystem"]), int(str(trial.parameters["seed"]))
            path, mutant = fault_of(name, seed)
            yield trial, try_fault(tree, path, mutant)


def copy_tree(tree: Path) -> None:
    """Copy the files of the working tree that git knows. The Python environment is not copied."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def files_of(subsystem: str) -> list[Path]:
    """Return the files of a subsystem that can have a fault, in order."""
    found = {path for pattern in SUBSYSTEMS[subsystem] for path in (ROOT / "megatron_ft").glob(pattern)}
    return sorted(path for path in found if path.name not in UNREACHED)


def fault_of(subsystem: str, seed: int) -> tuple[Path, Mutant]:
    """Return the file, relative to the repository, and the fault that a seed chooses for a subsystem."""
    generator = random.Random(f"{subsystem} {seed}")
    files = files_of(subsystem)
    while files:
        path = generator.choices(files, weights=[path.stat().st_size for path in files])[0]
        mutant = choose(path.read_text(encoding="utf-8"), generator)
        if mutant is not None:
            return path.relative_to(ROOT), mutant
        files.remove(path)
    raise AssertionError(f"{subsystem}: no file of this subsystem contains a function")


def try_fault(tree: Path, path: Path, mutant: Mutant) -> Outcome:
    """Run tests against a fault until one fails that also fails alone and passes without the fault."""
    details = {"file": str(path), "fault": mutant.summary()}
    original = (tree / path).read_text(encoding="utf-8")

    def run(source: str, tests: Sequence[str]) -> list[str]:
        (tree / path).write_text(source, encoding="utf-8")
        try:
            return failures(tree, tests)
        finally:
            (tree / path).write_text(original, encoding="utf-8")

    num_failed = 0
    for selection in selections(tree, path):
        for test in run(mutant.source, selection):
            num_failed += 1
            # A test that fails only beside other tests proves nothing about the fault.
            if run(mutant.source, [test]) and not run(original, [test]):
                return Outcome(proven=True, passed=True, num_compared=1, details={**details, "caught_by": test})
    details |= {"caught_by": "nothing", "failed_for_another_reason": num_failed}
    return Outcome(proven=True, passed=False, num_compared=1, details=details)


def selections(tree: Path, path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the tests to run, in groups of which the first is most likely to fail: tests of the file, of its folder, of
    its part of the package, all tests."""
    below = path.relative_to("megatron_ft")
    mirror = Path("tests/unit") / below.parent
    own = sorted((tree / mirror).glob(f"test_{below.stem}*.py"))
    if own:
        yield tuple(str(test.relative_to(tree)) for test in own)
    while mirror != Path("tests/unit"):
        if (tree / mirror).is_dir():
            yield (str(mirror),)
        mirror = mirror.parent
    # Code that needs processes is first tested with jobs, other code first with tests of functions.
    functions, jobs = ("tests/contract", "tests/unit"), ("tests/distributed", "tests/slurm")
    yield from (jobs, functions) if below.parts[0] in ("control", "mcore") else (functions, jobs)
    yield ("tests/functional", "benchmarks/tests")


def failures(tree: Path, tests: Sequence[str]) -> list[str]:
    """Return at most three tests that fail or cannot be collected, as pytest names them. Several test files run in
    parallel."""
    command = [sys.executable, "-m", "pytest", "--maxfail=3", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider"]
    workers = [] if tests[0].endswith(".py") or "::" in tests[0] else ["-n", str((os.cpu_count() or 1) + 1)]
    command += [*workers, "-m", "not extended", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TESTS_SECONDS, check=False
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not lines and ended.returncode not in (0, 5):  # 5: a marker excludes every test of the selection
        return [*tests][:1]
    return list(dict.fromkeys(line.split(" ", 1)[1].split(" - ")[0] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
