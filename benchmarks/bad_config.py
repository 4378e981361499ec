"""Claim ``bad-config``: wrong configurations and damaged files are refused before any rank starts.

Most cases call the entry point in this process, with a launcher that only records whether a job would start. The other
cases, and the CPU time in the figure, come from separate processes.
"""

import contextlib
import io
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pretrain_moe
from benchmarks.bad_inputs import LAYOUT, SYNTAX, VALUES, Case, file_cases
from benchmarks.bad_placements import PLACEMENT, placement_file_cases
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.testing.jobs import inside
from tools import preprocess_data

ID = "bad-config"
MIN_CASES = 40
HEAVY = ("torch", "megatron", "wandb")
LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
MAX_CPU_SECONDS = 1.0
"""Limit of the median CPU time of the processes. CPU seconds hardly depend on other work on the machine; the wall-clock
time is reported too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of one case: its exit code, its messages and its side effects."""

    exit_code: int
    stdout: str
    stderr: str
    started: bool
    heavy: tuple[str, ...]
    """Modules that were imported although they must not be."""

    def problems(self, case: Case) -> list[str]:
        """Return everything that violates the claim; empty if the case was refused as expected."""
        lines = self.stderr.splitlines()
        checks = [
            (self.exit_code == case.exit_code, f"the exit code is {self.exit_code} instead of {case.exit_code}"),
            (len(_messages(lines)) == 1, f"{len(_messages(lines))} messages: {self.stderr[-300:]!r}"),
            (self.stdout == "", f"stdout {self.stdout[:100]!r}"),
            (not self.started, "ranks were started"),
            (not self.heavy, f"imported {', '.join(self.heavy)}"),
            *(
                (text in self.stderr, f"the message does not mention {text!r}: {self.stderr[-300:]!r}")
                for text in case.says
            ),
        ]
        return [f"{case.name}: {text}" for holds, text in checks if not holds]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases. The quick variant runs fewer of them in separate processes."""
    arguments = parse_arguments(__doc__, argv)
    with tempfile.TemporaryDirectory(prefix="bad-config-") as name, inside(Path(name)) as folder:
        cases = [*SYNTAX, *LAYOUT, *VALUES, *PLACEMENT, *file_cases(folder), *placement_file_cases(folder)]
        problems = [problem for case in cases for problem in in_process(case).problems(case)]
        alone = cases[:: len(cases) // (4 if arguments.quick else 12)]
        seconds, cpu_seconds = [], []
        for case in alone:
            before, cpu_before = time.monotonic(), _cpu_seconds_of_children()
            problems += in_subprocess(case).problems(case)
            seconds.append(time.monotonic() - before)
            cpu_seconds.append(_cpu_seconds_of_children() - cpu_before)
        problems += [f"left {path.name}" for path in folder.iterdir() if path.name in ("runs", "outputs", "multirun")]
    median, cpu_median = statistics.median(seconds), statistics.median(cpu_seconds)
    if cpu_median > MAX_CPU_SECONDS:
        problems.append(f"the median process took {cpu_median:.2f} CPU seconds")
    if len(cases) < MIN_CASES:
        problems.append(f"only {len(cases)} cases")
    for problem in problems:
        print(problem, file=sys.stderr)
    timing = f"median of {len(alone)} processes {cpu_median:.2f} CPU s ({median:.1f} s)"
    refused = len(cases) - len({problem.partition(":")[0] for problem in problems})
    return finish(
        arguments.out,
        ID,
        passed=not problems,
        figure=f"{refused} of {len(cases)} refused, {timing}",
        threshold=(
            f"all of at least {MIN_CASES}, in one message, exit code 2 or 3, without torch, "
            f"median <= {MAX_CPU_SECONDS:g} CPU s per process"
        ),
        counts={"cases": len(cases), "own_processes": len(alone), "problems": len(problems)},
        details={"problems": problems, "cases": [case.name.replace(str(folder), "<folder>") for case in cases]},
    )


def in_process(case: Case) -> Observed:
    """Run a case through the entry point in this process. No job starts, even if the entry point accepts the case."""
    out, err, started = io.StringIO(), io.StringIO(), mock.Mock(return_value=0)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    before = set(sys.modules)
    with (
        mock.patch.dict(os.environ, {**environment, **case.environment}, clear=True),
        mock.patch("megatron_ft.control.launcher.launch", started),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        exit_code = (preprocess_data if case.preprocess else pretrain_moe).main(list(case.overrides))
    imported = tuple(sorted(name for name in HEAVY if name in set(sys.modules) - before))
    return Observed(
        exit_code=exit_code, stdout=out.getvalue(), stderr=err.getvalue(), started=started.called, heavy=imported
    )


def in_subprocess(case: Case) -> Observed:
    """Run a case as the command that a user would type. The interpreter lists every import."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    script = ROOT / ("tools/preprocess_data.py" if case.preprocess else "pretrain_moe.py")
    command = [sys.executable, "-X", "importtime", str(script), *case.overrides]
    done = subprocess.run(
        command, env={**environment, **case.environment}, capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stderr.splitlines()
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    return Observed(
        exit_code=done.returncode,
        stdout=done.stdout,
        stderr="\n".join(line for line in lines if not line.startswith("import time:")),
        started=Path("runs").exists(),
        heavy=tuple(name for name in HEAVY if name in modules),
    )


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _messages(lines: Sequence[str]) -> list[str]:
    """Return the lines of stderr, without the note about a detected launcher."""
    return [line for line in lines if not line.startswith("this process is a rank of")]


if __name__ == "__main__":
    sys.exit(main())
