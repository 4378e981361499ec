"""The agent of a node: starts the node's ranks, watches them, and forwards their reports.

``python -m megatron_ft.control.node.agent`` reads one line of JSON from standard input (address and token of the
controller, node number, sockets). When standard input closes, the launcher has ended, so the node ends. The main thread
owns the agent's state and waits on sockets. A second thread fetches orders from the controller. A third sends reports.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron_ft.config.serialize import from_dict
from megatron_ft.control import messages
from megatron_ft.control.messages import Join, Order, to_message
from megatron_ft.control.node.fork_server import listen
from megatron_ft.control.node.kept import KeptServers, end_unused
from megatron_ft.control.node.ranks import Outbox, Ranks
from megatron_ft.control.node.sidecars import Sidecars
from megatron_ft.control.ports import StoreEndpoint
from megatron_ft.control.presence import PresencePort
from megatron_ft.control.runtime_dir import Use, remove_stale_sockets, socket_path
from megatron_ft.errors import ControlError, MegatronFtError
from megatron_ft.framing import FrameReader, Message, read_line, send
from megatron_ft.planning.rank_environment import rank_environment
from megatron_ft.serde import decode, encode, parse_json

_CONNECT_SECONDS = 5.0
_JOIN_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Specification that an agent reads from standard input."""

    controller_address: str
    token: str
    node: int
    runtime_dir: str
    """Directory (mode 0700) for the node's sockets. The last process of the job that uses the directory removes it."""
    forkserver_socket: str
    lost_controller_seconds: float = 60.0
    """Time after which the node ends its ranks if no controller answers. A controller that died is replaced in less
    time. Time in which the node itself was suspended does not count."""
    sidecars: dict[str, str] = field(default_factory=dict)
    """Maps the name of each sidecar to its Python module. A sidecar is a process of the node beside its ranks."""
    kept_servers: KeptServers | None = None
    """Time for which the snapshot server outlives the agent, and a description of earlier servers that the agent may
    take over. If null, the server starts and ends with the agent."""
    interface: str = ""
    """Address that the sidecars bind to."""
    log_dir: str = ""
    """Folder of the sidecars' logs."""
    heartbeat_interval_seconds: float = 1.0
    """Interval between two heartbeats of the node, and between two pings of its ranks."""
    heartbeat_timeout_seconds: float = 10.0
    """Longest time without a message from a rank (answers to pings are messages). After it, the rank is killed."""

    answers_presence: bool = False
    """Whether the agent opens a port (``PresencePort``) at which the machine's kernel answers the controller."""
    tls_dir: str | None = None
    """Value of ``control.tls_dir``."""
    process_id: int | None = None
    """Number by which the controller identifies this agent's process; null means the agent's own process id."""
    store: StoreEndpoint | None = None
    """Endpoint at which this node can serve the rendezvous store; null if the controller's machine serves it."""

    def to_line(self) -> bytes:
        """Encode this spec of an agent as one line of JSON."""
        return json.dumps(encode(self)).encode() + b"\n"


class ControllerSilent(ControlError):
    """Raised if the controller no longer answers."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """Item in the agent's queue of orders. It reports that the controller refused a call or sent an invalid order."""

    reason: str


class _Agent:
    """The agent of a node, run in the main thread of its process."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._use = Use(Path(spec.runtime_dir))
        remove_stale_sockets(Path(spec.runtime_dir), spec.node)
        self._forkserver = FrameReader(_connect(spec.forkserver_socket))
        # Sidecars are forked before other threads exist and before gRPC is imported: neither survives a fork.
        self._sidecars = _start_sidecars(spec)
        self._presence = PresencePort(spec.interface, spec.controller_address) if spec.answers_presence else None
        from megatron_ft.control.certificates import Certificates
        from megatron_ft.control.rpc import ControllerClient

        certificates = Certificates.read(spec.tls_dir)
        self._client = ControllerClient(spec.controller_address, token=spec.token, certificates=certificates)
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._orders: deque[Order | _Refused] = deque()
        self._outbox = Outbox(self._wake)
        self._exit_code: int | None = None
        self._has_started = False
        """Whether ranks of this node have ever been started."""
        self._has_finished = False
        """Whether the run has finished training, so that no later job continues it."""
        self._socket_path = socket_path(Path(spec.runtime_dir), spec.node)
        self._listener = listen(self._socket_path)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        timeout_seconds = spec.heartbeat_timeout_seconds
        self._ranks = Ranks(
            spec.node, self._listener, self._selector, self._outbox, heartbeat_timeout_seconds=timeout_seconds
        )
        self._check_life_at = self._answered_at = time.monotonic()
        self._silence: str | None = None
        """Reason why the controller did not answer the last call for orders; None if it answered."""

    def run(self) -> int:
        """Serve until the controller orders this agent to end, or is lost. Return the process's exit code.

        Raises:
            ControllerSilent: the controller does not answer. The ranks run until the caller calls ``close``.
        """
        for source, callback in (
            (self._listener, self._ranks.accept),
            (self._forkserver.sock, self._read_forkserver),
            (self._wake_receive, self._woken),
            (sys.stdin.fileno(), self._launcher_closed),
        ):
            self._selector.register(source, selectors.EVENT_READ, callback)
        if self._presence is not None:
            self._presence.watch(self._selector)
        self._sidecars.watch(self._selector, on_ready=self._join)
        while self._exit_code is None:
            for key, _ in self._selector.select(self._seconds_left()):
                key.data()
            self._sidecars.check_in_time()
            self._check_life()
        return self._exit_code

    def _seconds_left(self) -> float:
        sidecars, ranks = self._sidecars.seconds_left(), max(0.0, self._check_life_at - time.monotonic())
        return ranks if sidecars is None else min(sidecars, ranks)

    def _check_life(self) -> None:
        now, interval_seconds = time.monotonic(), self._spec.heartbeat_interval_seconds
        late_seconds = now - self._check_life_at
        if late_seconds < 0:
            return
        self._check_life_at = now + interval_seconds
        self._signal(self._ranks.check_life(now), signal.SIGKILL)
        # While this process was suspended (SIGSTOP, a paused machine), it received no answer: that time does not count.
        if late_seconds > interval_seconds:
            self._answered_at = min(now, self._answered_at + late_seconds)
        if self._silence is not None and now - self._answered_at > self._spec.lost_controller_seconds:
            raise ControllerSilent(f"the controller does not answer: {self._silence}")

    def _join(self) -> None:
        join = Join(
            node=self._spec.node,
            process_id=self._spec.process_id or os.getpid(),
            sidecars=self._sidecars.addresses(),
            store=self._spec.store,
            presence=None if self._presence is None else self._presence.endpoint,
        )
        joined = self._client.insist("join", encode(join), timeout_seconds=_JOIN_SECONDS)
        who, self._answered_at = {"node": self._spec.node, "session": joined["session"]}, time.monotonic()
        orders = threading.Thread(target=self._ask_for_orders, name="orders", args=(who, joined["after"]), daemon=True)
        sender = threading.Thread(target=self._send_reports, name="sender", args=(who,), daemon=True)
        orders.start()
        sender.start()

    def close(self) -> None:
        """Disconnect from the fork server, which then kills the ranks. End the sidecars, and remove the socket file."""
        self._forkserver.close()
        self._sidecars.close(has_finished=self._has_finished)
        self._listener.close()
        if self._presence is not None:
            self._presence.close()
        self._socket_path.unlink(missing_ok=True)
        self._use.end()

    # --- threads -------------------------------------------------------------------------------------------------

    def _ask_for_orders(self, who: Message, after: int) -> None:
        # Runs in a thread: fetches orders by long polls, which the controller also counts as heartbeats.
        from megatron_ft.control.rpc import RpcError

        while True:
            request = {**who, "after": after, "wait_seconds": self._spec.heartbeat_interval_seconds}
            try:
                # The controller answers after at most ``wait_seconds``, or up to 20 s later if it is busy.
                orders = self._client.call("poll", request, timeout_seconds=request["wait_seconds"] + 20)["orders"]
            except RpcError as error:
                if error.refused:
                    self._order(_Refused(str(error)))
                    return
                # The main thread decides whether the controller is lost: it knows how long this process was suspended.
                self._silence = str(error)
                self._retry_pause.wait(0.2)
                continue
            self._answered_at, self._silence, after = time.monotonic(), None, after + len(orders)
            try:
                decoded = [Order.decode(order) for order in orders]
            except ControlError as error:
                self._order(_Refused(str(error)))
                return
            for order in decoded:
                self._order(order)
            if any(isinstance(order, messages.End) for order in decoded):
                return

    _retry_pause = threading.Event()

    def _send_reports(self, who: Message) -> None:
        # Runs in a thread: delivers the items of the outbox in order, and repeats a call that fails.
        from megatron_ft.control.rpc import RpcError

        while True:
            first, items = self._outbox.wait_batch()
            body = {**who, "first": first, "items": items}
            try:
                self._outbox.acknowledge(self._client.call("deliver", body, timeout_seconds=60)["next"])
            except RpcError as error:
                if error.refused:
                    self._order(_Refused(str(error)))
                    return
                # No report is dropped: the call is repeated until it succeeds or ``_check_life`` decides that the
                # controller is lost.
                self._retry_pause.wait(0.2)

    def _order(self, order: Order | _Refused) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_send.send(b"\0")

    # --- main thread ---------------------------------------------------------------------------------------------

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receive.recv(4096)
        while self._orders and self._exit_code is None:
            self._obey(self._orders.popleft())
        self._ranks.resume()

    def _obey(self, order: Order | _Refused) -> None:
        node = self._spec.node
        match order:
            case messages.Start():
                self._start(order)
            case messages.Break() if node in order.lost:
                self._signal(self._ranks.numbers, signal.SIGKILL)
            case messages.Break() | messages.Change():
                self._broadcast(to_message(order))
            case messages.Reform():
                self._reform(order)
            case messages.Stop():
                # Ranks that wait for the next membership do not react to SIGTERM; this message ends their wait.
                if order.survivors_end:
                    self._broadcast({"op": "end", "reason": order.reason})
                self._signal(self._ranks.numbers, signal.SIGTERM)
            case messages.Kill():
                if node in order.nodes:
                    self._signal(self._ranks.numbers, signal.SIGKILL)
            case messages.End():
                self._exit_code, self._has_finished = 0, order.has_finished
            case _Refused(reason):
                self._lose_controller(reason)

    def _lose_controller(self, reason: str) -> None:
        print(
            f"node {self._spec.node}: the agent ends the ranks of this node: {reason}",
            file=sys.stderr,
            flush=True,
        )
        self._exit_code = ControlError.exit_code

    def _launcher_closed(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self._lose_controller("the launcher has ended")

    def _start(self, order: messages.Start) -> None:
        # Start the ranks of this node if the order names the node. Joining ranks have no number in a membership yet.
        node = self._spec.node
        numbers = order.ranks.get(str(node))
        if numbers is None:
            return
        if self._spec.kept_servers is not None and not self._has_started:
            self._has_started = True
            end_unused(self._spec.kept_servers, token=self._spec.token)
        kept = [field.name for field in fields(order) if field.name not in ("ranks", "sidecars", "reason")]
        shared = {name: getattr(order, name) for name in kept}
        processes = zip(order.nodes, order.local_ranks, strict=True)
        found = {local_rank: rank for rank, (on_node, local_rank) in enumerate(processes) if on_node == node}
        for local_rank, number in enumerate(numbers):
            # A hot spare starts like a joining rank: it waits for a membership.
            is_joining = order.is_joining or local_rank not in found
            rank = number if is_joining else found[local_rank]
            about = {"rank": rank, "is_joining": is_joining, "number": number, "local_rank": local_rank, "node": node}
            self._spawn(number, {**shared, **about, "sidecars": self._sidecars.for_ranks(order.sidecars)})

    def _spawn(self, number: int, spec: Message) -> None:
        log = Path(spec["run_dir"]) / "logs" / f"rank-{number:05d}.log"
        # ``expect`` precedes the request, because the rank may connect before the fork server has answered.
        self._ranks.expect(number, start=spec["start"], generation=spec["generation"], log=log)
        # An environment variable of this process has priority: the user has set it for this cluster.
        environment = {**rank_environment(from_dict(spec["config"]), number), **os.environ}
        spec = {**spec, "agent_socket": str(self._socket_path), "environment": environment}
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            send(self._forkserver.sock, {"op": "spawn", "rank": number, "spec": spec}, [descriptor])
        finally:
            os.close(descriptor)

    def _reform(self, order: messages.Reform) -> None:
        following, node = order.next, self._spec.node
        if node in following.members:
            self._ranks.generation = following.generation
            self._broadcast({"op": "reform", "next": encode(following)})
        elif node in order.lost:
            self._signal(self._ranks.numbers, signal.SIGKILL)
        elif node in order.leaving:
            self._broadcast({"op": "leave", "generation": following.generation - 1, "reason": order.reason})

    def _broadcast(self, message: Message) -> None:
        self._signal(self._ranks.broadcast(message), signal.SIGKILL)

    def _signal(self, ranks: Iterable[int], number: signal.Signals) -> None:
        for rank in ranks:
            # The fork server sends the signal. As the parent of the rank, it knows whether the process id still belongs
            # to the rank.
            send(self._forkserver.sock, {"op": "signal", "rank": rank, "signal": int(number)})

    def _read_forkserver(self) -> None:
        messages, closed = self._forkserver.pump()
        for message in messages:
            if message["op"] == "exited":
                self._ranks.exited(message)
            elif message["op"] == "spawned":
                self._ranks.spawned(message["rank"], message["process_id"])
        if closed:
            self._lose_controller("the fork server has ended")


def _start_sidecars(spec: AgentSpec) -> Sidecars:
    return Sidecars(
        spec.sidecars,
        node=spec.node,
        runtime_dir=Path(spec.runtime_dir),
        log_dir=Path(spec.log_dir),
        interface=spec.interface,
        token=spec.token,
        kept=spec.kept_servers,
    )


def _connect(path: str) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
            return sock
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            if time.monotonic() > deadline:
                raise ControlError(
                    f"launch.forkserver_socket={path}: no fork server listens at this socket ({error})"
                ) from error
            threading.Event().wait(0.02)


def _read_spec() -> AgentSpec:
    line = read_line(sys.stdin.fileno())
    if not line.endswith(b"\n"):
        raise ControlError("the launcher closed standard input before it sent the node's spec")
    found: AgentSpec = decode(AgentSpec, parse_json(line))
    return found


def serve(spec: AgentSpec) -> int:
    """Run a node's agent until the job has ended. Return the process's exit code.

    Raises:
        ControllerSilent: the controller did not answer for ``lost_controller_seconds``. The node's ranks have ended.
    """
    agent = None
    try:
        agent = _Agent(spec)
        return agent.run()
    except ControllerSilent:
        raise
    except (MegatronFtError, OSError) as error:
        print(f"node agent: {error}", file=sys.stderr, flush=True)
        return ControlError.exit_code
    finally:
        if agent is not None:
            agent.close()


def main() -> int:
    """Entry point of the agent's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return serve(_read_spec())
    except ControllerSilent as error:
        print(f"node agent: {error}", file=sys.stderr, flush=True)
        return ControlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
