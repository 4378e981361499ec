"""The launcher's side of the controller: a process of its own, started again in its place when it ends before the job.

Events that the launcher has seen go to it; records of ranks and what follows from decisions come back, each once,
however often a controller had to take over.
"""

import contextlib
import json
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ft.control.controller.job_result import JobResult
from megatron_ft.control.membership.events import MachineEvent
from megatron_ft.control.membership.machine import describe_returncode
from megatron_ft.control.messages import event_to_json
from megatron_ft.control.node.ranks import last_line, size_of
from megatron_ft.control.secret_file import write_secret
from megatron_ft.errors import ControlError
from megatron_ft.framing import FrameReader, Message, send

MAX_FAILED_STARTS = 5
"""Controllers in a row that end without anything having come from them."""
# A new controller imports its modules and reads the whole journal before it sends anything.
LEAST_SILENCE_SECONDS = 10.0
_PING_SECONDS = 2.0
_EXIT_SECONDS = 10.0

Process = subprocess.Popen[bytes]


class ControllerLink:
    """Starts the controller's process, talks to it, and starts another when it ends or gives no sign."""

    def __init__(
        self,
        start: Callable[[socket.socket], Process],
        *,
        access_path: Path,
        access: Message,
        silence_seconds: float,
        log: Path | None = None,
    ) -> None:
        """``begin`` starts the controller.

        Args:
            start: starts the process and gives it its spec and one end of a connection.
            access_path: file for those who may call the controller, mode 0600: address, epoch and process id.
            access: what they need besides.
            silence_seconds: a controller that gives no sign for so long, and at least ``LEAST_SILENCE_SECONDS``, is
                killed: it takes a while to start.
            log: its log, whose last line is reported where it ends by itself.
        """
        self._start = start
        self._log, self._log_begin_bytes = log, 0
        self._access_path, self._access = access_path, access
        self._silence_seconds = max(silence_seconds, LEAST_SILENCE_SECONDS)
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._events: list[MachineEvent] = []
        self._num_told = 0
        self._process: Process | None = None
        self._reader: FrameReader | None = None
        self._last_record: dict[int, list[int]] = {}
        """Session and number of each node's last message."""
        self._to_grant: bytes | None = None
        """Content that the file that grants access is to have and has not yet."""
        self._num_events = 0
        self._num_fruitless_starts = 0

    def post(self, event: MachineEvent) -> None:
        """Tell an event; safe in any thread and in signal handlers."""
        self._events.append(event)
        with contextlib.suppress(BlockingIOError):
            # A signal handler must not block, and a full socket wakes the loop as well.
            self._wake_send.send(b"\0", socket.MSG_DONTWAIT)

    def begin(self) -> None:
        """Start the controller."""
        self._log_begin_bytes = 0 if self._log is None else size_of(self._log)
        mine, its = socket.socketpair()
        # Only the controller keeps its end, so that its death closes the connection.
        with its:
            self._process = self._start(its)
        self._reader, self._num_told = FrameReader(mine), 0

    def run(self, on_record: Callable[[Message], None], on_event: Callable[[Message], None]) -> JobResult:
        """Serve until the job has ended; records of ranks and events go to the callbacks, in this thread.

        Raises:
            ControlError: controllers end again and again without getting anywhere.
        """
        while True:
            try:
                return self._serve(on_record, on_event)
            except _Gone as gone:
                # It is dead before the rest is read: nothing can follow what is in the socket, and two never run at the
                # same time.
                self._give_up(str(gone))
                end = self._read_rest(on_record, on_event)
                if end is not None:
                    return end
                on_event({"event": "replaced", "reason": f"the controller is gone: {gone}"})
                self.begin()

    def close(self) -> None:
        """The job has ended: let the controller go, and take back what grants access to it."""
        self._access_path.unlink(missing_ok=True)
        self._end_process(patience_seconds=5.0)
        self._abort()
        for sock in (self._wake_receive, self._wake_send):
            sock.close()

    # --- one controller ------------------------------------------------------------------------------------------

    def _serve(self, on_record: Callable[[Message], None], on_event: Callable[[Message], None]) -> JobResult:
        assert self._reader is not None, "begun"
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader.sock, selectors.EVENT_READ)
            selector.register(self._wake_receive, selectors.EVENT_READ)
            silent_since = time.monotonic()
            while True:
                self._send_events()
                self._write_access()
                ready = {key.fileobj for key, _ in selector.select(_PING_SECONDS)}
                if self._wake_receive in ready:
                    self._wake_receive.recv(4096)
                if self._reader.sock in ready:
                    end = self._take_in(on_record, on_event)
                    if end is not None:
                        return end
                    silent_since = time.monotonic()
                elif not ready:
                    self._ask_for_a_sign(silent_since)

    def _send_events(self) -> None:
        for number in range(self._num_told, len(self._events)):
            self._send({"op": "event", "number": number, "event": event_to_json(self._events[number])})
            self._num_told = number + 1

    def _ask_for_a_sign(self, silent_since: float) -> None:
        if time.monotonic() - silent_since > self._silence_seconds:
            raise _Gone(f"it has given no sign for {self._silence_seconds:g} s")
        self._send({"op": "ping"})

    def _send(self, message: Message) -> None:
        assert self._reader is not None, "begun"
        try:
            send(self._reader.sock, message)
        except OSError as error:
            raise _Gone(f"its connection broke: {error}") from None

    def _take_in(self, on_record: Callable[[Message], None], on_event: Callable[[Message], None]) -> JobResult | None:
        assert self._reader is not None, "begun"
        messages, closed = self._reader.pump()
        for message in messages:
            match message["op"]:
                case "ready":
                    self._grant_access(message)
                case "record":
                    node, *item = message["origin"]
                    # Nodes deliver again what the last controller passed on without an acknowledgement.
                    if item > self._last_record.get(node, []):
                        self._last_record[node] = item
                        self._num_fruitless_starts = 0
                        on_record(message["record"])
                # Without a number: they follow from no decision, so no other controller repeats them.
                case "waits" | "goes_on":
                    on_event({"event": message["op"], **message})
                case "event" if message["number"] >= self._num_events:
                    # Only a new number counts as progress. A controller that repeats the journal and dies would be
                    # started for ever.
                    self._num_events, self._num_fruitless_starts = message["number"] + 1, 0
                    if message["event"] == "ended":
                        return JobResult.from_json(message["end"])
                    on_event(message)
        if closed:
            raise _Gone(self._describe_end())
        return None

    def _grant_access(self, message: Message) -> None:
        """Say in a file of this user's own how the controller is called."""
        about = {name: message[name] for name in ("address", "epoch", "process_id")}
        self._to_grant = json.dumps({**about, **self._access}).encode() + b"\n"
        self._write_access()

    def _write_access(self) -> None:
        """A disk that is full, or a folder that is gone, ends nothing here: it is tried again."""
        if self._to_grant is not None:
            with contextlib.suppress(OSError):
                write_secret(self._access_path, self._to_grant)
                self._to_grant = None

    # --- the next one ----------------------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self._num_fruitless_starts += 1
        self._end_process(patience_seconds=0.0)
        if self._num_fruitless_starts >= MAX_FAILED_STARTS:
            raise ControlError(f"the controller ended {MAX_FAILED_STARTS} times in a row; the last time {reason}")

    def _read_rest(self, on_record: Callable[[Message], None], on_event: Callable[[Message], None]) -> JobResult | None:
        """Read what a controller sent before it ended: to nodes it is acknowledged already."""
        try:
            while True:
                end = self._take_in(on_record, on_event)
                if end is not None:
                    return end
        except _Gone:
            self._abort()
        return None

    def _end_process(self, *, patience_seconds: float) -> None:
        """Its standard input closes; then it is killed, for two must never live at a time."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "started with a lifeline"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=patience_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _describe_end(self) -> str:
        """Describe its end, and its last output where it ended by itself."""
        if self._process is None:
            return "it was given up"
        try:
            returncode = self._process.wait(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "it has closed its connection"
        last = last_line(self._log, self._log_begin_bytes) if self._log is not None and returncode > 0 else ""
        return f"it {describe_returncode(returncode)}" + (f": {last}" if last else "")

    def _abort(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Gone(Exception):
    """The controller has ended, or is as good as dead."""
