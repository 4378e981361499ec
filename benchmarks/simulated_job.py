"""Simulates one job under a virtual clock. Nodes are lost, leave and join. The project's code makes the decisions;
ranks are simulated."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from benchmarks.simulated_ranks import LAST_ITERATION, WAITING, Rank, Ranks
from megatron_ft.control.membership import machine as membership
from megatron_ft.control.membership.events import AddRequested, DrainRequested, MachineEvent, Tick
from megatron_ft.control.membership.state import BREAKABLE, Decision, MembershipPolicy, State, Step
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.spread import Spread
from megatron_ft.planning.recovery.living_state import plan_replicas
from megatron_ft.planning.state.declined import Declined
from megatron_ft.topology import Cluster

LONGEST_SECONDS = 10_000.0
NUM_EXPERTS, NUM_SLOTS, MIN_REPLICAS = 6, 6, 2
MIN_NODES = 2
KEEPS_LAYOUT = 4
"""Every ``KEEPS_LAYOUT``-th job keeps its layout: other nodes take the places of lost ones, and their pipeline stages
replay."""
FAULTS = ("rank", "rank", "node", "two", "cut", "hang")


def draw_policy(chance: random.Random, *, keeps_layout: bool = False) -> MembershipPolicy:
    """Draw the numbers of nodes and the settings of a job's membership policy."""
    if keeps_layout:
        num_spares = chance.choice((0, 1, 2))
        return MembershipPolicy(
            num_nodes=chance.randint(2, 6),
            ranks_per_node=chance.randint(1, 2),
            start_timeout_seconds=60.0,
            stop_timeout_seconds=20.0,
            max_restarts=chance.randint(0, 1),
            num_spare_nodes=num_spares,
            max_node_restarts=chance.randint(1, 3),
            restart_lost_nodes=num_spares == 0 or chance.random() < 0.5,
            keeps_layout=True,
            keeps_processes=chance.random() < 0.7,
        )
    num_nodes, num_spares = chance.randint(3, 6), chance.choice((0, 0, 1, 2))
    return MembershipPolicy(
        num_nodes=num_nodes,
        ranks_per_node=chance.randint(1, 2),
        start_timeout_seconds=60.0,
        stop_timeout_seconds=20.0,
        min_nodes=MIN_NODES,
        max_restarts=chance.randint(0, 1),
        max_nodes=num_nodes + num_spares + chance.randint(0, 2),
        num_spare_nodes=num_spares,
        join_window_seconds=chance.choice((0.0, 0.3, 2.0)),
        restart_lost_nodes=chance.random() < 0.5,
    )


class Job(Ranks):
    """Job of one seed, from its start to its end."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        keeps_layout = seed % KEEPS_LAYOUT == KEEPS_LAYOUT - 1
        super().__init__(draw_policy(chance, keeps_layout=keeps_layout), chance)
        self.num_stages = chance.choice((1, 2, self.policy.num_nodes)) if keeps_layout else 1
        self.state: State = membership.initial(self.policy, self.now)
        self.ended: str | None = None
        self.decided: Counter[int] = Counter()
        self.changed: Counter[int] = Counter()
        self.num_starts = 0
        self.placement = self.place(self.policy.world_size)
        self.ranks, self.ranks_of, self.changes = {}, {}, {}
        self.nodes_of = {0: self.state.members}
        self.tick_at: float | None = None

    def run(self) -> Counter[str]:
        """Run the job until it ends. Return the number of each event.

        Raises:
            AssertionError: a rule was broken, or the job does not end.
        """
        for node in range(self.policy.num_nodes + self.policy.num_spare_nodes):
            self._begin(node)
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            self.later(self.random.uniform(0.2, 4.0), self.break_something)
        for _ in range(self.random.choice((0, 1, 2))):
            self.later(self.random.uniform(0.2, 3.0), self.ask_something)
        while self.events and self.ended is None:
            self.now, _, happens = heapq.heappop(self.events)
            assert self.now < LONGEST_SECONDS, f"no end: {self.state}"
            happens()
        assert self.ended is not None, f"nothing happens any more: {self.state}"
        self.check_end()
        return self.counts

    # -- the controller -----------------------------------------------------------------------------------

    def controller_takes(self, event: MachineEvent) -> None:
        """Give the controller's state machine one event, check the resulting step, and execute its actions."""
        before = self.state
        if self.ended is not None:
            return
        step = membership.advance(self.policy, before, event, self.now)
        self.check_step(before, step)
        self.state = step.state
        self.nodes_of[step.state.generation] = step.state.members
        self.counts[step.decision.value] += 1
        self.carry_out(before, step)
        self.set_tick()

    def carry_out(self, before: State, step: Step) -> None:
        """Execute the actions of the controller and the launcher."""
        after = step.state
        match step.decision:
            case Decision.START | Decision.RESTART:
                self.placement = self.place(len(after.members) * self.policy.ranks_per_node)
                self.start(after.members, after.generation)
                self.ranks_of[after.generation] = self.members(after)
            case Decision.START_NODES:
                self.start(step.nodes, WAITING)
            case Decision.START_AGENTS:
                for node in step.nodes:
                    self.begin_agent(node)
            case Decision.BREAK:
                self.order(self.members(before), lambda rank: self.break_rank(rank, before.generation))
                self.kill_rest_of(step.nodes)
            case Decision.KILL_NODES:
                self.kill_rest_of(step.nodes)
            case Decision.CHANGE:
                self.order(self.members(after), lambda rank: self.ask_to_change(rank, after.generation))
            case Decision.REFORM:
                self.reform(before, step)
            case Decision.STOP:
                self.order(self.ranks.values(), self.end_rank)
            case Decision.KILL:
                self.order(self.ranks.values(), lambda rank: self.die(rank, -9))
            case Decision.END:
                self.ended = step.reason

    def set_tick(self) -> None:
        """Wake the controller at its next deadline, as the time limit of its queue does in a real job."""
        wake_at = self.state.wake_seconds
        if wake_at is not None and wake_at != self.tick_at:
            self.tick_at = wake_at
            self.later(wake_at - self.now, self.tick)

    def tick(self) -> None:
        """Advance the controller's clock."""
        self.tick_at = None
        self.controller_takes(Tick())

    def order(self, ranks: Iterable[Rank], carry_out: Callable[[Rank], None]) -> None:
        """Send an order to ranks. It arrives at each rank after the delay of the rank's node."""
        for rank in list(ranks):
            self.reach(rank.node, lambda rank=rank: carry_out(rank) if rank.is_alive else None)  # type: ignore[misc]

    def start(self, nodes: Sequence[int], generation: int) -> None:
        """Start the ranks of nodes without state."""
        self.begin(nodes, self.num_starts, generation)
        self.num_starts += 1

    def members(self, state: State) -> list[Rank]:
        """Return the ranks of a membership, in order."""
        return [self.ranks[number] for node in state.members for number in self.policy.ranks_of(node)]

    def ask_to_change(self, rank: Rank, generation: int) -> None:
        """Request a rank to stop after the next iteration."""
        if rank.generation == generation:
            rank.asked_to_change = generation

    def reform(self, before: State, step: Step) -> None:
        """Send the target and all placements to ranks that continue or join."""
        reform = step.reform
        assert reform is not None
        self.check_reform(before, step)
        former, members = self.ranks_of[before.generation], self.members(step.state)
        self.ranks_of[step.state.generation] = members
        self.kill_rest_of(step.nodes)
        if self.policy.keeps_layout:
            self.refill(step, members)
            return
        self.order([rank for rank in former if rank.node in reform.leaving], self.leave)
        with_state = [
            number if number is None or former[number].has_state else None for number in reform.previous_ranks
        ]
        found = plan_replicas(
            self.placement,
            with_state,
            lambda held: self.place(len(members)),
            num_slots_per_rank=NUM_SLOTS,
            expert_bytes=1,
        )
        if isinstance(found, Declined):
            self.counts["declined"] += 1
            self.order(members, self.end_rank)
            return
        found.validate()
        self.placement = found.placement
        held = {expert for by_rank in self.placement.slots[0] for expert in by_rank}
        assert held == set(range(NUM_EXPERTS)), "the plan does not contain every expert"
        self.order(members, lambda rank: self.go_on(rank, step))

    def refill(self, step: Step, members: Sequence[Rank]) -> None:
        """Assign ranks to all places again. Stages that lack a rank's state replay, if any rank still has state."""
        if not any(rank.has_state for rank in members):
            self.counts["declined"] += 1
            self.order(members, self.end_rank)
            return
        generation = step.state.generation
        stages = {self.stage_of(rank, generation) for rank in members if not rank.has_state or rank.is_replaying}
        for rank in members:
            is_back = self.stage_of(rank, generation) in stages
            self.counts["waiting ranks"] += not is_back
            self.order([rank], lambda rank, is_back=is_back: self.go_on(rank, step, replays=is_back))  # type: ignore[misc]

    def stage_of(self, rank: Rank, generation: int) -> int:
        """Return the pipeline stage of a rank. The nodes of a stage have consecutive places."""
        return self.nodes_of[generation].index(rank.node) * self.num_stages // self.policy.num_nodes

    def kill_rest_of(self, nodes: Iterable[int]) -> None:
        """Kill the remaining ranks of these nodes, as their agents do."""
        self.order([rank for rank in self.ranks.values() if rank.node in nodes], lambda rank: self.die(rank, -9))

    # -- what happens to it -------------------------------------------------------------------------------

    def ask_something(self) -> None:
        """Request a node to leave or to join, as an operator does."""
        node = self.random.randrange(self.policy.most_nodes)
        self.controller_takes(self.random.choice((DrainRequested, AddRequested))(node))

    def break_something(self) -> None:
        """Inject a fault: one or two ranks die, a node with its agent dies, a node is cut off, or a rank hangs."""
        alive = [rank for rank in self.ranks.values() if rank.is_alive]
        if not alive:
            return
        kind = self.random.choice(FAULTS)
        self.counts[f"faults: {kind}"] += 1
        victim = self.random.choice(alive)
        match kind:
            case "cut":
                self.cut_off(victim.node, self.random.choice((0.5, 3.0, 20.0, 90.0)))
            case "hang":
                self.hang(victim)
            case "node":
                self.crash_agent(victim.node)
            case _:
                for rank in self.random.sample(alive, min(len(alive), 2 if kind == "two" else 1)):
                    self.die(rank, -9)

    # -- what must hold -----------------------------------------------------------------------------------

    def check_step(self, before: State, step: Step) -> None:
        """Check three rules: one decision ends a generation, a job with too few nodes never continues, and only waiting
        nodes join."""
        after = step.state
        ends = step.decision in (Decision.REFORM, Decision.RESTART, Decision.END)
        self.decided[before.generation] += ends
        assert self.decided[before.generation] <= 1, f"generation {before.generation} was ended twice"
        assert after.generation - before.generation == (step.decision in (Decision.RESTART, Decision.REFORM))
        if after.phase in BREAKABLE:
            assert self.policy.fewest_nodes <= len(after.members) <= self.policy.most_members, (
                "the number of members is outside its limits"
            )
        assert len(after.members) == len(set(after.members)), "a node is a member twice"
        if self.policy.keeps_layout:
            assert step.decision is not Decision.CHANGE, "nodes changed places although none was lost"
        else:
            assert list(after.members) == sorted(after.members), "members are not in ascending order"
        if step.decision is Decision.REFORM:
            self.check_members(before, step)
        elif step.decision is not Decision.RESTART:
            assert after.members == before.members, "members changed without a decision"
        if step.decision is Decision.CHANGE:
            self.changed[before.generation] += 1
            assert self.changed[before.generation] == 1, "two changes were ordered in one generation"
            assert set(step.nodes) <= set(before.members), "a node leaves that is not a member"
        if step.decision in (Decision.START_NODES, Decision.KILL_NODES):
            assert not set(step.nodes) & (set(before.members) - before.nodes.lost), (
                "a member is started or killed as a joining node"
            )

    def check_members(self, before: State, step: Step) -> None:
        """Check that joining nodes have waited, and that missing nodes were lost or drained."""
        reform, members = step.reform, set(step.state.members)
        assert reform is not None
        if self.policy.keeps_layout:
            self.check_places(before, step)
            return
        came, went = members - set(before.members), set(before.members) - members
        assert not members & before.nodes.lost, "a lost node is a member"
        assert came == set(reform.joining), "a new member is not among the joining nodes"
        assert went == set(reform.lost) | set(reform.leaving), "a member left that was neither lost nor drained"
        for node in came:
            for number in self.policy.ranks_of(node):
                rank = self.ranks[number]
                assert rank.generation == WAITING and number in before.connected, "a rank joins that did not wait"
        self.counts["joined nodes"] += len(came)
        self.counts["left nodes"] += len(reform.leaving)
        self.counts["replaced nodes"] += min(len(came), len(reform.lost))

    def check_places(self, before: State, step: Step) -> None:
        """Check that continuing nodes keep their places and numbers, and that ranks which have waited take the places
        of lost ones."""
        reform, size = step.reform, self.policy.ranks_per_node
        assert reform is not None
        for place, (former, node) in enumerate(zip(before.members, step.state.members, strict=True)):
            numbers = tuple(range(place * size, (place + 1) * size))
            assert (former in reform.lost) == (node in reform.joining), "a node that was not lost has lost its place"
            assert former in reform.lost or former == node, "ranks changed places"
            expected = (None,) * size if node in reform.joining else numbers
            assert reform.previous_ranks[numbers[0] : numbers[-1] + 1] == expected, "ranks changed numbers"
            assert reform.layout.rank_nodes[numbers[0] : numbers[-1] + 1] == (node,) * size, "ranks changed nodes"
            for number in self.policy.ranks_of(node) if node in reform.joining else ():
                has_waited = self.ranks[number].generation == WAITING and number in step.state.connected
                assert has_waited and number not in step.state.gone, "a rank joins that did not wait"
        assert not set(step.nodes) & (set(step.state.members) | step.state.nodes.waiting), (
            "ranks of the new membership would be killed"
        )
        assert before.nodes.lost & set(before.members) <= set(reform.lost), "a lost node has kept its place"
        self.counts["filled places"] += len(reform.lost)
        self.counts["places filled by their own node"] += len(set(reform.lost) & set(reform.joining))

    def check_reform(self, before: State, step: Step) -> None:
        """Check that all continuing ranks have reported, and that no living rank rolls back a completed iteration."""
        assert step.reform is not None
        target = step.reform.target.iteration
        heard = {position.rank for position in step.reform.positions}
        for rank in self.members(step.state):
            if rank.node in step.reform.joining:
                continue
            assert self.policy.layout_on(before.members).rank_of(rank.start_rank) in heard, "a rank has not reported"
            assert rank.waits or not rank.is_alive, "a rank continues to train while the others report"
            assert rank.completed <= target, "a completed iteration would be rolled back"
            settled = 0 if rank.settled is None else rank.settled.iteration
            assert settled <= target, "an iteration with a complete vote would be rolled back"

    def check_end(self) -> None:
        """Check that all ranks that finished have the same history: every iteration once, in order, with one vote
        each."""
        done = [rank for rank in self.ranks_of.get(self.state.generation, []) if rank.is_done]
        for rank in done:
            assert [vote.iteration for vote in rank.history] == list(range(1, LAST_ITERATION + 1))
            assert rank.history == done[0].history, "two ranks have different histories"
            generations = [vote.generation for vote in rank.history]
            assert generations == sorted(generations), "a vote is of an older generation than the vote before it"
        self.counts["finished jobs" if done else "ended jobs"] += 1

    @staticmethod
    def place(num_ranks: int) -> PlacementPlan:
        """Return a placement with every expert on at least two ranks."""
        cluster = Cluster.of(num_ranks, 1)
        slots = num_ranks * NUM_SLOTS
        counts = [min(num_ranks, slots // NUM_EXPERTS)] * NUM_EXPERTS
        limited = [max(MIN_REPLICAS, min(count, MIN_REPLICAS + 1)) for count in counts]
        return Spread().place([limited], cluster, num_slots_per_rank=NUM_SLOTS)
