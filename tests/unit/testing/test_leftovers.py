"""Tests that a mark finds processes at any depth, including orphans."""

import subprocess
import sys

from megatron_ft.testing import leftovers

ORPHAN_MAKER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"


def test_an_orphan_is_found_and_ended() -> None:
    value, environment = leftovers.mark()
    subprocess.run([sys.executable, "-c", ORPHAN_MAKER], env=environment, check=True)
    (line,) = leftovers.outlive(value, grace_seconds=0.2)
    assert "signal.pause()" in line
    assert leftovers.marked(value) == []


def test_marks_nest() -> None:
    outer, environment = leftovers.mark({})
    inner, environment = leftovers.mark(environment)
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env=environment)
    try:
        assert [found.pid for found in leftovers.marked(outer)] == [process.pid]
        assert [found.pid for found in leftovers.marked(inner)] == [process.pid]
    finally:
        process.kill()
        process.wait()
