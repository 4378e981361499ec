"""Runs many node agents without ranks in one process. They use the real protocol with a real controller.

Each agent has its own connection, registers, and polls for orders as often as a real agent. It reports the progress of
its ranks once a second. After an order that ends the membership, it also reports the position of each rank, with a vote
and a traceback of typical length.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]

from megatron_ft.planning.recovery.membership import Position
from megatron_ft.testing.votes import vote_of

HEARTBEAT_SECONDS = 1.0
CALL_SECONDS = 30.0
TRACEBACK_BYTES = 1000
_RETRY_SECONDS = 0.2
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)

Message = dict[str, Any]


@dataclass(slots=True)
class Rank:
    """Data that an agent has about one rank."""

    number: int
    """Number of the rank in the control plane, which does not change."""
    rank: int
    """Number of the rank in the current membership."""


@dataclass(slots=True)
class LightAgent:
    """Agent of one node. All agents run as coroutines in one event loop."""

    address: str
    token: str
    node: int
    process_id: int
    on_order: Callable[["LightAgent", Message, float], None]
    """Called with this agent, each order and the time at which the order arrived, by ``time.monotonic``."""
    refusal: str | None = None
    """Reason why the controller has permanently refused this agent; None if it has not."""
    generation: int = 0
    iteration: int = 1
    ranks: list[Rank] = field(default_factory=list)
    start: int = 0
    is_joining: bool = False
    """Whether the ranks of this agent wait for their first membership. Until then the agent ignores other orders."""
    sent: int = 0
    outbox: list[Message] = field(default_factory=list)
    retries: int = 0
    """Number of calls that were made again."""
    answers: int = 0
    """Number of calls that were answered."""
    _session: Message = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def live(self) -> None:
        """Register, poll for orders and deliver reports until the job ends or the task is cancelled."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
        async with grpc.aio.insecure_channel(self.address, options=options) as channel:
            joined = await self._call(channel, "join", {"node": self.node, "process_id": self.process_id})
            if joined is None:
                return
            self._session = {"node": self.node, "session": joined["session"]}
            tasks = [asyncio.create_task(work(channel)) for work in (self._deliver, self._progress)]
            try:
                await self._poll(channel, joined["after"])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, channel: Any, method: str, body: Message) -> Message | None:
        """Call a method until it is answered. Return None if the controller has refused this agent."""
        stub = channel.unary_unary(f"/Controller/{method}")
        metadata = (("x-megatron-ft-token", self.token),)
        while True:
            try:
                payload = json.dumps(body).encode()
                answer = await stub(payload, timeout=CALL_SECONDS, metadata=metadata, wait_for_ready=True)
                self.answers += 1
                return dict(json.loads(answer))
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    self.refusal = f"{method}: {error.details()}"
                    return None
                self.retries += 1
                await asyncio.sleep(_RETRY_SECONDS)

    async def _poll(self, channel: Any, after: int) -> None:
        while True:
            answer = await self._call(
                channel, "poll", {**self._session, "after": after, "wait_seconds": HEARTBEAT_SECONDS}
            )
            if answer is None:
                return
            now = time.monotonic()
            after += len(answer["orders"])
            for order in answer["orders"]:
                self._obey(order)
                self.on_order(self, order, now)
                if order["op"] == "end":
                    return

    async def _deliver(self, channel: Any) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self.outbox:
                body = {**self._session, "first": self.sent, "items": self.outbox[:500]}
                answer = await self._call(channel, "deliver", body)
                if answer is None:
                    return
                del self.outbox[: answer["next"] - self.sent]
                self.sent = answer["next"]

    async def _progress(self, _channel: Any) -> None:
        """Report the progress of the ranks once a second, as a real agent does. Agents report at different moments."""
        await asyncio.sleep(HEARTBEAT_SECONDS * (self.node % 64) / 64)
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.iteration += 1
            self._say(*(self._item(rank, "progress", **self._place(), step=1) for rank in self.ranks))

    def _obey(self, order: Message) -> None:
        match order["op"]:
            case "start" if str(self.node) in order["ranks"]:
                numbers = order["ranks"][str(self.node)]
                first = numbers[0] if order["is_joining"] else order["nodes"].index(self.node)
                self.start, self.generation = order["start"], order["generation"]
                self.is_joining = order["is_joining"]
                self.ranks = [Rank(number, first + local) for local, number in enumerate(numbers)]
                self._say(*(self._item(rank, "reported") for rank in self.ranks))
            case "break" if self.node not in order["lost"] and not self.is_joining:
                self._say(*(self._item(rank, "broken", **self._words(rank)) for rank in self.ranks))
            case "change" if not self.is_joining:
                about = {"planned": True, "at_seconds": time.time()}
                self._say(*(self._item(rank, "broken", **self._position(rank), **about) for rank in self.ranks))
            case "reform" if self.node in order["next"]["nodes"]:
                self.generation, self.is_joining = order["next"]["generation"], False
                first = order["next"]["nodes"].index(self.node)
                for local, rank in enumerate(self.ranks):
                    rank.rank = first + local
            case "kill" | "stop":
                about = {"returncode": -9, "at_seconds": time.time(), "done": False, **self._place()}
                self._say(*(self._item(rank, "exited", **about) for rank in self.ranks))
                self.ranks = []

    def _place(self) -> Message:
        return {"iteration": self.iteration, "phase": "backward"}

    def _words(self, rank: Rank) -> Message:
        """Return the report of a rank after a loss. All ranks report the same completed iteration and the same vote."""
        traceback = "Traceback (most recent call last):\n".ljust(TRACEBACK_BYTES, ".")
        about = {"at_seconds": time.time(), "error": "RuntimeError: a peer has gone", "exit_code": None}
        return {**self._position(rank), "traceback": traceback, **self._place(), **about}

    def _position(self, rank: Rank) -> Message:
        vote = vote_of(4, self.generation)
        position = Position(rank=rank.rank, generation=self.generation, completed=4, contributed=4, vote=vote)
        return {"position": position.to_json()}

    def _item(self, rank: Rank, op: str, **about: Any) -> Message:
        return {"op": op, "rank": rank.number, "start": self.start, "generation": self.generation, **about}

    def _say(self, *items: Message) -> None:
        self.outbox += items
        self._changed.set()


class Fleet:
    """Agents of a job, and the times at which the newest order of each kind reached each of them."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self.agents: dict[int, LightAgent] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._arrived: dict[tuple[str, int], dict[int, float]] = {}

    def begin(self, node: int, process_id: int) -> None:
        """Start the agent of a node, which may replace an earlier agent of the node."""
        self.agents[node] = LightAgent(self._address, self._token, node, process_id, self._hear)
        self._tasks[node] = asyncio.create_task(self.agents[node].live())

    async def kill(self, node: int) -> int:
        """Kill an agent: its calls end, and it sends nothing more. Return its process id."""
        task = self._tasks.pop(node)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return self.agents.pop(node).process_id

    def _hear(self, agent: LightAgent, order: Message, now: float) -> None:
        generation = order["next"]["generation"] if order["op"] == "reform" else order.get("generation", 0)
        self._arrived.setdefault((order["op"], generation), {})[agent.node] = now

    async def last_arrival(self, op: str, generation: int, seconds: float) -> float | None:
        """Return the time at which the last agent received an order; None if some agents have not received it after
        ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            arrived = self._arrived.get((op, generation), {})
            if arrived.keys() >= self.agents.keys():
                return max(arrived.values())
            await asyncio.sleep(0.01)
        return None

    @property
    def refused(self) -> dict[int, str]:
        """Return the agents that the controller has permanently refused, with the reasons."""
        return {node: agent.refusal for node, agent in self.agents.items() if agent.refusal is not None}

    async def end(self, seconds: float) -> None:
        """Wait until the agents see the end of the job, then cancel those that do not."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for node in list(self._tasks):
            await self.kill(node)
