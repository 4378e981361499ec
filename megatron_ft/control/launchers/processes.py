"""Processes that the launcher starts. Each runs in a separate session and ends when its standard input closes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_ft


@dataclass
class Processes:
    """Starts processes of a job on this machine, each with a log file in ``log_dir``."""

    runtime_dir: Path
    log_dir: Path

    @property
    def forkserver_socket(self) -> Path:
        """Path of the socket of the job's own fork server."""
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
        """Start ``python -m module`` in a separate session; the process ends when its standard input closes.

        Args:
            descriptors: further descriptors that the process inherits.
            through: command before ``python``, for example an ``srun`` command that runs Python on a node.
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
    """Write a spec (settings) to the standard input of a process that was just started."""
    assert process.stdin is not None, "the process was started without a pipe"
    with contextlib.suppress(BrokenPipeError):  # it has died, which its watcher reports
        process.stdin.write(line)
        process.stdin.flush()


def kill(*processes: "subprocess.Popen[bytes]", term_seconds: float = 0.0) -> None:
    """End all ``processes`` at the same time. If a process has to be killed, kill its process group.

    Args:
        term_seconds: time between SIGTERM and SIGKILL; 0 kills at once.
    """
    if term_seconds > 0:
        for process in processes:
            process.terminate()  # no effect on a process that has ended
        deadline = time.monotonic() + term_seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
    # The processes in ``left`` have not been reaped, so their process ids still name their process groups.
    left = [process for process in processes if process.poll() is None]
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in left:
        process.wait()
    for process in processes:
        if process.stdin is not None:
            # Closing can fail, because it writes the rest of the buffer.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(megatron_ft.__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, **extra, "PYTHONPATH": path}
