"""A node's process: starts its ranks, watches them, forwards their reports.

``python -m megatron_ft.control.node.agent`` reads one line of JSON from standard input (address and token of the
controller, node number, sockets) and keeps it open: when it closes, the launcher is gone and the node ends. The main
thread owns everything and waits on sockets; one thread asks the controller for orders, one sends it what ranks report.
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
from megatron_ft.control.messages import Join, Order, decode_order, to_message
from megatron_ft.control.node.fork_server import listen
from megatron_ft.control.node.outbox import Outbox
from megatron_ft.control.node.ranks import Ranks
from megatron_ft.control.node.sidecars import Sidecars
from megatron_ft.control.node.store_endpoint import StoreEndpoint
from megatron_ft.control.runtime_dir import Use, remove_stale_sockets, socket_path
from megatron_ft.errors import ControlError, MegatronFtError
from megatron_ft.framing import FrameReader, Message, read_line, send
from megatron_ft.planning.rank_environment import rank_environment
from megatron_ft.serde import decode, encode
from megatron_ft.strict_json import parse_json

_CONNECT_SECONDS = 5.0
_JOIN_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Specification that an agent reads from standard input."""

    controller_address: str
    token: str
    node: int
    runtime_dir: str
    """A directory of mode 0700 for the node's sockets; removed by the last process of the job that leaves it."""
    forkserver_socket: str
    lost_controller_seconds: float = 60.0
    """A controller that does not answer for so long is lost, and the node ends its ranks: another one had the time to
    take over."""
    sidecars: dict[str, str] = field(default_factory=dict)
    """Name to module of the processes that the node has beside its ranks, see ``sidecars``."""
    interface: str = ""
    """Address the sidecars bind to."""
    log_dir: str = ""
    """Folder of the sidecars' logs."""
    heartbeat_interval_seconds: float = 1.0
    """Interval between two signs of life that the node gives, or requests from its ranks."""
    heartbeat_timeout_seconds: float = 10.0
    """A rank that gives none for so long is killed."""

    tls_dir: str | None = None
    """Value of ``launch.tls_dir``."""
    process_id: int | None = None
    """Process id on the launcher's machine by which this node is known there; null: the agent's own."""
    store: StoreEndpoint | None = None
    """Null where the controller finds ports itself, on the same machine."""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(encode(self)).encode() + b"\n"


class ControllerSilent(ControlError):
    """The controller does not answer any more."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """The controller is lost to this node."""

    reason: str
    is_refused: bool
    """It answers, and refuses this node; else it does not answer."""


class Agent:
    """The node's main thread."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._use = Use(Path(spec.runtime_dir))
        remove_stale_sockets(Path(spec.runtime_dir), spec.node)
        self._forkserver = FrameReader(_connect(spec.forkserver_socket))
        # Forked by this thread before there are others, and before gRPC is imported, which does not survive a fork.
        self._sidecars = _start_sidecars(spec)
        from megatron_ft.control.certificates import read_certificates
        from megatron_ft.control.node.controller_client import ControllerClient

        certificates = read_certificates(spec.tls_dir)
        self._client = ControllerClient(spec.controller_address, token=spec.token, certificates=certificates)
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._orders: deque[Order | _Lost] = deque()
        self._outbox = Outbox(self._wake)
        self._exit_code: int | None = None
        self._socket_path = socket_path(Path(spec.runtime_dir), spec.node)
        self._listener = listen(self._socket_path)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        timeout_seconds = spec.heartbeat_timeout_seconds
        self._ranks = Ranks(
            spec.node, self._listener, self._selector, self._outbox, heartbeat_timeout_seconds=timeout_seconds
        )
        self._check_life_at = time.monotonic()

    def run(self) -> int:
        """Serve until the controller orders the end or is lost; the process's exit code.

        Raises:
            ControllerSilent: it does not answer. Ranks end when this node is closed.
        """
        for source, callback in (
            (self._listener, self._ranks.accept),
            (self._forkserver.sock, self._read_forkserver),
            (self._wake_receive, self._woken),
            (sys.stdin.fileno(), self._launcher_closed),
        ):
            self._selector.register(source, selectors.EVENT_READ, callback)
        self._sidecars.watch(self._selector, on_ready=self._join)
        while self._exit_code is None:
            for key, _ in self._selector.select(self._seconds_left()):
                key.data()
            self._sidecars.check_in_time()
            self._check_life()
        return self._exit_code

    def _seconds_left(self) -> float:
        """Time until there is something to do even if no message arrives."""
        sidecars, ranks = self._sidecars.seconds_left(), max(0.0, self._check_life_at - time.monotonic())
        return ranks if sidecars is None else min(sidecars, ranks)

    def _check_life(self) -> None:
        now = time.monotonic()
        if now >= self._check_life_at:
            self._check_life_at = now + self._spec.heartbeat_interval_seconds
            self._signal(self._ranks.check_life(now), signal.SIGKILL)

    def _join(self) -> None:
        join = Join(
            node=self._spec.node,
            process_id=self._spec.process_id or os.getpid(),
            sidecars=self._sidecars.addresses(),
            store=self._spec.store,
        )
        joined = self._client.insist("join", encode(join), timeout_seconds=_JOIN_SECONDS)
        who = {"node": self._spec.node, "session": joined["session"]}
        orders = threading.Thread(target=self._ask_for_orders, name="orders", args=(who, joined["after"]), daemon=True)
        sender = threading.Thread(target=self._send_reports, name="sender", args=(who,), daemon=True)
        orders.start()
        sender.start()

    def close(self) -> None:
        """Disconnect from the fork server, which kills the ranks, end sidecars, remove the socket file."""
        self._forkserver.close()
        self._sidecars.close()
        self._listener.close()
        self._socket_path.unlink(missing_ok=True)
        self._use.end()

    # --- threads -------------------------------------------------------------------------------------------------

    def _ask_for_orders(self, who: Message, after: int) -> None:
        """Thread: fetch orders by long polls, which are signs of life for the controller."""
        from megatron_ft.control.rpc import RpcError

        last_answer = time.monotonic()
        while True:
            request = {**who, "after": after, "wait_seconds": self._spec.heartbeat_interval_seconds}
            try:
                # The controller answers after ``wait_seconds`` at most; the rest is for a busy controller.
                orders = self._client.call("poll", request, timeout_seconds=request["wait_seconds"] + 20)["orders"]
            except RpcError as error:
                if error.refused or time.monotonic() - last_answer > self._spec.lost_controller_seconds:
                    self._order(_Lost(str(error), error.refused))
                    return
                self._retry_pause.wait(0.2)
                continue
            last_answer, after = time.monotonic(), after + len(orders)
            try:
                decoded = [decode_order(order) for order in orders]
            except ControlError as error:
                self._order(_Lost(str(error), is_refused=True))
                return
            for order in decoded:
                self._order(order)
            if any(isinstance(order, messages.End) for order in decoded):
                return

    _retry_pause = threading.Event()

    def _send_reports(self, who: Message) -> None:
        """Thread: deliver the outbox, in order, each item once."""
        from megatron_ft.control.rpc import RpcError

        while True:
            first, items = self._outbox.wait_batch()
            body = {**who, "first": first, "items": items}
            try:
                self._outbox.acknowledge(self._client.call("deliver", body, timeout_seconds=60)["next"])
            except RpcError as error:
                if error.refused:
                    self._order(_Lost(str(error), is_refused=True))
                    return
                # Repeated without a limit: ``_ask_for_orders`` decides when the controller is lost, and no report is
                # dropped before.
                self._retry_pause.wait(0.2)

    def _order(self, order: Order | _Lost) -> None:
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

    def _obey(self, order: Order | _Lost) -> None:
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
                # Ranks that wait for a next membership do not see SIGTERM: the order ends their wait.
                if order.survivors_end:
                    self._broadcast({"op": "end", "reason": order.reason})
                self._signal(self._ranks.numbers, signal.SIGTERM)
            case messages.Kill():
                if node in order.nodes:
                    self._signal(self._ranks.numbers, signal.SIGKILL)
            case messages.End():
                self._exit_code = 0
            case _Lost(reason, is_refused=True):
                self._lose_controller(reason)
            case _Lost(reason):
                raise ControllerSilent(f"the controller does not answer: {reason}")

    def _lose_controller(self, reason: str) -> None:
        print(f"node {self._spec.node}: lost the controller, ending ranks: {reason}", file=sys.stderr, flush=True)
        self._exit_code = ControlError.exit_code

    def _launcher_closed(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self._lose_controller("the launcher has gone")

    def _start(self, order: messages.Start) -> None:
        """Start this node's ranks if the order is for it; those that join have no number in the membership yet."""
        node = self._spec.node
        numbers = order.ranks.get(str(node))
        if numbers is None:
            return
        first = numbers[0] if order.is_joining else order.nodes.index(node)
        kept = [field.name for field in fields(order) if field.name not in ("ranks", "sidecars", "reason")]
        shared = {name: getattr(order, name) for name in kept}
        for local_rank, number in enumerate(numbers):
            who = {"number": number, "rank": first + local_rank, "local_rank": local_rank, "node": node}
            self._spawn(number, {**shared, **who, "sidecars": self._sidecars.for_ranks(order.sidecars)})

    def _spawn(self, number: int, spec: Message) -> None:
        log = Path(spec["run_dir"]) / "logs" / f"rank-{number:05d}.log"
        # Before the request: the rank may connect before the fork server has answered.
        self._ranks.expect(number, start=spec["start"], generation=spec["generation"], log=log)
        # A variable that the user has set for this cluster wins.
        environment = {**rank_environment(from_dict(spec["config"]), number), **os.environ}
        spec = {**spec, "agent_socket": str(self._socket_path), "environment": environment}
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            send(self._forkserver.sock, {"op": "spawn", "rank": number, "spec": spec}, [descriptor])
        finally:
            os.close(descriptor)

    def _reform(self, order: messages.Reform) -> None:
        """Begin the next membership: ranks of a lost node are killed, those of one that leaves end, others wait."""
        following, node = order.next, self._spec.node
        if node in following.nodes:
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
            # The parent of the rank sends it: only there is the process id certain not to belong to another process.
            send(self._forkserver.sock, {"op": "signal", "rank": rank, "signal": int(number)})

    def _read_forkserver(self) -> None:
        messages, closed = self._forkserver.pump()
        for message in messages:
            if message["op"] == "exited":
                self._ranks.exited(message)
            elif message["op"] == "spawned":
                self._ranks.spawned(message["rank"], message["process_id"])
        if closed:
            self._lose_controller("the fork server has gone")


def _start_sidecars(spec: AgentSpec) -> Sidecars:
    return Sidecars(
        spec.sidecars,
        node=spec.node,
        runtime_dir=Path(spec.runtime_dir),
        log_dir=Path(spec.log_dir),
        interface=spec.interface,
        token=spec.token,
    )


def _connect(path: str) -> socket.socket:
    """Connect to a fork server whose socket is about to appear."""
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
                    f"launch.forkserver_socket={path}: no fork server listens there ({error})"
                ) from error
            threading.Event().wait(0.02)


def _read_spec() -> AgentSpec:
    line = read_line(sys.stdin.fileno())
    if not line.endswith(b"\n"):
        raise ControlError("the launcher closed standard input before it sent the node's spec")
    found: AgentSpec = decode(AgentSpec, parse_json(line))
    return found


def serve(spec: AgentSpec) -> int:
    """Be a node's agent until the job has ended; the process's exit code.

    Raises:
        ControllerSilent: it has not answered for ``lost_controller_seconds``; the node's ranks are ended.
    """
    agent = None
    try:
        agent = Agent(spec)
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
    """Entry of the node process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return serve(_read_spec())
    except ControllerSilent as error:
        print(f"node agent: {error}", file=sys.stderr, flush=True)
        return ControlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
