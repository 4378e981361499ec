"""Tests the three buffers: one committed, one being captured, and one between them."""

import random

import pytest

from megatron_ft.planning.iteration import WindowReport
from megatron_ft.planning.snapshot.memory import NUM_BUFFERS, BufferStates, WindowBuffers

FULL = WindowBuffers(held={4: 0, 7: 1, 1: 2}, committed=1)


def test_windows_go_round_the_buffers_while_commits_keep_up() -> None:
    buffers = WindowBuffers()
    for start in range(1, 30, 3):
        buffers = buffers.begin(start).after_commit(start - 3)
        assert buffers.free() is not None


def test_there_is_no_buffer_while_two_windows_wait_and_one_is_committed() -> None:
    buffers = WindowBuffers().begin(1).after_commit(1).begin(4).begin(7)
    assert buffers.free() is None
    assert buffers.after_commit(4).free() is not None


def test_an_abandoned_window_gives_its_buffer_back() -> None:
    buffers = WindowBuffers().begin(1).begin(4).begin(7)
    assert buffers.free() is None and buffers.abandon(7).free() is not None


def test_the_committed_window_and_newer_ones_are_never_reused() -> None:
    dice = random.Random(3)
    buffers, start = WindowBuffers(), 1
    for _ in range(500):
        if buffers.free() is not None and dice.random() < 0.6:
            before = dict(buffers.held)
            buffers = buffers.begin(start)
            assert all(buffers.held[kept] == place for kept, place in before.items())
            start += 3
        elif buffers.held:
            buffers = buffers.after_commit(dice.choice(sorted(buffers.held)))
        assert len(set(buffers.held.values())) == len(buffers.held) <= NUM_BUFFERS


def test_windows_are_reported_oldest_first_whatever_buffers_they_are_in() -> None:
    """After a recovery, a window may be in a different buffer on every rank."""
    states = BufferStates(replicated={0: 4, 1: 5, 2: -1}, given_up={1: 7})
    assert FULL.report(states) == WindowReport(replicated_windows=0b010, given_up_windows=0b100)
    assert FULL.report(BufferStates(replicated={0: 2, 1: 2, 2: 2})).replicated_windows == 0, "of earlier windows there"


def test_a_window_that_one_rank_has_given_up_is_not_committed_when_a_newer_one_is() -> None:
    """Rank 0 has given up window 4 and has window 7; rank 1 has window 4. The older of the newest windows is not on
    every rank."""
    ranks = [BufferStates(replicated={1: 7}), BufferStates(replicated={0: 4})]
    reports = [FULL.report(states) for states in ranks]
    both = reports[0].replicated_windows & reports[1].replicated_windows
    assert FULL.after_vote(WindowReport(replicated_windows=both)).committed == 1


def test_a_window_that_any_rank_has_given_up_is_let_go_of_and_a_newer_one_committed() -> None:
    without = FULL.after_vote(WindowReport(replicated_windows=0b001, given_up_windows=0b010))
    assert without == WindowBuffers(held={1: 2, 7: 1}, committed=1)
    assert without.after_vote(WindowReport(replicated_windows=0b10)) == WindowBuffers(held={7: 1}, committed=7)


def test_what_is_committed_is_kept_though_a_new_peer_does_not_get_it() -> None:
    assert FULL.after_vote(WindowReport(given_up_windows=0b001)) == FULL
    assert FULL.after_vote(WindowReport(replicated_windows=0b010, given_up_windows=0b010)).committed == 4


@pytest.mark.parametrize(
    ("held", "pinned", "has_buffer"),
    [
        ({}, {0, 1}, 1),
        ({}, {0, 1, 2}, 0),
        ({1: 0, 4: 1}, {0, 1}, 1),
        ({1: 0, 4: 1}, {2}, 0),
        ({1: 1, 4: 2, 7: 0}, {0, 2}, 1),
        ({1: 1, 4: 2, 7: 0}, {1}, 0),
    ],
)
def test_a_buffer_that_storage_reads_is_not_free(held: dict[int, int], pinned: set[int], has_buffer: int) -> None:
    """The oldest window is dropped first if no buffer is free."""
    buffers = WindowBuffers(held=held)
    assert buffers.report(BufferStates(pinned=frozenset(pinned))).has_free_buffer == has_buffer
    assert not buffers.report(BufferStates(pinned=frozenset(pinned), knows_commits=False)).has_free_buffer
    if len(held) < NUM_BUFFERS:
        assert (buffers.free(pinned) is not None) == bool(has_buffer)
