"""Simulates the ranks of a job. They follow the commit protocol, and can die at any time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulated_nodes import HEARTBEAT_SECONDS, Nodes
from megatron_ft.control.membership.events import RankBroken, RankExited, RankHung, RankReported
from megatron_ft.control.membership.state import Step
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.recovery.membership import Position

LAST_ITERATION = 12
WAITING = -1
"""Generation of a joining rank before a membership contains it."""


@dataclass
class Rank:
    """State of a rank in the protocol. ``node``, ``start_rank`` and ``start`` never change."""

    start_rank: int
    node: int
    start: int
    generation: int = 0
    history: list[Vote] = field(default_factory=list)
    """Votes of the completed iterations, in order."""
    contributed: int = 0
    settled: Vote | None = None
    has_state: bool = True
    is_alive: bool = True
    is_hung: bool = False
    is_broken: bool = False
    """Whether the rank's iteration has failed and the rank waits for an order."""
    is_standing: bool = False
    """Whether the rank has stopped for a change of the membership, and waits."""
    asked_to_change: int | None = None
    """Generation in which the rank was requested to stop for a change; None without a request."""
    is_done: bool = False
    is_replaying: bool = False
    """Whether the rank computes again what its pipeline stage has lost, while other ranks wait. If a replay is
    interrupted, the rank reports the iteration at which the replay should end."""

    @property
    def completed(self) -> int:
        """Return the newest completed iteration."""
        return len(self.history)

    @property
    def is_missed(self) -> bool:
        """Return whether collectives with this rank fail. They do not fail with a rank that has finished its work,
        because it has already sent everything."""
        return self.is_broken or not (self.is_alive or self.is_done)

    @property
    def waits(self) -> bool:
        """Return whether the rank does nothing until it receives an order."""
        return self.is_broken or self.is_standing or self.is_done or self.generation == WAITING


class Ranks(Nodes):
    """All ranks by number, and the ranks of each generation, dead or alive."""

    ranks: dict[int, Rank]
    ranks_of: dict[int, list[Rank]]
    nodes_of: dict[int, tuple[int, ...]]
    changes: dict[tuple[int, int], bool]
    """Whether a vote makes all ranks stop for a change, by generation and iteration."""

    def begin(self, nodes: Sequence[int], start: int, generation: int) -> None:
        """Start the ranks of nodes, as ordered by the controller."""
        for node in nodes:
            self.starts[node] = start
            has_agent = self.has_agent[node] and not self.is_over[node]
            for number in self.policy.ranks_of(node):
                former = self.ranks.get(number)
                assert former is None or not former.is_alive, "a rank was started although its predecessor lives"
                is_joining = generation == WAITING
                rank = Rank(number, node, start, generation, has_state=not is_joining, is_alive=has_agent)
                self.ranks[number] = rank
                seconds = self.random.uniform(0.0, 1.5) if is_joining else 0.0  # a joining rank imports first
                self.reach(node, lambda rank=rank, s=seconds: self.later(s, lambda: self.report(rank)))  # type: ignore[misc]

    def report(self, rank: Rank) -> None:
        """Report that a rank is alive."""
        if rank.is_alive:
            self.tell(rank.node, RankReported(rank.start_rank), rank.start)
            self.work(rank)

    def end_ranks(self, node: int) -> None:
        """Kill all ranks of a node without any notice."""
        for rank in self.ranks.values():
            rank.is_alive = rank.is_alive and rank.node != node

    def work(self, rank: Rank) -> None:
        """Do the next part of an iteration, unless the rank waits or is dead."""
        if rank.is_alive and not rank.waits:
            generation = rank.generation
            self.later(self.delay(), lambda: self.do(rank, generation))

    def do(self, rank: Rank, generation: int) -> None:
        """Vote on the next iteration, and complete the iteration if all peers have voted. If a peer is dead, the
        collective fails after a delay."""
        if not rank.is_alive or rank.is_hung or rank.waits or rank.generation != generation:
            return
        if rank.is_replaying:
            self.await_replay(rank, generation)
            return
        peers = self.ranks_of[generation]
        cut = max(self.cut_until[other.node] for other in peers if other.is_alive)
        if cut > self.now:  # the collective blocks, but does not fail
            self.later(cut - self.now, lambda: self.do(rank, generation))
            return
        behind = [other for other in peers if other.generation < generation]
        if behind and all(other.is_alive for other in behind):
            self.later(0.05, lambda: self.do(rank, generation))  # some peers have not received the membership yet
            return
        left = [other for other in peers if other.generation > generation]  # peers that continued without this node
        dead = bool(left) or any(other.is_missed for other in peers if other is not rank)
        settled = 0 if rank.settled is None else rank.settled.iteration
        if rank.completed < settled:
            assert rank.settled is not None
            rank.history.append(rank.settled)
            if rank.completed == LAST_ITERATION:
                self.finish(rank)
                return
        elif self.changes.get((rank.generation, rank.completed), False):
            self.stand(rank)
            return
        elif settled < rank.contributed:
            has_all = all(other.contributed >= rank.contributed for other in peers)
            if has_all and (not dead or self.random.random() < 0.5):
                rank.settled = self.vote(rank.contributed, generation, peers)
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

    def vote(self, iteration: int, generation: int, peers: Sequence[Rank]) -> Vote:
        """Return the vote of an iteration. Votes of two generations on the same iteration have different values."""
        asked = any(other.asked_to_change == generation for other in peers)
        self.changes.setdefault((generation, iteration), asked)
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

    def stand(self, rank: Rank) -> None:
        """Stop the rank for a change, and report this. If the rank lacks the order for the change, wait for it."""
        if rank.asked_to_change != rank.generation:
            generation = rank.generation
            self.later(0.05, lambda: self.do(rank, generation))
            return
        rank.is_standing = True
        self.counts["stood"] += 1
        self.speak(rank, planned=True)

    def break_rank(self, rank: Rank, generation: int) -> None:
        """Make the rank's collective fail. The rank reports its progress and waits."""
        if rank.waits or rank.is_hung or rank.generation != generation or not rank.is_alive:
            return
        rank.is_broken = True
        self.speak(rank, planned=False)

    def speak(self, rank: Rank, *, planned: bool) -> None:
        """Report the progress of a rank with its number in the membership."""
        position = Position(
            rank=self.policy.layout_on(self.nodes_of[rank.generation]).rank_of(rank.start_rank),
            generation=rank.generation,
            completed=rank.completed,
            contributed=rank.contributed,
            vote=rank.settled,
        )
        event = RankBroken(rank.start_rank, position, self.now, rank.completed, planned=planned)
        self.tell(rank.node, event, rank.start)

    def go_on(self, rank: Rank, step: Step, *, replays: bool = False) -> None:
        """Give a rank the next membership. The rank finishes or undoes an iteration, or receives another rank's state,
        and continues.

        Args:
            replays: Whether its pipeline stage has lost a rank and replays first. A joining rank has no state before
                the replay has ended.
        """
        assert step.reform is not None
        if not rank.is_alive or rank.is_hung:
            return
        target = step.reform.target
        had_state = rank.has_state
        if not had_state and not self.take_state(rank, step.state.generation, target.iteration, target.vote):
            self.end_rank(rank)
            return
        rank.has_state = had_state or not replays
        if rank.completed < target.iteration:
            assert target.vote is not None and rank.contributed == target.iteration, "the rank cannot finish it"
            rank.history.append(target.vote)
            self.counts["finished"] += 1
        elif rank.contributed > target.iteration:
            self.counts["undone"] += 1
        assert rank.completed == target.iteration, f"the rank is at iteration {rank.completed}, not {target.iteration}"
        rank.settled = rank.history[-1] if rank.history else None
        rank.contributed = rank.completed
        rank.generation, rank.is_broken, rank.is_standing = step.state.generation, False, False
        if replays:
            self.replay(rank)
        elif rank.completed == LAST_ITERATION:
            self.finish(rank)
        else:
            self.work(rank)

    def replay(self, rank: Rank) -> None:
        """Make a rank replay: its stage computes the lost state again, with the history that other ranks have."""
        generation, rank.is_replaying = rank.generation, True
        self.counts["replaying ranks"] += 1

        def end() -> None:
            if rank.is_alive and not (rank.is_broken or rank.is_hung) and rank.generation == generation:
                rank.is_replaying, rank.has_state = False, True
                self.counts["replayed ranks"] += 1
                if rank.completed == LAST_ITERATION:
                    self.finish(rank)
                else:
                    self.work(rank)

        self.later(self.random.uniform(0.1, 2.0), end)
        self.later(self.delay(), lambda: self.do(rank, generation))

    def await_replay(self, rank: Rank, generation: int) -> None:
        """Wait for a replay. A death in the rank's own stage breaks the rank after a delay; a death elsewhere breaks it
        by order."""
        peers, own = self.ranks_of[generation], self.stage_of(rank, generation)
        stage = [other for other in peers if self.stage_of(other, generation) == own]
        behind = [
            other for other in stage if other.is_alive and other.generation < generation
        ]  # the order is on its way
        if any(other.is_missed and other not in behind for other in stage if other is not rank):
            self.break_rank(rank, generation)
        else:
            self.later(0.05, lambda: self.do(rank, generation))

    def stage_of(self, rank: Rank, generation: int) -> int:
        """Return the pipeline stage of a rank in a membership."""
        raise NotImplementedError

    def take_state(self, rank: Rank, generation: int, iteration: int, vote: Vote | None) -> bool:
        """Give a joining rank the state after ``iteration`` from a member that has that state. Return whether a member
        has it."""
        holders = [other for other in self.ranks_of[generation] if other.has_state and other.is_alive]
        if not holders:
            return False
        history = holders[0].history[:iteration]
        if len(history) < iteration:
            assert vote is not None, "no rank can finish the iteration"
            history.append(vote)
        rank.history, rank.has_state, rank.contributed = history, True, iteration
        self.counts["joined ranks"] += 1
        return True

    def leave(self, rank: Rank) -> None:
        """End a rank whose node leaves on request."""
        assert rank.is_standing or not rank.is_alive, "a rank leaves in the middle of an iteration"
        if rank.is_alive:
            rank.is_alive = False
            self.counts["left ranks"] += 1
            self.exited(rank, 0, done=True)

    def finish(self, rank: Rank) -> None:
        """End a rank that has finished its work."""
        rank.is_done = True
        rank.is_alive = False
        self.counts["ranks done"] += 1
        self.exited(rank, 0, done=True)

    def die(self, rank: Rank, returncode: int) -> None:
        """End a rank's process before its work is finished."""
        if rank.is_alive:
            rank.is_alive = False
            self.exited(rank, returncode, done=False)

    def exited(self, rank: Rank, returncode: int, *, done: bool) -> None:
        """Report the exit of a rank, as its agent does."""
        event = RankExited(rank.start_rank, returncode, self.now, done=done, iteration=rank.completed)
        self.tell(rank.node, event, rank.start)

    def end_rank(self, rank: Rank) -> None:
        """Request a rank to end, or end it by an error. A rank that hangs does not react."""
        if not rank.is_hung:
            self.die(rank, 1)

    def hang(self, rank: Rank) -> None:
        """Make a rank hang. Its agent detects this later."""
        rank.is_hung = True
        self.later(HEARTBEAT_SECONDS, lambda: self.find_hung(rank))

    def find_hung(self, rank: Rank) -> None:
        """Report a hung rank and kill it, as its agent does."""
        if rank.is_alive:
            self.counts["hung ranks found"] += 1
            self.tell(rank.node, RankHung(rank.start_rank, self.now, "gave no sign", rank.completed), rank.start)
            self.die(rank, -9)
