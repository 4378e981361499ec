"""Three buffers: one committed, one captured, one in between."""

import random

from megatron_ft.planning.snapshot.buffers import NUM_BUFFERS, WindowBuffers


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
