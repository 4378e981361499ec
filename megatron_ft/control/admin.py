"""Client for administrators of a running job: its status, and requests that a node leaves or joins.

A job that runs keeps ``controller.json`` in its folder, of mode 0600: address and token of its controller.
"""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated

from megatron_ft.control.certificates import read_certificates
from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.control.secret_file import read_secret
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.serde import Length, decode
from megatron_ft.strict_json import parse_json

CONTROLLER_FILE = "controller.json"
CALL_SECONDS = 10.0
"""Longest wait for an answer; a controller on a busy machine may take a connection late."""


class JobNotRunning(ControlError):
    """No job runs in the folder, or none that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerAddress:
    """Address and credentials of a job's controller."""

    address: Annotated[str, Length(1, 1024)]
    token: Annotated[str, Length(1, 1024)]
    epoch: int
    """Rises with each controller of the job."""
    tls_dir: str | None = None
    """Value of ``launch.tls_dir``."""


def read_address(run_dir: Path) -> ControllerAddress:
    """The address in a run's folder.

    Raises:
        JobNotRunning: there is none.
        ControlError: others than its owner can read or write it, it belongs to another user, or is damaged.
    """
    path = run_dir / CONTROLLER_FILE
    try:
        content = read_secret(path)
    except FileNotFoundError:
        missing = "there is no such folder" if not run_dir.is_dir() else f"it has no {CONTROLLER_FILE}"
        raise JobNotRunning(f"run_dir={run_dir}: no job runs there: {missing}") from None
    return _parse(path, content)


def _parse(path: Path, content: bytes) -> ControllerAddress:
    try:
        values = parse_json(content)
        # A file of a later version may hold more.
        known = {name: value for name, value in values.items() if name in ControllerAddress.__dataclass_fields__}
        found: ControllerAddress = decode(ControllerAddress, known)
    except (ValueError, AttributeError) as error:
        raise ControlError(f"{path}: damaged: {error}") from None
    return found


class AdminClient:
    """Calls a running job's controller. A context manager: the connection is closed at its end.

    Raises:
        ControlError: as ``read_address``.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        found = read_address(run_dir)
        certificates = read_certificates(found.tls_dir)
        self._client = RpcClient(found.address, "Controller", token=found.token, certificates=certificates)

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def status(self) -> Message:
        """``generation, phase, members, waiting, lost, draining, nodes, num_reforms, epoch``."""
        return self._call("status", {})

    def drain(self, node: int) -> None:
        """Have ``node`` leave at the next iteration boundary."""
        self._call("drain", {"node": node})

    def add(self, node: int) -> None:
        """Have ``node`` started, so that it joins at an iteration boundary."""
        self._call("add", {"node": node})

    def _call(self, method: str, body: Message) -> Message:
        """Call the controller.

        Raises:
            JobNotRunning: no controller answers.
            ControlError: the controller refuses, with its reason.
        """
        try:
            return self._client.call(method, body, timeout_seconds=CALL_SECONDS, wait_for_peer=True)
        except RpcError as error:
            if error.refused:
                raise ControlError(f"{method}: refused: {error}") from None
            raise JobNotRunning(
                f"run_dir={self._run_dir}: the job's controller does not answer; "
                f"if no job runs there, its {CONTROLLER_FILE} was left behind ({error})"
            ) from None
