"""The process of a node that no launcher starts: ``python -m megatron_ft.control.node.join RUN_DIR --node N --job
ARRAY_JOB_ID``.

This process waits until a launcher has published its file for nodes (``join_file``), the launcher's controller answers,
and no living process has the node's number. Then it starts the node (``node.main``), and writes the node's spec, which
contains the job's token, into a pipe: the node's standard input. When this process ends for any reason, the pipe closes
and the node ends. If the node ends before the job, this process starts it again. The launcher's file limits the number
of starts. Starts under a later launcher (another token) count separately. When the marker that the job has ended
exists, this process exits with 0.
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

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.launchers.processes import Processes, kill, tell
from megatron_ft.control.node import join_file
from megatron_ft.control.node.join_file import JoinFile
from megatron_ft.control.node.main import NodeSpec
from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.control.slurm.attempts import RunAttempts
from megatron_ft.errors import EXIT_OK, ControlError, MegatronFtError

_CHECK_SECONDS = 1.0
"""Time between two checks of the launcher's file and of the marker that the job has ended."""
_ANSWER_SECONDS = 5.0
_LAST_ORDER_SECONDS = 5.0
"""Time for a node to fetch the order ``End`` from its controller before the node's standard input is closed."""
_END_SECONDS = 30.0
"""Time between closing the node's standard input and killing the node, if it has not ended by then."""
_PROCESS_IDS = 2**53
"""Upper bound of the random numbers that identify node processes. Process ids are not unique across machines."""

_Process = subprocess.Popen[bytes]


@dataclass
class _Node:
    """Runs the node ``number`` of a job on this machine, and starts it again if it ends before the job."""

    run_dir: Path
    number: int
    job_id: str
    patience_seconds: float
    _stays: dict[str, int] = field(default_factory=dict)
    """Maps each launcher's token to the number of times that the node has joined the job of this launcher."""
    _ended: set[str] = field(default_factory=set)
    """Tokens of launchers whose job this node has finished. The node ignores a ``join.json`` with one of them."""
    _complaint: str = ""
    """Last printed error in reading ``join.json`` or the end marker. The same error is not printed twice in a row."""

    def run(self) -> int:
        """Run the node until the job is over. Return the process's exit code.

        Raises:
            ControlError: no launcher publishes its file in time, the file is damaged, or the node was lost too often.
        """
        while (found := self._await_launcher()) is not None:
            self._count_stay(found)
            log_dir = Path(found.agent.log_dir)
            processes = Processes(Path(), log_dir)  # the node's own process makes the folder for its sockets
            if self._stay(found, processes) == EXIT_OK:
                self._ended.add(found.agent.token)
        return EXIT_OK

    def _await_launcher(self) -> JoinFile | None:
        # Wait for a launcher that this node can join, and return its file. Return None when the job is over.
        deadline = time.monotonic() + self.patience_seconds
        while not self._is_over():
            found = join_file.JoinFile.read(self.run_dir)
            if found is not None and self._can_join(found):
                return found
            if time.monotonic() > deadline:
                raise ControlError(
                    f"{self.run_dir}: node {self.number} waited {self.patience_seconds:g} s (--patience-seconds) "
                    "and found no launcher whose job it can join"
                )
            threading.Event().wait(_CHECK_SECONDS)
        return None

    def _can_join(self, found: JoinFile) -> bool:
        if found.job_id != self.job_id or found.agent.token in self._ended:
            return False
        # Check first whether another process has this node's number, because a registration would replace that process.
        present = _nodes_of(found)
        return present is not None and self.number not in present

    def _is_over(self) -> bool:
        return RunAttempts(self.run_dir).read_end(self.job_id) is not None

    def _count_stay(self, found: JoinFile) -> None:
        num_stays = self._stays[found.agent.token] = self._stays.get(found.agent.token, 0) + 1
        if num_stays > 1 + found.num_returns:
            limit = f"has returned as often as allowed ({found.num_returns})" if found.num_returns else "was lost"
            keys = "see nodes.restart_lost_nodes and nodes.max_node_restarts"
            raise ControlError(f"node {self.number} {limit} and does not join this job again ({keys})")

    def _stay(self, found: JoinFile, processes: Processes) -> int:
        # Run a node of the job until its process ends; return the exit code.
        spec = NodeSpec(agent=found.spec_of(self.number, secrets.randbelow(_PROCESS_IDS)), preload=found.preload)
        process: _Process = processes.start("megatron_ft.control.node.main", [], f"node-{self.number:03d}.log", {})
        try:
            # The spec has the token. Other users could read it in an argument; children would inherit it in a variable.
            tell(process, spec.to_line())
            return self._await_end(process, found)
        finally:
            kill(process)

    def _await_end(self, process: _Process, found: JoinFile) -> int:
        # Wait until the node's process has ended. End the process when the launcher was replaced or the job is over: by
        # itself, the process may notice this late or never.
        while (news := self._check(found)) is None:
            if (code := _wait(process, _CHECK_SECONDS)) is not None:
                return code
        code = _wait(process, _LAST_ORDER_SECONDS) if news == "over" else None
        if code is None:
            assert process.stdin is not None, "the process was started without a pipe"
            process.stdin.close()
            code = _wait(process, _END_SECONDS)
        return ControlError.exit_code if code is None else code

    def _check(self, found: JoinFile) -> str | None:
        # Return ``over`` if the job is over, ``followed`` if a later launcher of the job has published its file,
        # otherwise None. A node that has joined does not need the file, so an error in reading it is only reported.
        try:
            if self._is_over():
                return "over"
            newest = join_file.JoinFile.read(self.run_dir)
        except (ControlError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                print(
                    f"node {self.number}: cannot find out whether the job has ended or has a new launcher, so the node "
                    f"stays with its present launcher: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            return None
        is_other = newest is not None and newest.agent.token != found.agent.token and newest.job_id == self.job_id
        return "followed" if is_other else None


def _wait(process: _Process, seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _nodes_of(found: JoinFile) -> set[int] | None:
    """Ask the controller at the address in ``found`` which nodes have a living agent, and return these nodes. Return
    None if the controller does not answer: ``found`` may be the file of a launcher that has died.

    Raises:
        ConfigError: the certificates cannot be read on this machine.
    """
    certificates = Certificates.read(found.agent.tls_dir)
    client = RpcClient(found.agent.controller_address, "Controller", token=found.agent.token, certificates=certificates)
    try:
        status = client.call("status", {}, timeout_seconds=_ANSWER_SECONDS, wait_for_peer=True)
    except RpcError:  # the controller is gone, or another job's controller has its address
        return None
    finally:
        client.close()
    return {int(node) for node in status["nodes"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until the job is over (the command of this module). Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path, help="the run's folder: run.dir/run.name")
    parser.add_argument("--node", type=int, required=True, help="number of this node, from 0")
    parser.add_argument("--job", required=True, help="id of the Slurm array")
    parser.add_argument("--patience-seconds", type=float, default=1800.0, help="longest wait for a launcher (seconds)")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _Node(chosen.run_dir, chosen.node, chosen.job, chosen.patience_seconds).run()
    except (MegatronFtError, OSError) as error:
        print(f"node {chosen.node}: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, MegatronFtError) else ControlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
