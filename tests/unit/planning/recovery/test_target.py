"""Tests the target for every state that a small job can reach and every set of ranks that dies in it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.membership import NextMembership, Position, Target, choose_target
from megatron_ft.testing.votes import vote_of

LAST_ITERATION = 3


@dataclass(frozen=True)
class Progress:
    """Counters of one rank: iterations to which it contributed, whose vote it has, and that it completed."""

    contributed: int = 0
    settled: int = 0
    completed: int = 0

    def position(self, rank: int) -> Position:
        vote = vote_of(self.settled) if self.settled else None
        return Position(rank=rank, generation=0, completed=self.completed, contributed=self.contributed, vote=vote)


Job = tuple[Progress, ...]


def moves(job: Job) -> Iterator[Job]:
    """Yield every next state, in which one rank takes one step. A rank can have a vote only after all ranks have
    contributed."""
    for rank, own in enumerate(job):
        step = None
        if own.completed < own.settled:
            step = replace(own, completed=own.settled)
        elif own.settled < own.contributed:
            if all(other.contributed >= own.contributed for other in job):
                step = replace(own, settled=own.contributed)
        elif own.contributed < LAST_ITERATION:
            step = replace(own, contributed=own.contributed + 1)
        if step is not None:
            yield (*job[:rank], step, *job[rank + 1 :])


def reachable(num_ranks: int) -> set[Job]:
    found, waiting = set(), [(Progress(),) * num_ranks]
    while waiting:
        job = waiting.pop()
        if job not in found:
            found.add(job)
            waiting.extend(moves(job))
    return found


def survivors_of(ranks: frozenset[int]) -> Iterator[frozenset[int]]:
    for size in range(1, len(ranks) + 1):
        yield from map(frozenset, itertools.combinations(sorted(ranks), size))


def check(job: Job, alive: frozenset[int]) -> Target:
    """Choose the target, and check its properties."""
    target = choose_target([job[rank].position(rank) for rank in alive])
    for rank in alive:
        own = job[rank]
        assert own.completed <= target.iteration, "a completed iteration would be undone"
        assert own.settled <= target.iteration, "a settled iteration would be undone"
        assert own.completed == target.iteration or own.contributed == target.iteration, "it cannot get there"
    if target.vote is None:
        assert all(job[rank].completed == target.iteration for rank in alive)
    else:
        assert target.vote == vote_of(target.iteration)
        assert any(job[rank].settled == target.iteration for rank in alive), "no survivor knows the vote"
    return target


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_reachable_state_and_every_set_of_dead(num_ranks: int) -> None:
    states = reachable(num_ranks)
    ranks = frozenset(range(num_ranks))
    finished, undone = 0, 0
    for job in states:
        for alive in survivors_of(ranks):
            target = check(job, alive)
            finished += target.vote is not None
            undone += any(job[rank].contributed > target.iteration for rank in alive)
    assert len(states) > 20 and finished > 20 and undone > 20, "the interesting cases are reached"


def test_more_deaths_while_the_target_is_being_reached() -> None:
    """A rank that has acted on a decision has its vote, so a second decision never chooses an earlier iteration."""
    ranks = frozenset(range(3))
    for job in reachable(3):
        for alive in survivors_of(ranks):
            target = check(job, alive)
            for acted in [frozenset[int](), *survivors_of(alive)]:
                reached = Progress(target.iteration, target.iteration, target.iteration)
                later = tuple(reached if rank in acted else own for rank, own in enumerate(job))
                for left in survivors_of(alive):
                    again = check(later, left)
                    if acted & left:
                        assert again.iteration == target.iteration


def test_what_cannot_be_is_refused() -> None:
    good = Position(rank=0, generation=0, completed=4, contributed=5, vote=vote_of(5))
    assert choose_target([good]) == Target(iteration=5, vote=vote_of(5))
    with pytest.raises(RecoveryError, match="no rank survives"):
        choose_target([])
    with pytest.raises(RecoveryError, match="no surviving rank has the model state"):
        choose_target([replace(good, has_state=False)])
    assert choose_target([good, replace(good, rank=1, has_state=False)]) == Target(iteration=5, vote=vote_of(5))
    with pytest.raises(RecoveryError, match="rank 1 has completed iteration 4 and has no gradients of iteration 5"):
        choose_target([good, replace(good, rank=1, contributed=4, vote=vote_of(4))])
    with pytest.raises(RecoveryError, match="generation"):
        choose_target([good, replace(good, rank=1, generation=1)])
    with pytest.raises(RecoveryError, match="results of iteration 5"):
        choose_target([good, replace(good, rank=1, vote=replace(vote_of(5), loss=9.0))])
    for wrong in ({"contributed": 3}, {"contributed": 6}, {"vote": vote_of(6)}, {"vote": vote_of(3)}):
        with pytest.raises(RecoveryError, match="rank 0"):
            choose_target([replace(good, **wrong)])


def test_json_round_trips() -> None:
    position = Position(rank=2, generation=1, completed=4, contributed=5, vote=vote_of(5, generation=1))
    assert Position.from_json(position.to_json()) == position
    assert Position.from_json(replace(position, vote=None).to_json()).vote is None
    membership = NextMembership(
        generation=2,
        previous_ranks=(0, 2, 3),
        nodes=(0, 2, 3),
        target=Target(iteration=5, vote=vote_of(5)),
        master_addr="127.0.0.1",
        master_port=1234,
        reason="rank 1 was killed by SIGKILL",
    )
    assert NextMembership.from_json(membership.to_json()) == membership
