"""The process of a node on a separate machine: ``python -m megatron_ft.control.node.main``.

``srun`` or ``join`` starts it. The process reads a ``NodeSpec``, one line of JSON, from standard input. The node ends
when this input closes. ``srun`` closes the node's input when its own input closes. The process finds the values that
only this machine knows: an address on the route to the controller, free ports, a folder for sockets. It then starts a
fork server, and becomes the agent.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.control.launchers.processes import Processes, kill
from megatron_ft.control.node import agent
from megatron_ft.control.node.fork_server import SINGLE_THREAD_ENVIRONMENT
from megatron_ft.control.ports import StoreEndpoint
from megatron_ft.control.runtime_dir import make_runtime_dir
from megatron_ft.control.slurm import batch_host
from megatron_ft.control.slurm.nodes import own_address
from megatron_ft.errors import ControlError, MegatronFtError
from megatron_ft.framing import read_line
from megatron_ft.serde import decode, encode, parse_json

_FORKSERVER_SECONDS = 60.0
"""Longest wait until a fork server listens. It is long, because Python's files may have to be read from disk."""
_EXIT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """Specification that a node's process reads from standard input."""

    agent: agent.AgentSpec
    """Spec of the node's agent, without the values that only the node's machine knows."""
    preload: list[str]
    """Modules that the fork server imports."""
    batch_job: str | None = None
    """Id of the Slurm job that this node requeues if the launcher's machine, the batch host, dies; None: no requeue."""

    def to_line(self) -> bytes:
        """Encode this spec of a node as one line of JSON."""
        return json.dumps(encode(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "NodeSpec":
        """Decode a spec from a line that ``to_line`` has returned."""
        found: NodeSpec = decode(NodeSpec, parse_json(line))
        return found


def run(spec: NodeSpec) -> int:
    """Run the node. Return the process's exit code."""
    address = own_address(spec.agent.controller_address)
    with make_runtime_dir() as runtime_dir:
        processes = Processes(runtime_dir, Path(spec.agent.log_dir))
        path = processes.forkserver_socket
        log, arguments = f"forkserver-{spec.agent.node:03d}.log", ["--socket", str(path), "--preload", *spec.preload]
        forkserver = processes.start("megatron_ft.control.node.fork_server", arguments, log, SINGLE_THREAD_ENVIRONMENT)
        try:
            _await_socket(forkserver, path, processes.log_dir / log)
            here = {"runtime_dir": str(runtime_dir), "forkserver_socket": str(path), "interface": address}
            # Ports are chosen as late as possible: until a store binds them, another process can take them.
            store = StoreEndpoint.find(address)
            return agent.serve(dataclasses.replace(spec.agent, **here, store=store))
        finally:
            forkserver.stdin.close()
            _wait_or_kill(forkserver)


def _await_socket(forkserver: "subprocess.Popen[bytes]", path: Path, log: Path) -> None:
    deadline = time.monotonic() + _FORKSERVER_SECONDS
    while not path.is_socket():
        if forkserver.poll() is not None or time.monotonic() > deadline:
            raise ControlError(f"the fork server did not start; its log: {log}")
        threading.Event().wait(0.02)


def _wait_or_kill(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(timeout=_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"the fork server did not end within {_EXIT_SECONDS:g} s and was killed", file=sys.stderr, flush=True)
        kill(process)


def _watch_batch_host(spec: NodeSpec, job_id: str, reason: str) -> int:
    # Wait until it is known whether the launcher's machine is alive. Return the process's exit code. Messages go into
    # the node's log, because standard error goes to ``srun`` on the launcher's machine.
    lifeline_is_cut = threading.Event()
    threading.Thread(target=_await_end_of_input, args=(lifeline_is_cut,), daemon=True).start()
    with (Path(spec.agent.log_dir) / f"node-{spec.agent.node:03d}.log").open("a", buffering=1) as log:

        def log_line(text: str) -> None:
            log.write(f"node {spec.agent.node}: {text}\n")

        log_line(reason)
        try:
            batch_host.watch(job_id, lifeline_is_cut, report=log_line)
        except ControlError as error:
            log_line(str(error))
    return ControlError.exit_code


def _await_end_of_input(is_over: threading.Event) -> None:
    # Runs in a thread: the end of standard input shows that the launcher's machine lives and the launcher has ended.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    is_over.set()


def main() -> int:
    """Entry point of the node's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = read_line(sys.stdin.fileno())
    if not line.endswith(b"\n"):
        print("node: standard input was closed before the node's spec arrived", file=sys.stderr)
        return ControlError.exit_code
    spec = NodeSpec.from_line(line)
    try:
        return run(spec)
    except agent.ControllerSilent as error:
        if spec.batch_job is None:
            print(f"node: the ranks of this node were ended: {error}", file=sys.stderr, flush=True)
            return ControlError.exit_code
        return _watch_batch_host(spec, spec.batch_job, f"ranks were ended: {error}")
    except (MegatronFtError, OSError) as error:
        print(f"node: {error}", file=sys.stderr, flush=True)
        return ControlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
