"""What operators ask of a running job: its status, and that a node leaves or joins.

A job that runs keeps ``controller.json`` in its folder, of mode 0600: address and token of its controller.
"""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megatron_ft.control.certificates import read_certificates
from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.control.secret_file import read_private
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.strict_json import parse_json

CONTROLLER_FILE = "controller.json"
CALL_SECONDS = 10.0
"""Longest wait for an answer; a controller on a busy machine may take a connection late."""


class JobNotRunning(ControlError):
    """No job runs in the folder, or none that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerAddress:
    """Where a job's controller listens, and what it wants to see."""

    address: str
    token: str
    epoch: int
    """Rises with each controller of the job."""
    tls_dir: str | None = None
    """As ``launch.tls_dir``."""


def read_address(run_dir: Path) -> ControllerAddress:
    """The address in a run's folder.

    Raises:
        JobNotRunning: there is none.
        ControlError: others than its owner can read or write it, it belongs to somebody else, or is damaged.
    """
    path = run_dir / CONTROLLER_FILE
    try:
        content = read_private(path)
    except FileNotFoundError:
        missing = "there is no such folder" if not run_dir.is_dir() else f"it has no {CONTROLLER_FILE}"
        raise JobNotRunning(f"run_dir={run_dir}: no job runs there: {missing}") from None
    return _parse(path, content)


def _parse(path: Path, content: bytes) -> ControllerAddress:
    try:
        values = parse_json(content)
        found = ControllerAddress(
            address=values["address"], token=values["token"], epoch=values["epoch"], tls_dir=values.get("tls_dir")
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ControlError(f"{path}: damaged: {error!r}") from None
    texts_fit = all(isinstance(text, str) and text for text in (found.address, found.token))
    texts_fit = texts_fit and isinstance(found.tls_dir, str | None)
    if not texts_fit or type(found.epoch) is not int:
        raise ControlError(f"{path}: damaged: must hold address and token as text, epoch as a number")
    return found


class Operator:
    """Calls a running job's controller. A context manager: the connection is closed at its end.

    Raises:
        ControlError: as ``read_address``.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        found = read_address(run_dir)
        certificates = read_certificates(found.tls_dir)
        self._client = RpcClient(found.address, "Controller", token=found.token, certificates=certificates)

    def __enter__(self) -> "Operator":
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
            JobNotRunning: nobody answers.
            ControlError: the controller says no; with its reason.
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
