"""Claim ``bad-input-early``: all errors of a command are reported in one list, before any process of the job starts.

All cases call the entry point in forked copies of this process, one for each core, which need not import it again. A
case ends before the entry point claims the run's folder. Some cases also run as real commands, in which a hook of the
interpreter records every process that the command starts.
"""

import contextlib
import gc
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing.pool import Pool
from pathlib import Path
from unittest import mock

import pretrain_moe
from benchmarks.bad_input_cases import CHECKPOINT, CONFIG, DATA, Case, all_cases
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.testing.jobs import inside

ID = "bad-input-early"
MIN_CASES = 220
MIN_COMMANDS = 25
LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MFT_")
HOOK = """
import json, os, sys
def record(event, arguments):
    if event == "subprocess.Popen" or event == "os.fork":
        words = [] if event == "os.fork" else [os.fsdecode(each) for each in arguments[1]]
        with open(os.environ["STARTED_FILE"], "a") as file:
            file.write(json.dumps(words) + "\\n")
sys.addaudithook(record)
"""
"""Code of ``sitecustomize.py``, which the interpreter runs at its start."""


class _WouldStart(Exception):
    """Raised where the entry point would claim the run's folder, which it does before it starts any process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observed effects of one command."""

    exit_code: int
    stderr: str
    claimed: bool
    """Whether the command took the name of a run, or tried to."""
    started: tuple[str, ...]
    """Processes of the job that were started."""

    @property
    def errors(self) -> list[str]:
        """Return the errors that the command printed."""
        return [line.removeprefix("error: ") for line in self.stderr.splitlines() if line.startswith("error: ")]

    def problems(self, case: Case) -> list[str]:
        """Return everything that violates the claim; empty if the case was refused as expected."""
        if "Traceback" in self.stderr:
            return [f"{case.name}: a traceback: {self.stderr[-300:]!r}"]
        if self.claimed or self.started:
            return [f"{case.name}: the run's name was taken, or processes were started: {self.started}"]
        found = []
        if self.exit_code != case.exit_code:
            found.append(f"exit code {self.exit_code} instead of {case.exit_code}")
        if len(self.errors) != len(case.errors):
            found.append(f"{len(self.errors)} errors instead of {len(case.errors)}: {self.stderr[-400:]!r}")
        for error, texts in zip(self.errors, case.errors, strict=False):
            found += [f"{text!r} is not in {error[:300]!r}" for text in texts if text not in error]
        return [f"{case.name}: {text}" for text in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases. The quick variant runs every sixth case."""
    arguments = parse_arguments(__doc__, argv)
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as name, inside(Path(name)) as folder:
        every = all_cases(folder)
        cases = every[::6] if arguments.quick else every
        before = _runs(folder)
        commands = cases[:: len(cases) // (6 if arguments.quick else MIN_COMMANDS)]
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        with copies_of_this_process() as copies, ThreadPoolExecutor(1) as pool:
            refusals = copies.imap(in_process, cases)
            typed = pool.map(lambda pair: as_command(pair[1], folder, pair[0]), enumerate(commands))
            problems = [
                problem
                for case, observed in chain(zip(cases, refusals, strict=True), zip(commands, typed, strict=True))
                for problem in reported(case, observed)
            ]
        sites = site_cases(folder)
        for words, text in sites[:2] if arguments.quick else sites:
            problems += site_problems(words, text)
        if _runs(folder) != before:
            problems.append(f"runs were created: {sorted(_runs(folder) - before)}")
    if len(every) < MIN_CASES:
        problems.append(f"only {len(every)} cases")
    num_wrong = len({problem.partition(": ")[0] for problem in problems})
    return finish(
        arguments.out,
        ID,
        passed=not problems,
        figure=(
            f"{len(cases) - num_wrong} of {len(cases)} refused before processes start, {len(commands)} of them also as "
            f"real commands; {len(sites)} commands with wrong site files"
        ),
        threshold=f"all of at least {MIN_CASES}, every error in one list, no traceback, names of runs stay free",
        counts={
            "cases": len(cases),
            "own_processes": len(commands),
            "site_files": len(sites),
            "problems": len(problems),
            **{f"kind_{kind.replace(' ', '_')}": count for kind, count in Counter(c.kind for c in cases).items()},
        },
        details={"problems": problems, "cases": [case.name for case in cases]},
    )


def copies_of_this_process() -> Pool:
    """Return a pool of forked processes, one for each core, in which the entry point has been imported and used."""
    in_process(Case(kind="none", words=("model.num_layers=0",), errors=()))
    gc.freeze()
    return multiprocessing.get_context("fork").Pool(os.cpu_count())


def reported(case: Case, observed: Observed) -> list[str]:
    """Return the problems of a case, and print the case with them to stderr."""
    problems = observed.problems(case)
    print("\n".join(problems) or f"refused: {case.name}", file=sys.stderr, flush=True)
    return problems


def in_process(case: Case) -> Observed:
    """Run a case through the entry point in this process, until the entry point would claim the run's folder."""
    err = io.StringIO()
    claim = mock.Mock(side_effect=_WouldStart)
    with (
        mock.patch.dict(os.environ, {**_environment(), **case.variables}, clear=True),
        mock.patch("megatron_ft.control.rundir.RunDir.claim", claim),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(err),
    ):
        try:
            exit_code = pretrain_moe.main(list(case.command))
        except _WouldStart:
            exit_code = 0
    return Observed(exit_code=exit_code, stderr=err.getvalue(), claimed=claim.called, started=())


def as_command(case: Case, folder: Path, number: int) -> Observed:
    """Run a case as the command that a user would type, with a record of the processes that it starts."""
    record, before = folder / "hook" / f"started-{number}", _runs(folder)
    variables = {**_environment(), **case.variables, "PYTHONPATH": str(folder / "hook"), "STARTED_FILE": str(record)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_moe.py"), *case.command],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = record.read_text().splitlines() if record.exists() else []
    started = [" ".join(json.loads(line)) for line in lines]
    return Observed(
        exit_code=done.returncode,
        stderr=done.stderr,
        claimed=_runs(folder) != before,
        started=tuple(words for words in started if "megatron_ft" in words or not words),
    )


def site_cases(folder: Path) -> list[tuple[tuple[str, ...], str]]:
    """Return command lines of ``slurm/submit.py`` with wrong site files or options, each with a text of the error."""

    def site(name: str, text: str) -> str:
        path = folder / f"{name}.env"
        path.write_text(text)
        return f"--site={path}"

    right = f"MFT_INTERFACE=lo\nMFT_PYTHON={sys.executable}\nMFT_RUNS=runs\nMFT_SBATCH=\n"
    counts = "MFT_RANKS_PER_NODE=2\nMFT_SPARE_NODES=0\n"
    good, nodes = site("good", right + counts), ("--dry-run", "--nodes=2")
    return [
        ((*nodes, f"--site={folder / 'gone.env'}"), "gone.env"),
        ((*nodes, site("broken", 'MFT_INTERFACE="lo\n')), "broken.env"),
        ((*nodes, site("nothing", "")), "MFT_INTERFACE: must name a network interface"),
        ((*nodes, site("ranks", f"{right}MFT_RANKS_PER_NODE=x\nMFT_SPARE_NODES=0\n")), "MFT_RANKS_PER_NODE=x"),
        ((*nodes, site("spares", f"{right}MFT_RANKS_PER_NODE=2\nMFT_SPARE_NODES=-1\n")), "MFT_SPARE_NODES=-1"),
        ((*nodes, good, "--queued=1"), "--queued: can only be used with --shape array"),
        ((*nodes, good, "--chain=0"), "--chain=0: must be at least 1"),
        ((*nodes, good, "model.num_layers=0"), "model.num_layers=0: must be at least 1"),
    ]


def site_problems(words: Sequence[str], text: str) -> list[str]:
    """Run ``slurm/submit.py``, which must print ``text``. Return everything that violates the claim."""
    command = [sys.executable, str(ROOT / "slurm" / "submit.py"), *words]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=120, check=False)
    checks = [
        (done.returncode == CONFIG, f"exit code {done.returncode}"),
        (text in done.stderr, f"{text!r} is not in {done.stderr[-300:]!r}"),
        ("Traceback" not in done.stderr, "a traceback"),
    ]
    return [f"submit.py {' '.join(words)}: {problem}" for holds, problem in checks if not holds]


def _environment() -> Mapping[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}


def _runs(folder: Path) -> set[str]:
    """Return the names of all runs below the working directory."""
    return {path.name for path in folder.glob("runs/*")}


assert {CONFIG, DATA, CHECKPOINT} == {2, 3, 5}, "the claim states these exit codes"

if __name__ == "__main__":
    sys.exit(main())
