"""Decides when a snapshot server ends: with its agent, or later, so that the next job can take it over.

The connection of the agent is the server's standard input, or a socket if an agent of a later job has taken the server
over. When this connection closes, the agent has ended. Bytes on standard input, or a message ``end`` on the socket, end
the server at once.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.errors import ControlError
from megatron_ft.framing import Message
from megatron_ft.snapshot.server import wire as fields
from megatron_ft.snapshot.server.wire import Refused

MIN_TOKEN_LENGTH = 32
_MAX_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlive:
    """Settings of a server that outlives its agent: which later jobs may use its windows, and how long it waits."""

    seconds: int
    run_id: str
    fingerprint: str
    """Hash of layout and settings of the job that captured the windows. Only a job with an equal hash can use them."""
    interface: str
    record_path: str
    """File with which agents find the server; the server removes it when it ends."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Outlive":
        """Read and check the settings. Raises ControlError for a missing or invalid value."""
        names = ("run_id", "fingerprint", "interface", "record_path")
        return cls(seconds=_seconds(content), **{name: fields.text(content, name) for name in names})


def _seconds(content: Mapping[str, Any]) -> int:
    return fields.integer(content, "seconds", least=1, most=_MAX_SECONDS)


class Unusable(Refused):
    """Raised if an agent tries to take the server over, but the agent's job cannot use the server's windows. The
    server then ends."""


class Lifeline:
    """Tracks the connection of the agent and, after it has closed, the time until the server ends. Thread-safe."""

    def __init__(
        self, outlive: Outlive | None, report: Callable[[str], None], *, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Take the standard input of this process as the connection of the agent that has started the server.

        Args:
            outlive: how long, and for which jobs, the server waits after its agent has ended; None to end at once.
            report: writes a line to the server's log.
            wake: called when the result of ``seconds_left`` may have changed.
        """
        self.outlive = outlive
        self._report, self._wake = report, wake
        self._lock = threading.Lock()
        self._holder: object = self
        self._deadline: float | None = None
        self._is_over = False

    @property
    def initial_holder(self) -> object:
        """Object that stands for the first agent's connection. Pass it to ``release`` when standard input closes."""
        return self

    def seconds_left(self) -> float | None:
        """Return the seconds until the server ends; None while it has an agent."""
        with self._lock:
            if self._is_over:
                return 0.0
            return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, holder: object, message: Message) -> None:
        """Let the agent of another job take the server over. ``holder`` represents this agent's connection. When the
        connection closes, the server waits for the ``seconds`` in ``message`` before it ends.

        Raises:
            Unusable: the server is of another run, or its job had another layout or other settings.
            Refused: the server is configured to end with its agent.
            ControlError: a value is missing or invalid.
        """
        outlive = self.outlive
        if outlive is None:
            raise Refused("this server ends when its agent ends, so no other agent can take it over")
        for name in ("run_id", "fingerprint", "interface"):
            if (given := fields.text(message, name)) != getattr(outlive, name):
                raise Unusable(
                    f"{name}={given}: must be {getattr(outlive, name)}, the value when the windows were captured"
                )
        seconds = _seconds(message)
        with self._lock:
            self.outlive = replace(outlive, seconds=seconds)
            self._holder, self._deadline = holder, None
        self._report("the agent of the next job has taken this server over")

    def release(self, holder: object, *, has_windows: bool) -> None:
        """Record that the connection ``holder`` has closed. If it was the agent's connection, the server ends after
        ``Outlive.seconds``, or at once if the server has no windows or ``outlive`` is None."""
        with self._lock:
            if holder is not self._holder or self._deadline is not None:
                return
            if self.outlive is not None and has_windows and not self._is_over:
                self._deadline = time.monotonic() + self.outlive.seconds
                self._report(f"the agent has ended; the next job may use this server for {self.outlive.seconds} s")
            else:
                self._is_over = True
        self._wake()

    def end(self, reason: str) -> None:
        """Make the snapshot server's process end, and report ``reason``."""
        with self._lock:
            self._is_over = True
        self._report(f"this server ends: {reason}")
        self._wake()


def read_adoption(message: Message) -> str:
    """Return the new job's token from its agent's takeover message. Raises ControlError if it is missing or invalid."""
    token = fields.text(message, "new_token")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ControlError(f"new_token: must have at least {MIN_TOKEN_LENGTH} characters")
    return token
