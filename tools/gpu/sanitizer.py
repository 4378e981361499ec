"""Stage ``sanitizer`` of ``tools/gpu_day.py``, a series of tests on a GPU: runs the kernels of dispatch and of FP8
updates under compute-sanitizer."""

import itertools
import shutil
import subprocess
import sys

from tools.gpu.day import Day
from tools.gpu.dispatch_once import dispatch
from tools.gpu.runner import ROOT

PROGRAM = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck")
PROGRAMS = {
    "dispatch": ("tools.gpu.dispatch_once", "cuda"),
    "update": (
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_fp8.py::test_the_kernel_writes_nothing_outside_its_range",
    ),
}
"""Programs that run under compute-sanitizer. Maps the name of each to its module and arguments (``python -m ...``)."""
_FOUND = 99


def run(day: Day) -> None:
    """Run each of ``PROGRAMS`` under each tool of compute-sanitizer. Without a GPU, run only a dispatch on the CPU."""
    if not day.has_gpu:
        day.check(dispatch("reference", "cpu"), "the results of the dispatch differ from those of the reference")
    for name, check in itertools.product(PROGRAMS, CHECKS):
        if not day.has_gpu or shutil.which(PROGRAM) is None:
            day.lacks(f"{check} of {name}", f"needs a GPU and {PROGRAM}")
        else:
            with day.part(f"{check} of {name}"):
                _run(day, name, check)


def _run(day: Day, name: str, check: str) -> None:
    command = [PROGRAM, "--tool", check, "--error-exitcode", str(_FOUND), sys.executable, "-m", *PROGRAMS[name]]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, day.remaining_seconds - 2), check=False
    )
    print(done.stdout[-4000:], done.stderr[-4000:])
    day.record(**{f"{check} of {name}": done.returncode})
    day.check(done.returncode != _FOUND, f"{check} of {name} found errors: {done.stdout[-300:]}")
    day.check(done.returncode in (0, _FOUND), f"{check} of {name}: exit code {done.returncode}: {done.stdout[-300:]}")
