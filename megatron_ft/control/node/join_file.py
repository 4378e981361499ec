"""What a console publishes for nodes that come by themselves (``launch.node_launcher=none``).

``<run>/control/join.json``, mode 0600, holds all that a node needs to join and does not know itself, with the job's
token. It is there from the moment that the controller is started until the job has ended; one whose console has died is
left behind, so that a node asks before it believes it.
"""

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from megatron_ft.control.controller.main import FOLDER
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.secret_file import read_private, write_private
from megatron_ft.errors import ControlError
from megatron_ft.strict_json import parse_json

_FILE = "join.json"
_OWN = ("node", "runtime_dir", "forkserver_socket", "process_id", "store")
"""Fields of ``AgentSpec`` that each node fills in."""


@dataclass(frozen=True, kw_only=True)
class JoinFile:
    """What every node of a job is told alike."""

    agent: dict[str, Any]
    """Fields of ``AgentSpec``, without those that are a node's own."""
    preload: list[str]
    """Modules that fork servers import."""
    job_id: str
    """Of the scheduler: nodes of another job have no business here."""
    num_nodes: int
    """Nodes that there can be: they are numbered from 0 to below it."""
    num_returns: int
    """Times that a node may come back to this job after it was lost."""

    @staticmethod
    def of(spec: AgentSpec, *, preload: list[str], job_id: str, num_nodes: int, num_returns: int) -> "JoinFile":
        """What any node is told, out of what one is."""
        shared = {name: value for name, value in asdict(spec).items() if name not in _OWN}
        return JoinFile(agent=shared, preload=preload, job_id=job_id, num_nodes=num_nodes, num_returns=num_returns)

    @property
    def address(self) -> str:
        """Of the controller."""
        return str(self.agent["controller_address"])

    @property
    def token(self) -> str:
        """Of the job: each console makes a new one."""
        return str(self.agent["token"])

    @property
    def tls_dir(self) -> str | None:
        """As ``launch.tls_dir``."""
        found: str | None = self.agent["tls_dir"]
        return found

    def spec_of(self, node: int, process_id: int) -> AgentSpec:
        """What a node is told that has this number.

        Raises:
            ControlError: the job has no such node.
        """
        if not 0 <= node < self.num_nodes:
            raise ControlError(f"node {node}: the job has nodes 0 to {self.num_nodes - 1}")
        return AgentSpec(**self.agent, node=node, runtime_dir="", forkserver_socket="", process_id=process_id)


def publish(run_dir: Path, content: JoinFile) -> None:
    """Let nodes join the job of a run; in the place of an earlier job's file."""
    _path(run_dir).parent.mkdir(mode=0o700, exist_ok=True)
    write_private(_path(run_dir), json.dumps(asdict(content)).encode() + b"\n")


def withdraw(run_dir: Path) -> None:
    """The job has ended."""
    _path(run_dir).unlink(missing_ok=True)


def read(run_dir: Path) -> JoinFile | None:
    """What the newest console of a run has published; None where there is nothing.

    Raises:
        ControlError: the file is open to others, somebody else's, too large, or does not hold what it must.
    """
    path = _path(run_dir)
    try:
        content = read_private(path)
    except FileNotFoundError:
        return None
    try:
        values = parse_json(content)
    except ValueError as error:
        raise ControlError(f"{path}: damaged: {error}") from None
    wrong = _wrong(values, JoinFile) or _wrong(values["agent"], AgentSpec, without=_OWN)
    if wrong is not None:
        raise ControlError(f"{path}: damaged: {wrong}")
    return JoinFile(**values)


def _wrong(values: object, kind: type, *, without: tuple[str, ...] = ()) -> str | None:
    """What is wrong with the fields of a dataclass; None where nothing is."""
    if not isinstance(values, dict):
        return f"a JSON {type(values).__name__} where {kind.__name__} is to be"
    hints = get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)} - set(without)
    if values.keys() != names:
        return f"{kind.__name__} has the fields {sorted(names)}, not {sorted(map(str, values))}"
    return next((f"{name}={values[name]!r}" for name in sorted(names) if not _fits(values[name], hints[name])), None)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of JSON is of the type of a field."""
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, str):
        return type(value) is hint
    if hint == str | None:
        return value is None or isinstance(value, str)
    if hint == list[str]:
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    assert getattr(hint, "__origin__", None) is dict, f"no rule for {hint}"
    return isinstance(value, dict) and (hint != dict[str, str] or all(isinstance(v, str) for v in value.values()))


def _path(run_dir: Path) -> Path:
    return run_dir / FOLDER / _FILE
