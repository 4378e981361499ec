"""Calls of an agent to the controller in charge."""

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
        # Held from comparison to assignment: threads can finish in another order than their answers came.
        self._fence = threading.Lock()
        self._epoch = 0

    def call(
        self, method: str, body: Mapping[str, Any], *, timeout_seconds: float, wait_for_peer: bool = False
    ) -> Message:
        """See ``RpcClient.call``. The answer of a controller that was replaced is not accepted.

        Raises:
            RpcError: no answer in time, the controller has ended or refused, or its epoch is over.
        """
        answer = self._client.call(method, body, timeout_seconds=timeout_seconds, wait_for_peer=wait_for_peer)
        epoch = int(answer["epoch"])
        with self._fence:
            newest = self._epoch = max(self._epoch, epoch)
        # Not a refusal by the peer: the controller in charge serves at the same address, and the next call reaches it.
        if epoch < newest:
            message = (
                f"Controller.{method} at {self._client.address}: answered by the controller of epoch {epoch}, "
                f"which epoch {newest} has replaced"
            )
            raise RpcError(message, refused=False)
        return answer

    def insist(self, method: str, body: Mapping[str, Any], *, timeout_seconds: float) -> Message:
        """Repeat a call until the controller, or one that replaces it meanwhile, answers.

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
