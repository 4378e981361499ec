"""Tests which buffer of a rank contains which window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.planning.snapshot.memory import NUM_BUFFERS
from megatron_ft.planning.snapshot.plan import Piece
from megatron_ft.snapshot.server.store import PAGE_BYTES
from megatron_ft.snapshot.server.windows import HeldWindow, OwnWindows
from megatron_ft.snapshot.window import Slice

NUM_SLICES = 2


def new(start: int, buffer: int, generation: int = 1) -> HeldWindow:
    return HeldWindow(
        run_id="a-run",
        generation=generation,
        rank=0,
        world_size=1,
        topology={},
        start_iteration=start,
        num_slices=NUM_SLICES,
        plan={},
        buffer=buffer,
    )


def part(start: int, index: int, *, hashed: bool = False, num_bytes: int = 100) -> Slice:
    hashes = ("0" * 32,) if hashed else None
    piece = Piece("a", 0, "master", "float32", 0, 25, 0, 100)
    return Slice(
        iteration=start + index,
        offset=index * PAGE_BYTES,
        num_bytes=num_bytes,
        header={},
        pieces=(piece,),
        hashes=hashes,
    )


def full(windows: OwnWindows, start: int, buffer: int, generation: int = 1, *, hashed: bool = True) -> HeldWindow:
    window = new(start, buffer, generation)
    windows.begin(window)
    for index in range(NUM_SLICES):
        windows.capture(buffer, index, part(start, index, hashed=hashed))
    return window


def starts(windows: OwnWindows) -> list[int]:
    return [window.start_iteration for window in windows]


def keys(windows: OwnWindows) -> list[tuple[int, int]]:
    return [(window.generation, window.start_iteration) for window in windows]


@pytest.fixture
def windows() -> OwnWindows:
    return OwnWindows(NUM_SLICES * PAGE_BYTES)


def test_the_newest_committed_window_cannot_be_overwritten(windows: OwnWindows) -> None:
    full(windows, 0, 0)
    windows.commit(0, 1)
    with pytest.raises(ControlError, match="newest committed"):
        windows.begin(new(2, 0))
    full(windows, 2, 1)
    windows.commit(2, 1)
    assert starts(windows) == [2]
    windows.begin(new(4, 0))


def test_a_commit_lets_older_windows_go_and_newer_ones_stay(windows: OwnWindows) -> None:
    for buffer in range(3):
        full(windows, buffer * 2, buffer)
    windows.commit(2, 1)
    assert starts(windows) == [2, 4]
    assert windows.committed is not None and windows.committed.start_iteration == 2


def test_an_incomplete_window_cannot_be_committed(windows: OwnWindows) -> None:
    full(windows, 0, 0, hashed=False)
    with pytest.raises(ControlError, match="no complete window"):
        windows.commit(0, 1)
    with pytest.raises(ControlError, match="no complete window"):
        windows.commit(2, 1)


def test_beginning_forgets_an_incomplete_window_elsewhere(windows: OwnWindows) -> None:
    windows.begin(new(0, 0))
    windows.capture(0, 0, part(0, 0))
    windows.begin(new(2, 1))
    assert starts(windows) == [2]
    with pytest.raises(ControlError, match="no window was begun"):
        windows.capture(0, 1, part(0, 1))


def test_captured_again_replaces_unless_it_is_committed(windows: OwnWindows) -> None:
    full(windows, 0, 0)
    windows.commit(0, 1)
    full(windows, 2, 1)
    again = full(windows, 2, 2, generation=2)
    assert keys(windows) == [(1, 0), (2, 2)]
    same_as_committed = full(windows, 0, 1, generation=2)
    assert windows.find(0).generation == 1
    windows.commit(0, 1)
    assert again in windows and same_as_committed in windows


def test_a_commit_of_a_newer_generation_ends_all_of_older_ones(windows: OwnWindows) -> None:
    full(windows, 20, 0, generation=1)
    windows.commit(20, 1)
    full(windows, 10, 1, generation=2)
    windows.commit(10, 2)
    assert keys(windows) == [(2, 10)]


def test_a_committed_window_that_was_captured_again_is_another_one(windows: OwnWindows) -> None:
    """Its copies may be lost with the membership that made them, so only copies of the new capture count."""
    before = full(windows, 0, 0, generation=1)
    windows.commit(0, 1)
    windows.new_generation()
    again = full(windows, 0, 1, generation=2)
    assert windows.find(0) is before
    assert windows.commit(0, 2) is again and windows.is_persist_due(1)
    assert windows.committed is again and before not in windows


def test_what_a_new_generation_does_not_confirm_may_be_overwritten(windows: OwnWindows) -> None:
    for buffer in (0, 1):
        full(windows, 2 * buffer, buffer)
    windows.commit(0, 1)
    windows.new_generation()
    windows.begin(new(4, 2, 2))
    assert starts(windows) == [0, 2, 4]
    with pytest.raises(ControlError, match="no complete window"):
        windows.commit(0, 2)
    windows.commit(0, 2, captured_in=1)
    with pytest.raises(ControlError, match="newest committed"):
        windows.begin(new(4, 0, 2))
    assert not windows.is_persist_due(1), "a confirmation is no new commit"
    windows.new_generation()
    windows.begin(new(6, 0, 3))
    assert windows.committed is None


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (1, {}),
        (0, {"iteration": 5}),
        (0, {"offset": PAGE_BYTES}),
        (0, {"offset": 64}),
        (0, {"num_bytes": NUM_SLICES * PAGE_BYTES + 1}),
    ],
)
def test_slices_out_of_order_or_place_are_refused(windows: OwnWindows, index: int, change: dict[str, int]) -> None:
    windows.begin(new(0, 0))
    wrong = part(0, 0)
    for name, value in change.items():
        setattr(wrong, name, value)
    with pytest.raises(CheckpointError, match="slice "):
        windows.capture(0, index, wrong)
    windows.capture(0, 0, part(0, 0))


def test_no_slice_after_the_last(windows: OwnWindows) -> None:
    full(windows, 0, 0)
    with pytest.raises(CheckpointError, match="slice 2: must not be added; the window has all its 2 slices"):
        windows.capture(0, 2, part(0, 2))


def test_replicated_means_complete_here_and_with_every_peer(windows: OwnWindows) -> None:
    window = full(windows, 0, 0, hashed=False)
    window.acknowledged[1] = 2
    window.acknowledged[2] = 1
    assert windows.waiting_bytes([1, 2], 1) == 100
    window.acknowledged[2] = 2
    assert not windows.replicated([1, 2], 1)
    for one in window.slices:
        one.hashes = ("0" * 32,)
    assert not windows.replicated([1, 2, 3], 1)
    assert not windows.replicated([1, 2], 2)
    assert windows.replicated([1, 2], 1) == {0: 0}


def test_a_window_given_up_is_named_and_a_newer_one_does_not_stand_for_it(windows: OwnWindows) -> None:
    full(windows, 0, 2).given_up = True
    full(windows, 2, 0).acknowledged[1] = NUM_SLICES
    assert windows.replicated([1], 1) == {0: 2}
    assert windows.given_up(1) == {2: 0} and not windows.given_up(2)


def test_only_what_is_not_committed_is_let_go_of(windows: OwnWindows) -> None:
    for buffer in range(2):
        full(windows, 2 * buffer, buffer)
    windows.commit(0, 1)
    for start, generation in ((0, 1), (2, 2), (4, 1)):
        with pytest.raises(ControlError, match="no uncommitted window"):
            windows.abandon(start, generation)
    windows.abandon(2, 1)
    assert starts(windows) == [0]


def test_a_pinned_buffer_is_not_given_away(windows: OwnWindows) -> None:
    windows.pinned.add(1)
    with pytest.raises(ControlError, match="buffer=1: must not be overwritten"):
        windows.begin(new(0, 1))
    windows.begin(new(0, 0))


def test_the_oldest_slice_is_hashed_first(windows: OwnWindows) -> None:
    first, second = full(windows, 0, 2, hashed=False), full(windows, 2, 0, hashed=False)
    order = []
    while (found := windows.next_unhashed()) is not None:
        order.append((found[0], found[1].iteration))
        found[1].hashes = ("0" * 32,)
    assert order == [(first, 0), (first, 1), (second, 2), (second, 3)]


def test_every_nth_commit_of_a_generation_is_due(windows: OwnWindows) -> None:
    due = []
    for number in range(6):
        full(windows, number * 2, number % 3)
        windows.commit(number * 2, 1)
        due.append(windows.is_persist_due(2))
        windows.commit(number * 2, 1)
        assert not windows.is_persist_due(2), "it was committed before"
    assert due == [False, True, False, True, False, True]
    assert not windows.is_persist_due(0)
    windows.new_generation()
    assert not windows.is_persist_due(1)


def test_of_several_the_committed_then_the_newest_is_found(windows: OwnWindows) -> None:
    old = full(windows, 0, 0, 1)
    windows.commit(0, 1)
    full(windows, 0, 1, 2)
    assert windows.find(0) is old
    newest = full(windows, 0, 1, 3)
    old.committed = False
    assert windows.find(0) is newest
    assert windows.find(0, generation=1) is old


@given(st.lists(st.tuples(st.sampled_from(["begin", "fill", "commit"]), st.integers(0, 2)), max_size=60))
def test_a_committed_window_stays_until_the_next(choices: list[tuple[str, int]]) -> None:
    """After any sequence of requests, the newest committed window is complete, and each buffer has one window."""
    windows, start, last = OwnWindows(NUM_SLICES * PAGE_BYTES), 0, None
    for what, buffer in choices:
        held = {window.buffer: window for window in windows}
        if what == "begin" and not (buffer in held and held[buffer].committed):
            start += NUM_SLICES
            windows.begin(new(start, buffer))
        elif what == "fill" and buffer in held and not held[buffer].captured:
            index = len(held[buffer].slices)
            windows.capture(buffer, index, part(held[buffer].start_iteration, index, hashed=True))
        elif what == "commit" and buffer in held and held[buffer].complete:
            last = windows.commit(held[buffer].start_iteration, 1)
        assert windows.committed is last
        assert last is None or last in windows
        assert len({window.buffer for window in windows}) == len(list(windows)) <= NUM_BUFFERS
        assert sum(not window.captured for window in windows) <= 1
