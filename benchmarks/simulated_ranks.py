"""Ranks of a simulated job: they do what the commit protocol lets them do, and die."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulated_nodes import HEARTBEAT_SECONDS, Nodes
from megatron_ft.control.membership.events import RankBroken, RankExited, RankHung, RankReported
from megatron_ft.control.membership.state import Step
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.target import Position

LAST_ITERATION = 12
WAITING = -1
"""Generation of a joining node that no membership has named yet."""


@dataclass
class Rank:
    """A rank as the protocol sees it. ``node``, ``start_rank`` and ``start`` never change."""

    start_rank: int
    node: int
    start: int
    generation: int = 0
    history: list[Vote] = field(default_factory=list)
    """Votes of the iterations it has completed, in order."""
    contributed: int = 0
    settled: Vote | None = None
    has_state: bool = True
    is_alive: bool = True
    is_hung: bool = False
    is_broken: bool = False
    """Its iteration has failed, and it waits."""
    is_standing: bool = False
    """It waits at the boundary of a change."""
    asked_to_change: int | None = None
    """Generation in which it was."""
    is_done: bool = False
    is_replaying: bool = False
    """It computes again what its pipeline stage has lost, while others wait; broken, it says how far it will be."""

    @property
    def completed(self) -> int:
        """Newest iteration it has completed."""
        return len(self.history)

    @property
    def is_missed(self) -> bool:
        """Whether collectives with it fail; one that has done its work has said all that others need of it."""
        return self.is_broken or not (self.is_alive or self.is_done)

    @property
    def waits(self) -> bool:
        """Whether it does nothing until it gets an order."""
        return self.is_broken or self.is_standing or self.is_done or self.generation == WAITING


class Ranks(Nodes):
    """All ranks there are, by their number, and those of each generation, dead or alive."""

    ranks: dict[int, Rank]
    ranks_of: dict[int, list[Rank]]
    nodes_of: dict[int, tuple[int, ...]]
    changes: dict[tuple[int, int], bool]
    """Generation and iteration to whether its vote has everybody stand after it."""

    def begin(self, nodes: Sequence[int], start: int, generation: int) -> None:
        """The ranks of nodes are started by an order."""
        for node in nodes:
            self.starts[node] = start
            has_agent = self.has_agent[node] and not self.is_over[node]
            for number in self.policy.ranks_of(node):
                former = self.ranks.get(number)
                assert former is None or not former.is_alive, "a rank was started beside one that lives"
                is_joining = generation == WAITING
                rank = Rank(number, node, start, generation, has_state=not is_joining, is_alive=has_agent)
                self.ranks[number] = rank
                seconds = self.random.uniform(0.0, 1.5) if is_joining else 0.0  # it imports what it needs
                self.reach(node, lambda rank=rank, s=seconds: self.later(s, lambda: self.report(rank)))  # type: ignore[misc]

    def report(self, rank: Rank) -> None:
        """Report a sign of life."""
        if rank.is_alive:
            self.tell(rank.node, RankReported(rank.start_rank), rank.start)
            self.work(rank)

    def end_ranks(self, node: int) -> None:
        """Kill all ranks of a node without any notice."""
        for rank in self.ranks.values():
            rank.is_alive = rank.is_alive and rank.node != node

    def work(self, rank: Rank) -> None:
        """The next thing in an iteration, unless the rank waits or is dead."""
        if rank.is_alive and not rank.waits:
            generation = rank.generation
            self.later(self.delay(), lambda: self.do(rank, generation))

    def do(self, rank: Rank, generation: int) -> None:
        """Contribute, settle, complete; a dead peer breaks the collective, sooner or later."""
        if not rank.is_alive or rank.is_hung or rank.waits or rank.generation != generation:
            return
        if rank.is_replaying:
            self.await_replay(rank, generation)
            return
        peers = self.ranks_of[generation]
        cut = max(self.cut_until[other.node] for other in peers if other.is_alive)
        if cut > self.now:  # a collective is blocked; it is not broken
            self.later(cut - self.now, lambda: self.do(rank, generation))
            return
        behind = [other for other in peers if other.generation < generation]
        if behind and all(other.is_alive for other in behind):
            self.later(0.05, lambda: self.do(rank, generation))  # the membership is still being sent to them
            return
        left = [other for other in peers if other.generation > generation]  # they have gone on without this node
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
        """The vote of an iteration as this generation settles it: another one would settle it to other values."""
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
        """It stands at the boundary, once it has the order itself, and says so."""
        if rank.asked_to_change != rank.generation:
            generation = rank.generation
            self.later(0.05, lambda: self.do(rank, generation))
            return
        rank.is_standing = True
        self.counts["stood"] += 1
        self.speak(rank, planned=True)

    def break_rank(self, rank: Rank, generation: int) -> None:
        """Its collective fails: it says how far it is, and waits."""
        if rank.waits or rank.is_hung or rank.generation != generation or not rank.is_alive:
            return
        rank.is_broken = True
        self.speak(rank, planned=False)

    def speak(self, rank: Rank, *, planned: bool) -> None:
        """Say how far it is, by its number in the membership."""
        position = Position(
            rank=self.policy.number_among(self.nodes_of[rank.generation], rank.start_rank),
            generation=rank.generation,
            completed=rank.completed,
            contributed=rank.contributed,
            vote=rank.settled,
        )
        event = RankBroken(rank.start_rank, position, self.now, rank.completed, planned=planned)
        self.tell(rank.node, event, rank.start)

    def go_on(self, rank: Rank, step: Step, *, replays: bool = False) -> None:
        """Deliver the next membership to a rank: it finishes or undoes, or takes another's state, and continues.

        Args:
            replays: its pipeline stage has lost a rank, and replays first. A joining rank has no state before that
                ends.
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
            assert target.vote is not None and rank.contributed == target.iteration, "it cannot finish"
            rank.history.append(target.vote)
            self.counts["finished"] += 1
        elif rank.contributed > target.iteration:
            self.counts["undone"] += 1
        assert rank.completed == target.iteration, f"at {rank.completed}, not {target.iteration}"
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
        """Its stage computes what it has lost, as others have it."""
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
        """Wait for a replay: a death in its stage breaks it, sooner or later; one elsewhere is learnt by order."""
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
        """Pipeline stage of a rank in a membership."""
        raise NotImplementedError

    def take_state(self, rank: Rank, generation: int, iteration: int, vote: Vote | None) -> bool:
        """Give a joining rank the state after ``iteration`` from a member that has it; returns whether there is any."""
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
        """Its node leaves: it ends well."""
        assert rank.is_standing or not rank.is_alive, "a rank leaves in the middle of an iteration"
        if rank.is_alive:
            rank.is_alive = False
            self.counts["left ranks"] += 1
            self.exited(rank, 0, done=True)

    def finish(self, rank: Rank) -> None:
        """Its work is done."""
        rank.is_done = True
        rank.is_alive = False
        self.counts["ranks done"] += 1
        self.exited(rank, 0, done=True)

    def die(self, rank: Rank, returncode: int) -> None:
        """A process ends before its work is done."""
        if rank.is_alive:
            rank.is_alive = False
            self.exited(rank, returncode, done=False)

    def exited(self, rank: Rank, returncode: int, *, done: bool) -> None:
        """Its agent says so."""
        event = RankExited(rank.start_rank, returncode, self.now, done=done, iteration=rank.completed)
        self.tell(rank.node, event, rank.start)

    def end_rank(self, rank: Rank) -> None:
        """It is asked to end, or ends by an error; one that hangs does neither."""
        if not rank.is_hung:
            self.die(rank, 1)

    def hang(self, rank: Rank) -> None:
        """It does nothing any more; its agent finds out."""
        rank.is_hung = True
        self.later(HEARTBEAT_SECONDS, lambda: self.find_hung(rank))

    def find_hung(self, rank: Rank) -> None:
        """Its agent says so and kills it."""
        if rank.is_alive:
            self.counts["hung ranks found"] += 1
            self.tell(rank.node, RankHung(rank.start_rank, self.now, "gave no sign", rank.completed), rank.start)
            self.die(rank, -9)
