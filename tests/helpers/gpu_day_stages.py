"""Stages that break in every way a stage can, and a command that runs them among those of a GPU day:

python -m tests.helpers.gpu_day_stages OUT
"""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tools import gpu_day
from tools.gpu import ranks, stages, suites
from tools.gpu.day import GPU_DAY, Day
from tools.gpu.stages import Stage

HERE = "tests.helpers.gpu_day_stages"
BROKEN = tuple(
    Stage(name=name, entry=f"{HERE}:{name}", seconds=seconds, about="is broken")
    for name, seconds in (
        ("raises", 60.0),
        ("reports", 60.0),
        ("dies", 60.0),
        ("exits", 60.0),
        ("hangs", 2.0),
        ("leaves", 60.0),
        ("skips", 60.0),
    )
)
ABSENT = Stage(name="absent", entry="tools.gpu.no_such_module:run", seconds=60.0, about="is not there")


def raises(day: Day) -> None:
    """Report a figure, then raise an exception."""
    day.record(found=1)
    raise ValueError("broken on purpose")


def reports(day: Day) -> None:
    """Report a problem, and then a figure."""
    day.check(False, "a wrong number")
    day.record(after=2)


def dies(day: Day) -> None:
    """Die like a process that accessed invalid memory."""
    day.record(before=3)
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(day: Day) -> None:
    """End the process with an exit code."""
    os._exit(7)


def hangs(day: Day) -> None:
    """Never return, and never let a child process return."""
    day.record(child=subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    signal.pause()


def leaves(day: Day) -> None:
    """Return, and leave a child process behind."""
    day.record(child=subprocess.Popen(["sleep", "600"], start_new_session=True).pid)


def skips(day: Day) -> None:
    """Run a GPU test that skips itself, as if the machine had a GPU."""
    os.environ[GPU_DAY] = "1"
    suites.run_tests(day, ("tests/gpu/test_pace.py",))


def wait_or_raise(place: ranks.Place, pipe: Connection) -> None:
    """Act as rank 1, which raises an exception, or as rank 0, which waits for it."""
    if place.rank == 1:
        raise ValueError("broken on purpose")
    signal.pause()


def main(out: Path) -> int:
    """Run both calls. Return 0 if only the first call, which contains the broken stages, has failed."""
    results = out / "results"
    whole = [gpu_day.main([call, "--out", str(out), "--results", str(results)]) for call in ("nccl", "first")]
    stages.CALLS = {"first": (*BROKEN, ABSENT)}
    broken = gpu_day.main(["first", "--out", str(out / "broken"), "--results", str(results)])
    return 0 if (whole, broken) == ([0, 0], 1) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
