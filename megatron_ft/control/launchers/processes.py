"""Processes that the launcher starts: each has a session of its own, and ends when its standard input closes."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_ft


@dataclass
class Processes:
    """Starts processes of a job on this machine, and holds what they share."""

    runtime_dir: Path
    log_dir: Path

    @property
    def forkserver_socket(self) -> Path:
        """Socket of the job's own fork server."""
        return self.runtime_dir / "forkserver.sock"

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        log: str,
        environment: Mapping[str, str],
        *,
        descriptors: Sequence[int] = (),
        through: Sequence[str] = (),
    ) -> Any:
        """Start ``python -m module`` in a session of its own; its standard input is its lifeline.

        Args:
            descriptors: further ones that it inherits.
            through: a command that runs it, ``srun`` for example.
        """
        with (self.log_dir / log).open("ab") as output:
            return subprocess.Popen(
                [*through, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=_environment(environment),
                # Ctrl-C in the terminal reaches the launcher alone, and ``killpg`` reaches all that the process starts.
                start_new_session=True,
                pass_fds=descriptors,
            )


def tell(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    """Write a spec to the standard input of a process that was just started."""
    assert process.stdin is not None, "started with a lifeline"
    with contextlib.suppress(BrokenPipeError):  # it has died, which its watcher reports
        process.stdin.write(line)
        process.stdin.flush()


def kill(process: "subprocess.Popen[bytes]", *, term_seconds: float = 0.0) -> None:
    """End a process and what it started, unless it has ended.

    Args:
        term_seconds: time that it has after SIGTERM before it is killed; 0 kills it at once.
    """
    if term_seconds > 0 and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=term_seconds)
    # Not reaped yet, so the number still names this group.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        # Closing writes what is left in the buffer.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with this project importable."""
    root = str(Path(megatron_ft.__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, **extra, "PYTHONPATH": path}
