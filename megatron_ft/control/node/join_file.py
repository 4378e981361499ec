"""The file that a launcher publishes for nodes that start by themselves (``launch.node_launcher=none``).

``<run>/control/join.json`` (mode 0600) contains everything that a node needs to join, including the job's token. The
file exists from the start of the controller until the job has ended. A launcher that dies leaves its file, so a node
calls the controller before it relies on the file.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ft.control.controller.main import FOLDER
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.secret_file import read_secret, write_secret
from megatron_ft.errors import ControlError
from megatron_ft.serde import decode, encode, parse_json

_FILE = "join.json"


@dataclass(frozen=True, kw_only=True)
class JoinFile:
    """Content of ``join.json``: what every node of a job needs to join."""

    agent: AgentSpec
    """Spec of the agent of node 0; ``spec_of`` makes the specs of other nodes from it."""
    preload: list[str]
    """Modules that the node's fork server imports before it forks ranks."""
    job_id: str
    """Id of the job in the scheduler; a node that runs in another job of the scheduler must not join."""
    num_nodes: int
    """Largest number of nodes of the job; node numbers begin at 0."""
    num_returns: int
    """Largest number of times that a node may return to this job after it was lost."""

    def spec_of(self, node: int, process_id: int) -> AgentSpec:
        """Make the spec of one node's agent, without the values that only the node's machine knows.

        Raises:
            ControlError: the job has no such node.
        """
        if not 0 <= node < self.num_nodes:
            raise ControlError(f"node {node}: must be from 0 to {self.num_nodes - 1}, the numbers of the job's nodes")
        return replace(self.agent, node=node, runtime_dir="", forkserver_socket="", process_id=process_id, store=None)

    @classmethod
    def read(cls, run_dir: Path) -> "JoinFile | None":
        """Read the ``join.json`` of a run's newest launcher. Return None if the file does not exist.

        Raises:
            ControlError: the file can be read by other users, belongs to another user, is too large, or damaged.
        """
        path = _path(run_dir)
        try:
            found: JoinFile = decode(JoinFile, parse_json(read_secret(path)))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ControlError(f"{path}: damaged: {error}") from None
        return found

    def publish(self, run_dir: Path) -> None:
        """Write this content to the ``join.json`` of a run. A file of an earlier job is replaced."""
        _path(run_dir).parent.mkdir(mode=0o700, exist_ok=True)
        write_secret(_path(run_dir), json.dumps(encode(self)).encode() + b"\n")

    @classmethod
    def withdraw(cls, run_dir: Path) -> None:
        """Remove the ``join.json`` of a run, because the job has ended."""
        _path(run_dir).unlink(missing_ok=True)


def _path(run_dir: Path) -> Path:
    return run_dir / FOLDER / _FILE
