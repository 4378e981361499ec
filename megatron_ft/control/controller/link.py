"""The launcher's connection to the controller's process. The launcher replaces a controller that ends before the job.

The launcher sends its events to the controller, and receives records of ranks and events of decisions. The launcher
passes each record and event to the sinks (terminal, files) exactly once, even if the controller is replaced.
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

from megatron_ft.control.membership.events import MachineEvent
from megatron_ft.control.membership.machine import describe_returncode
from megatron_ft.control.messages import event_to_json
from megatron_ft.control.node.ranks import last_line, size_of
from megatron_ft.control.report import JobResult
from megatron_ft.control.secret_file import write_secret
from megatron_ft.errors import ControlError
from megatron_ft.framing import FrameReader, Message, send

MAX_FAILED_STARTS = 5
"""The job fails when this many controllers in a row have failed without a new message to the launcher."""
# A new controller imports its modules and reads the whole journal before it sends anything.
LEAST_SILENCE_SECONDS = 10.0
_PING_SECONDS = 2.0
_EXIT_SECONDS = 10.0

Process = subprocess.Popen[bytes]


class ControllerLink:
    """Starts the controller's process, exchanges messages with it, and replaces it if it ends or does not answer."""

    def __init__(
        self,
        start: Callable[[socket.socket], Process],
        *,
        access_path: Path,
        access: Message,
        silence_seconds: float,
        log: Path | None = None,
    ) -> None:
        """Store the settings; ``begin`` starts the controller.

        Args:
            start: starts the controller's process; its argument is the process's end of a socket pair.
            access_path: file (mode 0600) to which the controller's address, epoch and process id are written.
            access: further entries of the file at ``access_path``.
            silence_seconds: time without a message after which a controller is killed. Values below 10 count as 10.
            log: log file of the controller; the last line of the log is reported if the controller ends by itself.
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
        """Maps each node to its newest record that was passed to the sinks: session of the agent, and record index."""
        self._to_grant: bytes | None = None
        """Content that must still be written to the file at ``access_path``; None if the file is up to date."""
        self._num_events = 0
        self._num_fruitless_starts = 0

    def post(self, event: MachineEvent) -> None:
        """Send an event to the controller. May be called in any thread and in signal handlers."""
        self._events.append(event)
        with contextlib.suppress(BlockingIOError):
            # A signal handler must not block, and a full socket wakes the loop as well.
            self._wake_send.send(b"\0", socket.MSG_DONTWAIT)

    def begin(self) -> None:
        """Start the controller."""
        self._log_begin_bytes = 0 if self._log is None else size_of(self._log)
        mine, its = socket.socketpair()
        # Only the controller's process keeps its end open, so that its death closes the connection.
        with its:
            self._process = self._start(its)
        self._reader, self._num_told = FrameReader(mine), 0

    def run(self, on_record: Callable[[Message], None], on_event: Callable[[Message], None]) -> JobResult:
        """Exchange messages with the controller until the job has ended, and return the job's result. Call
        ``on_record`` for each record of a rank, and ``on_event`` for each event.

        Raises:
            ControlError: several controllers in a row ended without progress.
        """
        while True:
            try:
                return self._serve(on_record, on_event)
            except _Gone as gone:
                # The old controller is ended before its last messages are read, so that no message arrives later. Two
                # controllers never run at the same time.
                self._give_up(str(gone))
                end = self._read_rest(on_record, on_event)
                if end is not None:
                    return end
                on_event({"event": "replaced", "reason": str(gone)})
                self.begin()

    def close(self) -> None:
        """End the controller after the job, and remove the file with the controller's address."""
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
                began = time.monotonic()
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
                    # This process was suspended and could not read messages, so the controller's timeout starts again.
                    if time.monotonic() - began > 2 * _PING_SECONDS:
                        silent_since = time.monotonic()
                    self._ask_for_a_sign(silent_since)

    def _send_events(self) -> None:
        for number in range(self._num_told, len(self._events)):
            self._send({"op": "event", "number": number, "event": event_to_json(self._events[number])})
            self._num_told = number + 1

    def _ask_for_a_sign(self, silent_since: float) -> None:
        if time.monotonic() - silent_since > self._silence_seconds:
            raise _Gone(f"the controller did not answer for {self._silence_seconds:g} s")
        self._send({"op": "ping"})

    def _send(self, message: Message) -> None:
        assert self._reader is not None, "begun"
        try:
            send(self._reader.sock, message)
        except OSError as error:
            raise _Gone(f"the connection to the controller broke: {error}") from None

    def _take_in(self, on_record: Callable[[Message], None], on_event: Callable[[Message], None]) -> JobResult | None:
        assert self._reader is not None, "begun"
        messages, closed = self._reader.pump()
        for message in messages:
            match message["op"]:
                case "ready":
                    self._grant_access(message)
                case "record":
                    node, *item = message["origin"]
                    # Nodes deliver a record again if the last controller forwarded it but did not acknowledge it.
                    if item > self._last_record.get(node, []):
                        self._last_record[node] = item
                        self._num_fruitless_starts = 0
                        on_record(message["record"])
                # These events have no number: no decision causes them, so no later controller repeats them.
                case "waits" | "goes_on":
                    on_event({"event": message["op"], **message})
                case "event" if message["number"] >= self._num_events:
                    # Only a new number counts as progress. Otherwise a controller that only repeats the journal and
                    # dies would be replaced for ever.
                    self._num_events, self._num_fruitless_starts = message["number"] + 1, 0
                    if message["event"] == "ended":
                        return JobResult.from_json(message["end"])
                    on_event(message)
        if closed:
            raise _Gone(self._describe_end())
        return None

    def _grant_access(self, message: Message) -> None:
        about = {name: message[name] for name in ("address", "epoch", "process_id")}
        self._to_grant = json.dumps({**about, **self._access}).encode() + b"\n"
        self._write_access()

    def _write_access(self) -> None:
        # Write the access file; on a full disk, or if the folder is gone, try again later.
        if self._to_grant is not None:
            with contextlib.suppress(OSError):
                write_secret(self._access_path, self._to_grant)
                self._to_grant = None

    # --- replacement -----------------------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self._num_fruitless_starts += 1
        self._end_process(patience_seconds=0.0)
        if self._num_fruitless_starts >= MAX_FAILED_STARTS:
            raise ControlError(f"the controller failed {MAX_FAILED_STARTS} times in a row; last failure: {reason}")

    def _read_rest(self, on_record: Callable[[Message], None], on_event: Callable[[Message], None]) -> JobResult | None:
        # Read the messages that a controller sent before it ended: nodes do not repeat records that were acknowledged.
        try:
            while True:
                end = self._take_in(on_record, on_event)
                if end is not None:
                    return end
        except _Gone:
            self._abort()
        return None

    def _end_process(self, *, patience_seconds: float) -> None:
        # Close the standard input of the controller, then kill it: two controllers must never run at the same time.
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "the controller was started without a pipe"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=patience_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _describe_end(self) -> str:
        if self._process is None:
            return "the controller was abandoned"
        try:
            returncode = self._process.wait(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "the controller closed its connection"
        last = last_line(self._log, self._log_begin_bytes) if self._log is not None and returncode > 0 else ""
        return f"the controller {describe_returncode(returncode)}" + (f": {last}" if last else "")

    def _abort(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Gone(Exception):
    """Raised if the controller has ended or does not answer any more."""
