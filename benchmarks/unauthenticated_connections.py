"""Claim ``unauthenticated-connections``: unauthenticated peers that use up file descriptors stop no job and block no
agent.

The real controller's process, with a soft and a hard limit of 1,024 descriptors, serves 100 agents with the real
protocol (``light_agents``). Then 1,500 connections without a token are opened to its port, and opened again whenever
they are closed. Meanwhile all calls of agents must be answered, and also operators' calls over new connections. Then a
node is lost, so that the controller must open files and find a port. The agent of this node comes back over a new
connection, and the node becomes a member again.
"""

import asyncio
import contextlib
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.control_plane_scale import ask_status, healthy_nodes_lost, status_when
from benchmarks.light_agents import Fleet
from benchmarks.real_controller import RealController, real_controller
from benchmarks.report import finish, parse_arguments
from megatron_ft.control.admin import JobNotRunning
from megatron_ft.control.membership.events import KillRequested, NodeLost
from megatron_ft.framing import Message
from megatron_ft.testing.attacks import headers_without_body

ID = "unauthenticated-connections"
NUM_AGENTS, QUICK_AGENTS = 100, 10
NUM_STRANGERS, QUICK_STRANGERS = 1500, 400
NUM_DESCRIPTORS, QUICK_DESCRIPTORS = 1024, 256
NUM_STATUS_CALLS, QUICK_STATUS_CALLS = 20, 5
HELD_SECONDS, QUICK_HELD_SECONDS = 30.0, 4.0
LIMIT_SECONDS = 60.0
LOST_NODE = 3
_CONNECT_SECONDS = 1.0


class Crowd(threading.Thread):
    """Unauthenticated peers, with up to a given number of connections, which are opened again when they are closed."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(name="crowd", daemon=True)
        host, _, port = address.rpartition(":")
        self._target, self._number = (host, int(port)), number
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self.num_opened = 0
        self.num_closed = 0
        """Number of connections that the controller closed."""
        self.most_held = 0

    def run(self) -> None:
        """Keep connections open until ``end`` is called."""
        while not self._over.is_set():
            while len(self._selector.get_map()) < self._number and not self._over.is_set():
                if not self._open():
                    break
            self.most_held = max(self.most_held, len(self._selector.get_map()))
            for key, _ in self._selector.select(0.05):
                self._read(key.fileobj)

    def _open(self) -> bool:
        """Open a connection. Half of the connections stay silent; the other half begins a call without a token."""
        try:
            sock = socket.create_connection(self._target, timeout=_CONNECT_SECONDS)
            if self.num_opened % 2:
                sock.sendall(headers_without_body("/Controller/poll"))
        except OSError:
            return False
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)
        self.num_opened += 1
        return True

    def _read(self, sock: object) -> None:
        assert isinstance(sock, socket.socket), "registered above"
        try:
            if sock.recv(65536):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # a reset connection is closed as well
        self._selector.unregister(sock)
        sock.close()
        self.num_closed += 1

    def end(self) -> None:
        """Close all connections."""
        self._over.set()
        self.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


@contextlib.contextmanager
def strangers(address: str, number: int) -> Iterator[Crowd]:
    """Keep connections without a token open during the block."""
    crowd = Crowd(address, number)
    crowd.start()
    try:
        yield crowd
    finally:
        crowd.end()


async def endure(job: RealController, quick: bool) -> tuple[list[str], dict[str, float]]:
    """Run the job while the connections are open. Return problems and counts."""
    num_agents = QUICK_AGENTS if quick else NUM_AGENTS
    fleet, problems = Fleet(job.address, job.token), []
    for node in range(num_agents):
        fleet.begin(node, 1000 + node)
    status = await status_when(job.run_dir, "running", LIMIT_SECONDS)
    if status["phase"] != "running":
        problems.append(f"the job is {status['phase']} before any disturbance")
    with strangers(job.address, QUICK_STRANGERS if quick else NUM_STRANGERS) as crowd:
        began = time.monotonic()
        full = QUICK_DESCRIPTORS if quick else NUM_DESCRIPTORS
        while crowd.num_opened < full and time.monotonic() - began < LIMIT_SECONDS:
            await asyncio.sleep(0.05)
        before = {node: agent.answers for node, agent in fleet.agents.items()}
        slowest, num_repeated = 0.0, 0
        for _ in range(QUICK_STATUS_CALLS if quick else NUM_STATUS_CALLS):
            asked = time.monotonic()
            _, repeated = await asyncio.to_thread(status_in_time, job.run_dir)
            num_repeated += repeated
            slowest = max(slowest, time.monotonic() - asked)
        process_id = await fleet.kill(LOST_NODE)
        job.link.post(NodeLost(LOST_NODE, time.time(), "its process was killed by SIGKILL", process_id))
        if await fleet.last_arrival("reform", 1, LIMIT_SECONDS) is None:
            problems.append(f"no next membership without node {LOST_NODE} within {LIMIT_SECONDS:g} s")
        fleet.begin(LOST_NODE, 5000)
        if await fleet.last_arrival("reform", 2, LIMIT_SECONDS) is None:
            problems.append(f"node {LOST_NODE} did not become a member again within {LIMIT_SECONDS:g} s")
        held_seconds = QUICK_HELD_SECONDS if quick else HELD_SECONDS
        await asyncio.sleep(max(0.0, held_seconds - (time.monotonic() - began)))
        status, repeated = await asyncio.to_thread(status_in_time, job.run_dir)
        num_repeated += repeated
        silent = [node for node, agent in fleet.agents.items() if agent.answers < before.get(node, 0) + 2]
        counts = {"opened": crowd.num_opened, "closed": crowd.num_closed, "most held at once": crowd.most_held}
    problems += [f"agents {silent} received no answers"] if silent else []
    if status["members"] != sorted(fleet.agents):
        problems.append(f"the members are {status['members']}, but the living nodes are {sorted(fleet.agents)}")
    problems += [f"node {node} was refused: {why}" for node, why in fleet.refused.items()]
    problems += [f"the controller was replaced {job.num_replaced} times"] if job.num_replaced else []
    retries = sum(agent.retries for agent in fleet.agents.values())
    job.link.post(KillRequested())
    await fleet.end(LIMIT_SECONDS)
    counts |= {"slowest status call in seconds": slowest, "status calls made again": num_repeated}
    return problems, {**counts, "calls made again": retries}


def status_in_time(run_dir: Path, ask: Callable[[Path], Message] = ask_status) -> tuple[Message, int]:
    """Return the job's status, and the number of earlier calls that were not answered.

    The controller may close a new connection together with unauthenticated ones, before the token has arrived. The
    connection is then opened again, as agents do.

    Raises:
        JobNotRunning: no call was answered in time.
    """
    deadline, repeated = time.monotonic() + LIMIT_SECONDS, 0
    while True:
        try:
            return ask(run_dir), repeated
        except JobNotRunning:
            if time.monotonic() > deadline:
                raise
            repeated += 1
            time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    quick = arguments.quick
    num_agents, limit = (QUICK_AGENTS, QUICK_DESCRIPTORS) if quick else (NUM_AGENTS, NUM_DESCRIPTORS)
    number = QUICK_STRANGERS if quick else NUM_STRANGERS
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        with real_controller(Path(folder), num_agents, 1, num_descriptors=limit) as job:
            problems, counts = asyncio.run(endure(job, quick))
        wrong = healthy_nodes_lost(Path(folder), [LOST_NODE])
        if job.end is None:
            problems.append("the job did not end")
    enough = counts["opened"] >= number
    figure = (
        f"{counts['opened']:.0f} connections without a token, up to {number} at a time, to a controller with {limit} "
        f"descriptors: {num_agents} agents continued, {len(wrong)} healthy nodes lost, a lost one came back"
    )
    return finish(
        arguments.out,
        ID,
        passed=enough and not problems and not wrong,
        figure=figure if not problems and not wrong else f"{len(problems)} problems, {len(wrong)} healthy nodes lost",
        threshold="0 healthy nodes lost, every agent and operator answered, a new agent gets in",
        counts={"agents": num_agents, "strangers": number, "descriptors": limit},
        details={"problems": problems, "healthy_nodes_lost": wrong, **counts},
    )


if __name__ == "__main__":
    sys.exit(main())
