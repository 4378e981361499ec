"""The controller's process: ``python -m megatron_ft.control.controller.main``.

The process reads a ``ControllerSpec``, one line of JSON, from standard input. Standard input closes when the launcher
ends. An input that can affect decisions is written to the journal first, so the launcher can replace the process at any
time. Over a Unix socket, the process receives events from the launcher, and sends records and decisions to the
launcher. Records and decisions have numbers, so that the launcher can drop duplicates.
"""

import contextlib
import fcntl
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.control import report
from megatron_ft.control.admin import CONTROLLER_FILE
from megatron_ft.control.certificates import Certificates
from megatron_ft.control.controller.controller import Controller
from megatron_ft.control.controller.journal import EssentialWrites, Journal, StandingClock
from megatron_ft.control.controller.server import Origin
from megatron_ft.control.detector import DetectorPolicy
from megatron_ft.control.launchers.base import launcher_class
from megatron_ft.control.membership import events
from megatron_ft.control.membership.state import Decision, MembershipPolicy, Step
from megatron_ft.control.messages import LaunchSpec, event_from_json
from megatron_ft.control.ports import StoreEndpoint, free_port
from megatron_ft.control.rpc import check_descriptors, raise_descriptor_limit
from megatron_ft.control.runtime_dir import Use
from megatron_ft.durable import append_line
from megatron_ft.errors import ControlError, MegatronFtError
from megatron_ft.framing import FrameReader, Message, read_line, send


def _launch_spec(
    first: LaunchSpec, generation: int, nodes: Sequence[int], stores: Mapping[int, StoreEndpoint]
) -> LaunchSpec:
    """Return the part of the specification that is the same for all ranks that start in ``generation``.

    Args:
        first: specification from which the result is made; ``master_addr`` is this machine's address, and
            ``master_port`` is 0 if no port is configured.
        nodes: node of each rank of the membership.
        stores: maps a node to the endpoint of its rendezvous store; nodes on this machine have no entry.
    """
    store = stores.get(nodes[0])
    address = first.master_addr if store is None else store.address
    # Without a configured port, each generation gets another port: the previous store may still be closing.
    port = first.master_port or (free_port(address) if store is None else store.port_of(generation))
    # Later generations continue this run, whatever ``run.resume`` was at its start.
    source = first.resume_from if generation == 0 else str(Path(first.run_dir, "checkpoints"))
    return replace(
        first,
        resume_from=source,
        world_size=len(nodes),
        num_nodes=len(set(nodes)),
        master_addr=address,
        master_port=port,
    )


# A controller holds a lock on the file ``epoch`` as long as it lives, so no other controller of the run can start. It
# writes an epoch into the file, higher than all earlier epochs, and puts this epoch into every answer. Agents reject an
# answer with an epoch below the highest that they have seen, and a controller reads the file again before it decides.
# Both checks stop an old controller that was presumed dead.

_FILE = "epoch"
_MAX_BYTES = 20


@dataclass(frozen=True, slots=True)
class _Lease:
    """Exclusive right of one controller to control a run: a file lock, until the process ends or calls ``release``."""

    epoch: int
    """Number of this controller, counted from 1 over all controllers of the run."""
    _path: Path
    _descriptor: int

    @property
    def is_stale(self) -> bool:
        """Whether a later controller has the lease."""
        try:
            # The file is read each time: if the file system lost the lock, a later controller may have written to it.
            return _read(self._path) != self.epoch
        except FileNotFoundError:
            return True

    def release(self) -> None:
        """Release the lease, so that another controller can acquire it."""
        os.close(self._descriptor)

    @classmethod
    def acquire(cls, folder: Path) -> "_Lease":
        """Acquire the lease of the run whose control folder is ``folder``.

        Raises:
            ControlError: another controller is alive, or the file ``epoch`` in ``folder`` is damaged.
        """
        path = folder / _FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ControlError(f"{path}: another controller of this run is alive; only one may run at a time") from None
        try:
            # Written in place, because a renamed file would leave the lock on the old inode. Epochs only rise, so no
            # digit of the old epoch remains.
            epoch = _read(path) + 1
            os.pwrite(descriptor, b"%d\n" % epoch, 0)
            os.fsync(descriptor)
        except BaseException:
            # On a full disk, ``EssentialWrites`` repeats this call, which would fail if this lock remained.
            os.close(descriptor)
            raise
        return cls(epoch, path, descriptor)


def _read(path: Path) -> int:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES)
    text = content.strip()
    if text and not text.isdigit():
        raise ControlError(f"{path}: must contain a number, contains {content!r}")
    return int(text or b"0")


FOLDER = "control"
"""Subfolder of the run's folder that contains the journal and the file ``epoch``."""
JOURNAL = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class ControllerSpec:
    """Specification that the controller's process reads from standard input."""

    config: dict[str, Any]
    """JSON of ``JobConfig``."""
    run_dir: str
    resume_from: str | None
    entry: str
    working_dir: str
    token: str
    launcher_descriptor: int
    """File descriptor of the socket that is connected to the launcher."""
    port: int = 0
    """Port of the service; 0 chooses a free one. A new controller uses the port of its predecessor."""
    runtime_dir: str | None = None
    """The folder of the job's sockets on this machine; the last process of the job removes it."""

    def to_line(self) -> bytes:
        """Return the spec as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


class _Launcher:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Two threads send: the controller's thread (records and events) and the listener's (answers to pings).
        self._lock = threading.Lock()
        self._num_events = 0

    @functools.cached_property
    def _socket(self) -> socket.socket:
        # Open the socket at its first use: a second controller that was started by mistake may have none.
        return socket.socket(fileno=self._descriptor)

    def send(self, message: Message) -> None:
        """Send a message to the launcher. The call blocks while the launcher is slow."""
        with self._lock:
            send(self._socket, message)

    def record(self, record: Message, origin: Origin) -> None:
        """Forward a record of a rank to the launcher."""
        self.send({"op": "record", "record": record, "origin": origin})

    def event(self, event: Message) -> None:
        """Send a numbered event about a decision. If a new controller sends the event again, the launcher detects the
        duplicate by its number and drops it."""
        self.send({"op": "event", "number": self._num_events, **event})
        self._num_events += 1

    def listen(self, post: Callable[[events.MachineEvent, int], None]) -> None:
        """Pass each event of the launcher to ``post`` until the connection closes. Runs in a thread of its own."""
        reader, closed = FrameReader(self._socket), False
        while not closed:
            messages, closed = reader.pump()
            for message in messages:
                if message["op"] == "ping":
                    # Answered in this thread: a controller that waits for disk space must not be taken for dead.
                    self.send({"op": "pong"})
                else:
                    post(event_from_json(message["event"]), message["number"])


class _ControllerProcess:
    """Process of a controller. It acquires the run's lease, and runs the controller until the job ends or another
    controller is in charge."""

    def __init__(self, spec: ControllerSpec) -> None:
        run_dir = Path(spec.run_dir)
        folder = run_dir / FOLDER
        self._launcher = _Launcher(spec.launcher_descriptor)
        self._writes = EssentialWrites(run_dir, self._report_wait, self._report_end_of_wait)
        self._writes.do(lambda: folder.mkdir(mode=0o700, exist_ok=True))
        self._access_path = run_dir / CONTROLLER_FILE
        self._use = None if spec.runtime_dir is None else Use(Path(spec.runtime_dir))
        # The lease is acquired before the journal is opened, because opening may remove an incomplete last line.
        self._lease: _Lease = self._writes.do(lambda: _Lease.acquire(folder))
        config: JobConfig = from_dict(spec.config)
        starts_nodes = launcher_class(config.launch.node_launcher).starts_nodes
        self._policy = MembershipPolicy.of(config, starts_nodes=starts_nodes)
        check_descriptors(self._policy.most_nodes)
        journal = Journal(folder / JOURNAL, self._writes.do)
        self._writes.clock = StandingClock(_clock_after(journal.entries))
        first = LaunchSpec(
            entry=spec.entry,
            config=spec.config,
            run_dir=str(run_dir),
            working_dir=spec.working_dir,
            world_size=config.world_size,
            num_nodes=config.launch.num_nodes,
            can_survive=config.may_lose_nodes,
            master_addr=config.control.interface,
            master_port=config.launch.master_port,
            resume_from=spec.resume_from,
        )
        self._decisions_path = run_dir / "decisions.jsonl"
        self._controller = Controller(
            self._policy,
            interface=config.control.interface,
            token=spec.token,
            launch_spec=functools.partial(_launch_spec, first),
            record_decision=self._record_decision,
            detection=DetectorPolicy(**asdict(config.detector)),
            journal=journal,
            epoch=self._lease.epoch,
            port=spec.port,
            certificates=Certificates.read(config.control.tls_dir),
            clock=self._writes.clock,
        )
        self._num_recorded = _num_lines(self._decisions_path)
        """Number of decisions in ``decisions.jsonl``, including decisions of earlier jobs of the run."""
        # The first lines are from earlier jobs of the run. All controllers of this job count from the same line.
        self._num_decisions = int(journal.first("num_earlier_decisions", self._num_recorded))

    def run(self) -> None:
        """Serve until the job has ended and the launcher has closed standard input."""
        self._launcher.send(
            {
                "op": "ready",
                "address": self._controller.address,
                "epoch": self._lease.epoch,
                "process_id": os.getpid(),
            }
        )
        for target, arguments in ((self._launcher.listen, (self._post,)), (self._end_with_launcher, ())):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        end = self._controller.run(self._launcher.record, self._on_step)
        self._launcher.event({"event": "ended", "end": end.to_json()})
        threading.Event().wait()  # agents fetch their last order until the launcher closes standard input

    def _post(self, event: events.MachineEvent, number: int) -> None:
        if isinstance(event, events.KillRequested):
            # While a write waits for disk space, no event leaves the queue, so a second Ctrl-C must end the wait here.
            self._writes.request_end()
        self._controller.post(event, number)

    def _report_wait(self, problem: str) -> None:
        self._launcher.send({"op": "waits", "problem": problem})

    def _report_end_of_wait(self, seconds: float) -> None:
        self._launcher.send({"op": "goes_on", "seconds": seconds})

    def _end_with_launcher(self) -> None:
        # Runs in a thread, and ends the process when standard input closes: the launcher has ended the job or was
        # killed. A killed launcher removes neither the access file nor the folder of sockets, so this thread does it.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(self._access_path.read_bytes())["process_id"] == os.getpid():
                self._access_path.unlink()
        if self._use is not None:
            self._use.end()
        os._exit(0)

    def _record_decision(self, decision: Message) -> None:
        # Record a decision unless an earlier controller has recorded it. A controller with a stale lease must not
        # decide. The folder is checked first: if it is gone, the lease looks stale, and the reason would be wrong.
        self._writes.check_place()
        if self._lease.is_stale:
            epoch = self._lease.epoch
            raise ControlError(f"a newer controller replaced this one (epoch={epoch}), or control/epoch was deleted")
        # A new controller repeats the decisions of the journal, which the file already has in the same order.
        if self._num_decisions >= self._num_recorded:
            line = json.dumps(decision).encode() + b"\n"
            self._writes.do(lambda: append_line(self._decisions_path, line))
        self._num_decisions += 1

    def _on_step(self, step: Step) -> None:
        for event in report.failed_start_records(step):
            self._launcher.event({"event": "record", "record": event.to_record()})
        match step.decision:
            case Decision.STOP if not step.state.failures:
                self._launcher.event({"event": "stopping"})
            case Decision.START_AGENTS:
                self._launcher.event({"event": "start_agents", "nodes": list(step.nodes)})
            case Decision.RESTART:
                for event in report.restart_records(step, self._controller.details, self._policy):
                    self._launcher.event({"event": "record", "record": event.to_record()})
            case Decision.REFORM:
                for event in report.lost_records(step, self._controller.details, self._policy):
                    self._launcher.event({"event": "record", "record": event.to_record()})


def _clock_after(entries: list[Message]) -> Callable[[], float]:
    """Return a monotonic clock that continues from the time of the journal's last entry. The time without a controller
    does not count: no report could be delivered, so no deadline may pass."""
    now_seconds = time.monotonic()
    last = next((entry for entry in reversed(entries) if "now" in entry), None)
    if last is None:
        return time.monotonic
    offset_seconds = last["now"] - now_seconds
    return lambda: time.monotonic() + offset_seconds


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> int:
    """Entry point of the controller's process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher handles these signals and sends a request
    raise_descriptor_limit()
    line = read_line(sys.stdin.fileno())
    if not line.endswith(b"\n"):
        print("controller: the launcher closed standard input before it sent the spec", file=sys.stderr)
        return ControlError.exit_code
    try:
        _ControllerProcess(ControllerSpec(**json.loads(line))).run()
    except (MegatronFtError, OSError) as error:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            print(f"controller: {error}", file=sys.stderr, flush=True)
        os._exit(ControlError.exit_code)  # a normal exit would wait for calls that are still being served
    finally:
        if sys.exc_info()[0] is not None:  # a defect; for the same reason, the process must end at once
            with contextlib.suppress(OSError):
                traceback.print_exc()
            os._exit(ControlError.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
