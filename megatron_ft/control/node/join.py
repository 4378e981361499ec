"""A node that comes by itself: ``python -m megatron_ft.control.node.join RUN_DIR --node N --job ARRAY_JOB_ID``.

It waits until a console has published how nodes join (``join_file``), its controller answers and the node's number is
free: it takes the place of no process that lives. Then it starts ``node_main``, with the specification on standard
input: that pipe is the node's lifeline, so that the node ends with this process, however it ends. The token is in no
command line and no environment. When the node's process ends before the job is over, it goes on in the same way: with
the same console, as often as that lets lost nodes come back, or with the next one, which has another token. When the
job's marker says that it is over, it exits with 0.
"""

import argparse
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.control.certificates import read_certificates
from megatron_ft.control.launchers.processes import Processes, kill, tell
from megatron_ft.control.node import join_file
from megatron_ft.control.node.join_file import JoinFile
from megatron_ft.control.node.main import NodeSpec
from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.control.slurm.attempts import read_end
from megatron_ft.errors import EXIT_OK, ControlError, MegatronFtError

_LOOK_SECONDS = 1.0
"""Between two looks at what is published, and whether the job is over."""
_ANSWER_SECONDS = 5.0
_HEAR_SECONDS = 5.0
"""Time that a node has to hear from its controller that the job is over; then its lifeline is cut."""
_END_SECONDS = 30.0
"""Time that it has to end after that, its services too; then it is killed."""
_PROCESS_IDS = 2**53
"""Processes of a node are told apart by a random number below it: those of other machines can have the same id."""

_Process = subprocess.Popen[bytes]


@dataclass
class _Node:
    """One number of the job, on this machine."""

    run_dir: Path
    number: int
    job_id: str
    patience_seconds: float
    _stays: dict[str, int] = field(default_factory=dict)
    """Token of each console that it has joined, and how often."""
    _told_to_end: set[str] = field(default_factory=set)
    """Tokens of consoles whose job has ended for this node; what they say is over."""
    _complaint: str = ""
    """What was said last of files that cannot be read."""

    def run(self) -> int:
        """Be the node until the job is over; the process's exit code.

        Raises:
            ControlError: nobody publishes in time, what is published is damaged, or the node may not come back.
        """
        while (found := self._await_console()) is not None:
            self._count_stay(found)
            log_dir = Path(str(found.agent["log_dir"]))
            processes = Processes(Path(), log_dir)  # the node's own process makes the folder for its sockets
            if self._stay(found, processes) == EXIT_OK:
                self._told_to_end.add(found.token)
        return EXIT_OK

    def _await_console(self) -> JoinFile | None:
        """A console that this node can join; None when the job is over."""
        deadline = time.monotonic() + self.patience_seconds
        while not self._is_over():
            found = join_file.read(self.run_dir)
            if found is not None and self._can_join(found):
                return found
            if time.monotonic() > deadline:
                raise ControlError(f"{self.run_dir}: no console for {self.patience_seconds:g} s (--patience-seconds)")
            threading.Event().wait(_LOOK_SECONDS)
        return None

    def _can_join(self, found: JoinFile) -> bool:
        """Whether it is this job's, lives, and has no process of this number that it takes for alive."""
        if found.job_id != self.job_id or found.token in self._told_to_end:
            return False
        present = _nodes_of(found)
        return present is not None and self.number not in present

    def _is_over(self) -> bool:
        return read_end(self.run_dir, self.job_id) is not None

    def _count_stay(self, found: JoinFile) -> None:
        num_stays = self._stays[found.token] = self._stays.get(found.token, 0) + 1
        if num_stays > 1 + found.num_returns:
            limit = f"came back {found.num_returns} times" if found.num_returns else "was lost"
            keys = "launch.restart_lost_nodes, launch.max_node_restarts"
            raise ControlError(f"node {self.number} {limit} and does not come back to this job ({keys})")

    def _stay(self, found: JoinFile, processes: Processes) -> int:
        """Be a node of the job as long as its process lives; its exit code."""
        spec = NodeSpec(agent=found.spec_of(self.number, secrets.randbelow(_PROCESS_IDS)), preload=found.preload)
        process: _Process = processes.start("megatron_ft.control.node.main", [], f"node-{self.number:03d}.log", {})
        try:
            tell(process, spec.to_line())
            return self._await_end(process, found)
        finally:
            kill(process)

    def _await_end(self, process: _Process, found: JoinFile) -> int:
        """Until the node's process has ended. That its console has died it may hear late, that the job is over never:
        it is told here."""
        while (news := self._look(found)) is None:
            if (code := _wait(process, _LOOK_SECONDS)) is not None:
                return code
        code = _wait(process, _HEAR_SECONDS) if news == "over" else None
        if code is None:
            assert process.stdin is not None, "started with a lifeline"
            process.stdin.close()
            code = _wait(process, _END_SECONDS)
        return ControlError.exit_code if code is None else code

    def _look(self, found: JoinFile) -> str | None:
        """``over`` or ``followed``: another console of the job has published since, and there is one at a time.

        A node that has its console needs no file: what cannot be read is said, and ends nothing.
        """
        try:
            if self._is_over():
                return "over"
            newest = join_file.read(self.run_dir)
        except (ControlError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                print(f"node {self.number}: stays with its console: {error}", file=sys.stderr, flush=True)
            return None
        is_other = newest is not None and newest.token != found.token and newest.job_id == self.job_id
        return "followed" if is_other else None


def _wait(process: _Process, seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _nodes_of(found: JoinFile) -> set[int] | None:
    """The nodes whose processes live, as their controller has it; None where none answers: a console that died leaves
    behind what it has published.

    Raises:
        ConfigError: the certificates cannot be read here.
    """
    certificates = read_certificates(found.tls_dir)
    client = RpcClient(found.address, "Controller", token=found.token, certificates=certificates)
    try:
        status = client.call("status", {}, timeout_seconds=_ANSWER_SECONDS, wait_for_peer=True)
    except RpcError:  # it is gone, or another job's controller has its address
        return None
    finally:
        client.close()
    return {int(node) for node in status["nodes"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path, help="the run's folder: run.dir/run.name")
    parser.add_argument("--node", type=int, required=True, help="its number, from 0")
    parser.add_argument("--job", required=True, help="id of the Slurm array")
    parser.add_argument("--patience-seconds", type=float, default=1800.0, help="longest wait for a console")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _Node(chosen.run_dir, chosen.node, chosen.job, chosen.patience_seconds).run()
    except (MegatronFtError, OSError) as error:
        print(f"node {chosen.node}: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, MegatronFtError) else ControlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
