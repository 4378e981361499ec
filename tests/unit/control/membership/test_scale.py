"""Tests that the work of the state machine for one event does not grow with the number of nodes, counted in function
calls."""

import sys
from types import FrameType

from megatron_ft.control.membership import machine as membership
from megatron_ft.control.membership.events import (
    MachineEvent,
    NodeJoined,
    NodeLost,
    RankBroken,
    RankExited,
    RankReported,
)
from megatron_ft.control.membership.state import Decision, MembershipPolicy, State
from megatron_ft.planning.recovery.membership import Position

RANKS_PER_NODE = 8


def stands_at(rank: int) -> Position:
    return Position(rank=rank, generation=0, completed=4, contributed=4, vote=None)


class Story:
    """Job in which the same events happen at the same relative places for any number of nodes."""

    def __init__(self, num_nodes: int) -> None:
        self.policy = MembershipPolicy(
            num_nodes=num_nodes,
            ranks_per_node=RANKS_PER_NODE,
            start_timeout_seconds=60,
            stop_timeout_seconds=5,
            min_nodes=1,
        )
        self.state: State = membership.initial(self.policy, 0.0)
        self.decision = Decision.WAIT

    def take_in(self, event: MachineEvent) -> int:
        """Apply an event, and return the number of functions called for it."""
        count = 0

        def called(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(called)
        try:
            step = membership.advance(self.policy, self.state, event, 1.0)
        finally:
            sys.setprofile(None)
        self.state, self.decision = step.state, step.decision
        return count

    def tell(self) -> list[int]:
        """Return the number of calls for each event that follows similar events."""
        num_ranks = self.policy.world_size
        for node in range(self.policy.num_nodes):
            self.take_in(NodeJoined(node))
        counts = [self.take_in(RankReported(rank)) for rank in range(num_ranks)][1:4]
        self.take_in(NodeLost(0, 1.0))
        ranks = range(RANKS_PER_NODE, num_ranks)
        broken = [self.take_in(RankBroken(rank, stands_at(rank), 1.0)) for rank in ranks]
        assert self.decision is Decision.REFORM
        exits = [self.take_in(RankExited(rank, 0, 2.0, True)) for rank in ranks]
        assert self.decision is Decision.END
        return [*counts, *broken[1:4], *exits[1:4]]


def test_one_fact_costs_the_same_in_a_large_job() -> None:
    small, large = Story(4).tell(), Story(64).tell()
    assert large == small
