"""One job that loses nodes under a virtual clock: the product's decisions, and ranks that keep to the protocol."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ft.control import membership
from megatron_ft.control.facts import Fact, NodeJoined, NodeLost, RankBroken, RankExited, RankReported, Tick
from megatron_ft.control.membership_state import Decision, MembershipPolicy, Phase, State, Step
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.spread import Spread
from megatron_ft.planning.recovery.replicas import Declined, plan_replicas
from megatron_ft.planning.recovery.target import Position
from megatron_ft.topology import Cluster

LAST_ITERATION = 12
LONGEST_SECONDS = 10_000.0
NUM_EXPERTS, NUM_SLOTS, MIN_REPLICAS = 6, 6, 2
MIN_NODES = 2


@dataclass
class Rank:
    """A rank as the protocol sees it. ``node`` and ``start_rank`` never change."""

    start_rank: int
    node: int
    generation: int = 0
    history: list[Vote] = field(default_factory=list)
    """Votes of the iterations it has completed, in order."""
    contributed: int = 0
    settled: Vote | None = None
    is_alive: bool = True
    is_broken: bool = False
    is_done: bool = False

    @property
    def completed(self) -> int:
        """Newest iteration it has carried out."""
        return len(self.history)


class Job:
    """One seed's job, from its start to its end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.policy = MembershipPolicy(
            num_nodes=self.random.randint(3, 6),
            ranks_per_node=self.random.randint(1, 2),
            start_timeout_seconds=60.0,
            stop_timeout_seconds=20.0,
            min_nodes=MIN_NODES,
            max_restarts=self.random.randint(0, 1),
        )
        self.state: State = membership.initial(self.policy, self.now)
        self.counts: Counter[str] = Counter()
        self.ended: str | None = None
        self.decided: Counter[int] = Counter()
        self.placement = self.place(self.policy.world_size)
        self.channels = [0.0] * self.policy.num_nodes
        """When the last message of each node arrives: they keep their order."""
        self.cut_until = [0.0] * self.policy.num_nodes
        """Until when each node is cut off from all others: nothing reaches it, nothing leaves it."""
        self.ranks: list[Rank] = []
        self.tick_at: float | None = None

    def run(self) -> Counter[str]:
        """To its end; what happened in it.

        Raises:
            AssertionError: a rule was broken, or the job never ends.
        """
        for node in range(self.policy.num_nodes):
            self.tell(node, NodeJoined(node))
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            self.later(self.random.uniform(0.2, 4.0), self.kill_something)
        while self.events and self.ended is None:
            self.now, _, happens = heapq.heappop(self.events)
            assert self.now < LONGEST_SECONDS, f"no end: {self.state}"
            happens()
        assert self.ended is not None, f"nothing happens any more: {self.state}"
        self.check_end()
        return self.counts

    # -- time and messages --------------------------------------------------------------------------------

    def later(self, seconds: float, happens: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self.events, (self.now + seconds, next(self.order), happens))

    def delay(self) -> float:
        """Of one message or one piece of work; now and then a long one."""
        return self.random.choice((0.001, 0.01, 0.05, 0.2)) * self.random.random() + (
            1.5 * self.random.random() if self.random.random() < 0.05 else 0.0
        )

    def tell(self, node: int, fact: Fact) -> None:
        """A message of a node to the controller: in order, late, perhaps twice."""
        arrives = max(self.channels[node], self.cut_until[node], self.now + self.delay())
        self.channels[node] = arrives
        for _ in range(2 if self.random.random() < 0.05 else 1):
            self.later(arrives - self.now, lambda: self.controller_takes(fact))

    # -- the controller -----------------------------------------------------------------------------------

    def controller_takes(self, fact: Fact) -> None:
        """One fact, one step, checked and carried out."""
        before = self.state
        step = membership.advance(self.policy, before, fact, self.now)
        self.check_step(before, step)
        self.state = step.state
        self.counts[step.decision.value] += 1
        match step.decision:
            case Decision.START | Decision.RESTART:
                self.start(step.state.generation)
            case Decision.BREAK:
                self.order_ranks(lambda rank: self.break_rank(rank, before.generation))
                self.kill_rest_of(step.state.announced)
            case Decision.REFORM:
                self.reform(before, step)
            case Decision.STOP | Decision.KILL:
                self.order_ranks(self.end_rank)
            case Decision.END:
                self.ended = step.reason
        self.set_tick()

    def set_tick(self) -> None:
        """Wake the controller at its deadline, as its queue's time limit does."""
        deadline = self.state.deadline_seconds
        if deadline is not None and deadline != self.tick_at:
            self.tick_at = deadline
            self.later(max(0.0, deadline - self.now), lambda: self.controller_takes(Tick()))

    def order_ranks(self, carry_out: Callable[[Rank], None]) -> None:
        """An order reaches every rank in its own time."""
        for rank in self.ranks:
            self.reach(rank, lambda rank=rank: carry_out(rank) if rank.is_alive else None)  # type: ignore[misc]

    def reach(self, rank: Rank, carry_out: Callable[[], None]) -> None:
        """An order reaches a rank in its own time, once its node is not cut off."""
        self.later(max(self.delay(), self.cut_until[rank.node] - self.now), carry_out)

    def start(self, generation: int) -> None:
        """All ranks begin, or begin anew from nothing."""
        self.placement = self.place(self.policy.world_size)
        self.ranks = [Rank(rank, self.policy.node_of(rank), generation) for rank in range(self.policy.world_size)]
        for rank in self.ranks:
            self.tell(rank.node, RankReported(rank.start_rank))
            self.later(self.delay(), lambda rank=rank: self.work(rank))  # type: ignore[misc]

    def reform(self, before: State, step: Step) -> None:
        """Ranks that go on are told the target and where everybody's experts are."""
        reform = step.reform
        assert reform is not None
        self.check_reform(before, step)
        found = plan_replicas(
            self.placement,
            reform.previous_ranks,
            lambda: self.place(len(reform.previous_ranks)),
            num_slots_per_rank=NUM_SLOTS,
            expert_bytes=1,
        )
        if isinstance(found, Declined):
            self.counts["declined"] += 1
            for rank in self.members(step.state):
                self.reach(rank, lambda rank=rank: self.end_rank(rank))  # type: ignore[misc]
            return
        found.validate()
        self.placement = found.placement
        held = {expert for by_rank in self.placement.slots[0] for expert in by_rank}
        assert held == set(range(NUM_EXPERTS)), "the plan does not hold every expert"
        for rank in self.members(step.state):
            self.reach(rank, lambda rank=rank: self.go_on(rank, step))  # type: ignore[misc]

    # -- ranks --------------------------------------------------------------------------------------------

    def members(self, state: State) -> list[Rank]:
        """Ranks of a membership, in order."""
        return [rank for rank in self.ranks if rank.node in state.members]

    def peers(self, rank: Rank) -> list[Rank]:
        """Ranks that form its groups with it: those of its generation's nodes, dead or alive."""
        nodes = self.nodes_of[rank.generation]
        return [other for other in self.ranks if other.node in nodes]

    nodes_of: dict[int, tuple[int, ...]]

    def work(self, rank: Rank) -> None:
        """The next thing in an iteration, unless the rank waits, is broken or is dead."""
        if not rank.is_alive or rank.is_broken or rank.is_done:
            return
        generation = rank.generation
        self.later(self.delay(), lambda: self.do(rank, generation))

    def do(self, rank: Rank, generation: int) -> None:
        """Contribute, settle, complete; a dead peer breaks the collective, sooner or later."""
        if not rank.is_alive or rank.is_broken or rank.generation != generation:
            return
        peers = self.peers(rank)
        cut = max(self.cut_until[other.node] for other in peers)
        if cut > self.now:  # a collective stands still; it is not broken
            self.later(cut - self.now, lambda: self.do(rank, generation))
            return
        behind = [other for other in peers if other.generation < generation]
        if behind and all(other.is_alive for other in behind):
            self.later(0.05, lambda: self.do(rank, generation))  # they are still being told of the membership
            return
        left = [other for other in peers if other.generation > generation]  # they have gone on without this node
        dead = bool(left) or any(not other.is_alive or other.is_broken for other in peers if other is not rank)
        settled = 0 if rank.settled is None else rank.settled.iteration
        if rank.completed < settled:
            assert rank.settled is not None
            rank.history.append(rank.settled)
            if rank.completed == LAST_ITERATION:
                self.finish(rank)
                return
        elif settled < rank.contributed:
            has_all = all(other.contributed >= rank.contributed for other in peers)
            if has_all and (not dead or self.random.random() < 0.5):
                rank.settled = self.vote(rank.contributed, generation)
            elif dead:
                self.break_rank(rank, generation)
                return
            else:
                self.later(0.02, lambda: self.do(rank, generation))
                return
        elif dead and self.random.random() < 0.7:
            self.break_rank(rank, generation)
            return
        else:
            rank.contributed += 1
        self.work(rank)

    def vote(self, iteration: int, generation: int) -> Vote:
        """The vote of an iteration as this generation settles it: another one would settle it to other values."""
        return Vote(
            generation=generation,
            iteration=iteration,
            found_inf=False,
            grad_norm=1.0 + generation,
            clip_coefficient=1.0,
            loss_scale=1.0,
            loss=iteration + generation / 8,
            num_tokens=8,
            aux_loss=0.0,
            z_loss=0.0,
        )

    def break_rank(self, rank: Rank, generation: int) -> None:
        """Its collective fails: it says how far it is, and waits."""
        if rank.is_broken or rank.is_done or rank.generation != generation or not rank.is_alive:
            return
        rank.is_broken = True
        members = self.nodes_of[generation]
        position = Position(
            rank=self.policy.number_among(members, rank.start_rank),
            generation=generation,
            completed=rank.completed,
            contributed=rank.contributed,
            vote=rank.settled,
        )
        self.tell(rank.node, RankBroken(rank.start_rank, position, self.now, rank.completed))

    def go_on(self, rank: Rank, step: Step) -> None:
        """The next membership reaches a rank: it finishes or undoes, and works on."""
        if not rank.is_alive:
            return
        assert step.reform is not None
        target = step.reform.target
        if rank.completed < target.iteration:
            assert target.vote is not None and rank.contributed == target.iteration, "it cannot finish"
            rank.history.append(target.vote)
            self.counts["finished"] += 1
        elif rank.contributed > target.iteration:
            self.counts["undone"] += 1
        assert rank.completed == target.iteration, f"at {rank.completed}, not {target.iteration}"
        rank.settled = rank.history[-1] if rank.history else None
        rank.contributed = rank.completed
        rank.generation, rank.is_broken = step.state.generation, False
        if rank.completed == LAST_ITERATION:
            self.finish(rank)
        else:
            self.work(rank)

    def finish(self, rank: Rank) -> None:
        """Its work is done."""
        rank.is_done = True
        rank.is_alive = False
        self.counts["ranks done"] += 1
        self.tell(rank.node, RankExited(rank.start_rank, 0, self.now, done=True, iteration=rank.completed))

    def die(self, rank: Rank, returncode: int) -> None:
        """A process ends before its work is done."""
        if rank.is_alive:
            rank.is_alive = False
            about = {"done": False, "iteration": rank.completed}
            self.tell(rank.node, RankExited(rank.start_rank, returncode, self.now, **about))

    def end_rank(self, rank: Rank) -> None:
        """It is asked to end, or ends by an error."""
        self.die(rank, 1)

    def kill_rest_of(self, nodes: frozenset[int]) -> None:
        """The agents of lost nodes end what is left there."""
        for rank in self.ranks:
            if rank.node in nodes:
                self.reach(rank, lambda rank=rank: self.die(rank, -9))  # type: ignore[misc]

    def kill_something(self) -> None:
        """A fault: one rank, a whole node with its agent, two ranks at once, or a node that is cut off for a while."""
        alive = [rank for rank in self.ranks if rank.is_alive]
        if not alive:
            return
        kind = self.random.choice(("rank", "rank", "node", "two", "cut"))
        self.counts[f"faults: {kind}"] += 1
        if kind == "cut":
            node = self.random.choice(alive).node
            self.cut_until[node] = self.now + self.random.choice((0.5, 3.0, 20.0, 90.0))
            return
        for victim in self.random.sample(alive, min(len(alive), 2 if kind == "two" else 1)):
            if kind != "node":
                self.die(victim, -9)
                continue
            for rank in self.ranks:
                if rank.node == victim.node:
                    rank.is_alive = False
            self.later(self.delay(), lambda node=victim.node: self.controller_takes(NodeLost(node, self.now)))  # type: ignore[misc]

    # -- what must hold -----------------------------------------------------------------------------------

    def check_step(self, before: State, step: Step) -> None:
        """One decision ends a generation; who is lost is lost; too few never go on."""
        after = step.state
        ends = step.decision in (Decision.REFORM, Decision.RESTART, Decision.END)
        self.decided[before.generation] += ends
        assert self.decided[before.generation] <= 1, f"generation {before.generation} was ended twice"
        assert after.generation - before.generation == (step.decision in (Decision.RESTART, Decision.REFORM))
        if after.phase in (Phase.RUNNING, Phase.REFORMING):
            assert len(after.members) >= self.policy.fewest_nodes, "too few go on"
        if step.decision is not Decision.RESTART:
            assert set(after.members) <= set(before.members), "a lost node came back"
        self.nodes_of = {**getattr(self, "nodes_of", {}), after.generation: after.members}

    def check_reform(self, before: State, step: Step) -> None:
        """Everybody who goes on has spoken, and nothing that a living rank has completed is undone."""
        assert step.reform is not None
        target = step.reform.target.iteration
        heard = {position.rank for position in step.reform.positions}
        for rank in self.members(step.state):
            assert self.policy.number_among(before.members, rank.start_rank) in heard, "a rank was not heard"
            assert rank.is_broken or not rank.is_alive, "a rank works on while others are asked"
            assert rank.completed <= target, "a completed iteration would be undone"
            settled = 0 if rank.settled is None else rank.settled.iteration
            assert settled <= target, "a settled iteration would be undone"

    def check_end(self) -> None:
        """All that did their work did the same: every iteration once, in order, with one vote each."""
        done = [rank for rank in self.ranks if rank.is_done]
        for rank in done:
            assert [vote.iteration for vote in rank.history] == list(range(1, LAST_ITERATION + 1))
            assert rank.history == done[0].history, "two ranks have another history"
            generations = [vote.generation for vote in rank.history]
            assert generations == sorted(generations), "an older membership had the last word"
        self.counts["finished jobs" if done else "ended jobs"] += 1

    @staticmethod
    def place(num_ranks: int) -> PlacementPlan:
        """Every expert on at least two ranks."""
        cluster = Cluster.of(num_ranks, 1)
        slots = num_ranks * NUM_SLOTS
        counts = [min(num_ranks, slots // NUM_EXPERTS)] * NUM_EXPERTS
        limited = [max(MIN_REPLICAS, min(count, MIN_REPLICAS + 1)) for count in counts]
        return Spread().place([limited], cluster, num_slots_per_rank=NUM_SLOTS)
