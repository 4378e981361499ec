"""Stage ``sanitizer``: runs a dispatch with every kernel under compute-sanitizer."""

import shutil
import subprocess
import sys

from tools.gpu.day import Day
from tools.gpu.dispatch_once import dispatch
from tools.gpu.runner import ROOT

PROGRAM = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck")
_FOUND = 99


def run(day: Day) -> None:
    """Run every check; without a GPU, the dispatch alone."""
    if not day.has_gpu:
        day.check(
            dispatch("reference", "cpu"), "the dispatch under the sanitizer gives other results than the reference"
        )
    for check in CHECKS:
        if not day.has_gpu or shutil.which(PROGRAM) is None:
            day.lacks(check, f"needs a GPU and {PROGRAM}")
        else:
            with day.part(check):
                _run(day, check)


def _run(day: Day, check: str) -> None:
    command = [PROGRAM, "--tool", check, "--error-exitcode", str(_FOUND)]
    command += [sys.executable, "-m", "tools.gpu.dispatch_once", "cuda"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, day.remaining_seconds - 2), check=False
    )
    print(done.stdout[-4000:], done.stderr[-4000:])
    day.record(**{check: done.returncode})
    day.check(done.returncode != _FOUND, f"{check} found errors: {done.stdout[-300:]}")
    day.check(done.returncode in (0, _FOUND), f"{check}: exit code {done.returncode}: {done.stdout[-300:]}")
