"""Calls of an agent to the controller, whichever one is in charge."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.framing import Message

_PAUSE_SECONDS = 0.2


class ControllerClient:
    """Calls of one node. Safe in several threads."""

    def __init__(self, address: str, *, token: str, certificates: Certificates | None = None) -> None:
        self._client = RpcClient(address, "Controller", token=token, certificates=certificates)
        self._epoch = 0

    def call(
        self, method: str, body: Mapping[str, Any], *, timeout_seconds: float, wait_for_peer: bool = False
    ) -> Message:
        """See ``RpcClient.call``. An answer of a controller that another has followed is none.

        Raises:
            RpcError: no answer in time, controller gone or refused, or its epoch is over.
        """
        answer = self._client.call(method, body, timeout_seconds=timeout_seconds, wait_for_peer=wait_for_peer)
        epoch = int(answer["epoch"])
        # Not a refusal by the peer: the controller in charge serves at the same address, and the next call reaches it.
        if epoch < self._epoch:
            message = f"Controller.{method} at {self._client.address}: of epoch {epoch}, which {self._epoch} has ended"
            raise RpcError(message, refused=False)
        self._epoch = epoch
        return answer

    def insist(self, method: str, body: Mapping[str, Any], *, timeout_seconds: float) -> Message:
        """Call until there is an answer: of the controller that is to come, or that takes over meanwhile.

        Raises:
            RpcError: refused, or no answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            left_seconds = deadline - time.monotonic()
            try:
                return self.call(method, body, timeout_seconds=left_seconds, wait_for_peer=True)
            except RpcError as error:
                if error.refused or time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
            threading.Event().wait(_PAUSE_SECONDS)
