"""Client with which administrators read the status of a running job and let nodes leave or join.

The folder of a running job contains ``controller.json`` (mode 0600), with the address and token of its controller.
"""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.rpc import ACCEPT_SECONDS, RpcClient, RpcError
from megatron_ft.control.secret_file import read_secret
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.serde import Length, decode, parse_json

CONTROLLER_FILE = "controller.json"
STATUS_SECONDS = 10.0
"""Longest wait for the job's status. The wait is long because a busy controller accepts connections late."""
REQUEST_SECONDS = ACCEPT_SECONDS + 10.0
"""Longest wait for the answer to a request to add or drain a node. A busy controller accepts the connection late, and
then needs at most ``ACCEPT_SECONDS`` to answer."""


class JobNotRunning(ControlError):
    """Raised if the run's folder has no ``controller.json``, or if the controller of the job does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerAddress:
    """Address and credentials of a job's controller."""

    address: Annotated[str, Length(1, 1024)]
    token: Annotated[str, Length(1, 1024)]
    epoch: int
    """Number that identifies the controller in its job. A controller that replaces another one has a higher number."""
    tls_dir: str | None = None
    """Value of ``control.tls_dir``: folder of the certificates, or None if the connection is not encrypted."""

    @classmethod
    def read(cls, run_dir: Path) -> "ControllerAddress":
        """Read the controller's address from a run's folder.

        Raises:
            JobNotRunning: the run's folder has no ``controller.json``.
            ControlError: ``controller.json`` is damaged, belongs to another user, or is open to other users.
        """
        path = run_dir / CONTROLLER_FILE
        try:
            content = read_secret(path)
        except FileNotFoundError:
            missing = "there is no such folder" if not run_dir.is_dir() else f"the folder has no {CONTROLLER_FILE}"
            raise JobNotRunning(f"run_dir={run_dir}: no job runs there: {missing}") from None
        return _parse(path, content)


def _parse(path: Path, content: bytes) -> ControllerAddress:
    try:
        values = parse_json(content)
        # A later version of this package may write further fields.
        known = {name: value for name, value in values.items() if name in ControllerAddress.__dataclass_fields__}
        found: ControllerAddress = decode(ControllerAddress, known)
    except (ValueError, AttributeError) as error:
        raise ControlError(f"{path}: damaged: {error}") from None
    return found


class AdminClient:
    """Context manager that calls the controller of a running job. The end of the ``with`` block closes the connection.

    Raises:
        JobNotRunning: the run's folder has no ``controller.json``.
        ControlError: ``controller.json`` is damaged, belongs to another user, or is open to other users.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        found = ControllerAddress.read(run_dir)
        certificates = Certificates.read(found.tls_dir)
        self._client = RpcClient(found.address, "Controller", token=found.token, certificates=certificates)

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def status(self) -> Message:
        """Return the job's status: ``generation, phase, members, waiting, lost, draining, num_reforms, keeps_layout``
        (see ``State``), ``nodes`` (progress of each node), ``replacements`` (nodes that can replace a lost node),
        ``worn`` (members that are not started again after another loss) and ``epoch`` (the controller's number)."""
        return self._call("status", {}, STATUS_SECONDS)

    def drain(self, node: int) -> None:
        """Request that ``node`` leaves the job at the next iteration boundary."""
        self._call("drain", {"node": node}, REQUEST_SECONDS)

    def add(self, node: int) -> None:
        """Request that ``node`` is started and joins the job at an iteration boundary."""
        self._call("add", {"node": node}, REQUEST_SECONDS)

    def _call(self, method: str, body: Message, timeout_seconds: float) -> Message:
        """Call the controller.

        Raises:
            JobNotRunning: no controller answers.
            ControlError: the controller refuses the call; the message gives the reason.
        """
        try:
            return self._client.call(method, body, timeout_seconds=timeout_seconds, wait_for_peer=True)
        except RpcError as error:
            if error.refused:
                raise ControlError(f"the controller refused {method}: {error}") from None
            note = "" if method == "status" else "; the request may still take effect, see tools/status.py"
            raise JobNotRunning(
                f"run_dir={self._run_dir}: the job's controller does not answer ({error}){note}. "
                f"If no job uses this folder now, an earlier job has left {CONTROLLER_FILE} behind"
            ) from None
