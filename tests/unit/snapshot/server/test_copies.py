"""Tests the two buffers of a copy, on the sending and the receiving side."""

import random
from dataclasses import asdict

import pytest

from megatron_ft.errors import CheckpointError, ControlError
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.store import PAGE_BYTES
from megatron_ft.snapshot.server.windows import CopyWindows, HeldWindow, OwnWindows, PeerBuffers, SendCommit, SendSlice
from tests.unit.snapshot.server.test_own_windows import NUM_SLICES, full, new, part

WINDOW_BYTES = NUM_SLICES * PAGE_BYTES


class Pair:
    """Windows of a rank, the sender's knowledge of the peer, and the peer."""

    def __init__(self) -> None:
        self.own = OwnWindows(WINDOW_BYTES)
        self.buffers = PeerBuffers()
        self.copy = CopyWindows(WINDOW_BYTES)

    def step(self, generation: int = 1, *, lose_answer: bool = False) -> SendSlice | SendCommit | None:
        """Take the next step on both sides."""
        action = self.buffers.next_action(self.own, generation)
        if isinstance(action, SendCommit):
            self.copy.commit(action.window.key)
            if not lose_answer:
                self.buffers.note_sent(action)
        elif action is not None:
            window, sent = action.window, action.window.slices[action.index]
            announced = new(window.start_iteration, action.buffer, window.generation)
            self.copy.expect(announced, action.index, sent).slices.append(sent)
            if not lose_answer:
                self.buffers.note_sent(action)
        if lose_answer:
            self.reconnect()
        return action

    def drain(self, generation: int = 1) -> int:
        """Take all possible steps. Return their number."""
        count = 0
        while self.step(generation) is not None:
            count += 1
            assert count < 100, "the sender never comes to an end"
        return count

    def reconnect(self) -> None:
        """Let the sender drop its knowledge and read the peer's list again."""
        self.buffers = PeerBuffers.read_held({"held": [entry(window) for window in self.copy]}).get(0, PeerBuffers())

    def commit(self, start: int, generation: int = 1) -> HeldWindow:
        return self.own.commit(start, generation)

    def held(self) -> list[tuple[int, int, bool]]:
        """Return (first iteration, number of slices, whether committed) of the peer's windows."""
        return sorted((window.start_iteration, len(window.slices), window.committed) for window in self.copy)


def entry(window: HeldWindow, **changes: object) -> dict[str, object]:
    """Return the peer's inventory entry of a window."""
    return {"rank": 0, "window": {**asdict(window.stored("copy", 1, WINDOW_BYTES)), **changes}}


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_slices_go_in_order(pair: Pair) -> None:
    full(pair.own, 0, 0)
    actions = [pair.step(), pair.step()]
    assert [action.index for action in actions if isinstance(action, SendSlice)] == [0, 1]
    assert pair.step() is None


def test_a_third_window_waits_for_a_commit(pair: Pair) -> None:
    for number in range(3):
        full(pair.own, number * 2, number)
    assert pair.drain() == 4
    assert pair.held() == [(0, 2, False), (2, 2, False)]
    pair.commit(0)
    assert isinstance(pair.step(), SendCommit)
    assert pair.step() is None, "both buffers hold what is needed"
    pair.commit(2)
    assert pair.drain() == 1 + 2
    assert pair.held() == [(2, 2, True), (4, 2, False)]


def test_a_window_that_was_forgotten_makes_room(pair: Pair) -> None:
    full(pair.own, 0, 0)
    full(pair.own, 2, 1)
    pair.drain()
    full(pair.own, 4, 0)
    pair.drain()
    assert pair.held() == [(2, 2, False), (4, 2, False)]


def test_a_window_given_up_makes_room_and_is_passed_over(pair: Pair) -> None:
    bad = full(pair.own, 0, 0)
    pair.step()
    for number in (1, 2):
        full(pair.own, number * 2, number)
    while (action := pair.buffers.next_action(pair.own, 1, {bad})) is not None:
        assert isinstance(action, SendSlice) and action.window is not bad
        pair.buffers.note_sent(action)
    assert [held.start_iteration for held in pair.buffers.buffers if held] == [4, 2]


def test_a_lost_answer_sends_nothing_twice(pair: Pair) -> None:
    full(pair.own, 0, 0)
    pair.step(lose_answer=True)
    assert pair.held() == [(0, 1, False)]
    assert pair.drain() == 1
    pair.commit(0)
    pair.step(lose_answer=True)
    assert pair.drain() == 0
    assert pair.held() == [(0, 2, True)]


def test_a_new_peer_gets_the_committed_window_of_an_older_generation(pair: Pair) -> None:
    full(pair.own, 0, 0)
    pair.commit(0)
    full(pair.own, 2, 1)
    full(pair.own, 4, 2, generation=2)
    pair.drain(generation=2)
    assert pair.held() == [(0, 2, True), (4, 2, False)]


def test_an_older_generation_makes_room_for_the_newest(pair: Pair) -> None:
    full(pair.own, 0, 0)
    pair.drain()
    pair.commit(0)
    full(pair.own, 2, 1)
    pair.drain()
    full(pair.own, 4, 2, generation=2)
    pair.drain(generation=2)
    assert pair.held() == [(0, 2, True), (4, 2, False)]


@pytest.mark.parametrize("resumed", [0, 2], ids=["committed copy", "copy whose commit was lost"])
def test_a_keeper_that_lost_its_own_memory_spares_the_copy_from_which_the_job_continued(
    pair: Pair, resumed: int
) -> None:
    full(pair.own, 0, 0)
    full(pair.own, 2, 1)
    pair.drain()
    pair.commit(0)
    pair.drain()
    pair.own = OwnWindows(WINDOW_BYTES)
    pair.own.confirmed = new(resumed, 0)
    pair.reconnect()
    full(pair.own, 4, 0, generation=2)
    pair.drain(generation=2)
    assert pair.held() == [(resumed, 2, True), (4, 2, False)]
    pair.commit(4, 2)
    pair.drain(generation=2)
    assert pair.held() == [(4, 2, True)]


def test_the_receiver_refuses_to_lose_its_committed_window() -> None:
    copy = CopyWindows(WINDOW_BYTES)
    window = copy.expect(new(0, 0), 0, part(0, 0, hashed=True))
    window.slices += [part(0, 0, hashed=True), part(0, 1, hashed=True)]
    copy.commit(WindowKey(start_iteration=0, generation=1))
    with pytest.raises(ControlError, match="committed"):
        copy.expect(new(2, 0), 0, part(2, 0, hashed=True))
    with pytest.raises(CheckpointError, match="slice 1: must be slice 0, the next slice of the window"):
        copy.expect(new(2, 1), 1, part(2, 1, hashed=True))
    with pytest.raises(ControlError, match="no complete copy"):
        copy.commit(WindowKey(start_iteration=2, generation=1))


def returned(pair: Pair) -> None:
    """Another node had this place meanwhile, and its peer has a newer window than this node knows."""
    full(pair.own, 0, 0)
    pair.commit(0)
    pair.drain()
    mine, pair.own = pair.own, OwnWindows(WINDOW_BYTES)
    full(pair.own, 3, 0, generation=2)
    pair.commit(3, 2)
    pair.drain(2)
    assert pair.held() == [(3, NUM_SLICES, True)]
    pair.own = mine
    pair.own.new_generation()
    pair.reconnect()


def test_a_node_that_comes_back_leaves_a_newer_copy_alone(pair: Pair) -> None:
    returned(pair)
    assert pair.drain(3) == 0
    full(pair.own, 6, 1, generation=3)
    pair.drain(3)
    assert pair.held() == [(3, NUM_SLICES, True), (6, NUM_SLICES, False)]
    pair.commit(6, 3)
    pair.drain(3)
    assert pair.held() == [(6, NUM_SLICES, True)]


def test_what_the_job_went_back_to_takes_the_place_of_a_newer_copy(pair: Pair) -> None:
    returned(pair)
    pair.own.commit(0, 3, captured_in=1)
    pair.drain(3)
    assert pair.held() == [(0, NUM_SLICES, True)]


def test_a_slice_twice_is_refused() -> None:
    copy = CopyWindows(WINDOW_BYTES)
    copy.expect(new(0, 0), 0, part(0, 0, hashed=True)).slices.append(part(0, 0, hashed=True))
    copy.expect(new(0, 0), 1, part(0, 1, hashed=True)).slices.append(part(0, 1, hashed=True))
    with pytest.raises(CheckpointError, match="slice 1: must not be added; the window has all its 2 slices"):
        copy.expect(new(0, 0), 1, part(0, 1, hashed=True))


@pytest.mark.parametrize(
    "changes",
    [
        *({"buffer": 2}, {"buffer": -1}, {"buffer": None}, {"num_held": -1}, {"num_held": 3}, {"num_held": True}),
        *({"generation": None}, {"committed": 1}, {"where": "elsewhere"}, {"more": 1}),
    ],
)
def test_what_a_peer_says_it_holds_is_checked(changes: dict[str, object]) -> None:
    window = new(0, 0)
    PeerBuffers.read_held({"held": [entry(window)]})
    with pytest.raises(ControlError):
        PeerBuffers.read_held({"held": [entry(window, **changes)]})


@pytest.mark.parametrize(
    "held", [None, [None], [{"rank": "a", "window": {}}], [{"rank": 0}], [{"rank": 0, "window": []}]]
)
def test_an_inventory_that_is_none_is_refused(held: object) -> None:
    with pytest.raises(ControlError):
        PeerBuffers.read_held({"held": held})


@pytest.mark.parametrize("seed", range(50))
def test_the_peer_never_lacks_what_was_committed(seed: int) -> None:
    """Draws captures, commits of windows that the peer has, lost answers and new generations."""
    rng, pair, start, generation, committed = random.Random(seed), Pair(), 0, 1, None
    for _ in range(200):
        choice = rng.random()
        if choice < 0.3:
            taken = {window.buffer for window in pair.own if committed is None or window.start_iteration >= committed}
            free = [buffer for buffer in range(3) if buffer not in taken]
            if free:
                full(pair.own, start, free[0], generation)
                start += NUM_SLICES
        elif choice < 0.8:
            pair.step(generation, lose_answer=rng.random() < 0.2)
        elif choice < 0.97:
            held = {window.key for window in pair.copy if window.complete}
            ready = [window for window in pair.own if window.key in held and not window.committed]
            if ready and ready[0].generation == generation:
                committed = pair.commit(ready[0].start_iteration, generation).start_iteration
        else:
            generation += 1
            for window in pair.own:
                if not window.committed:
                    start = window.start_iteration
                    break
            pair.own.new_generation()
            pair.reconnect()
        if committed is not None:
            assert (committed, 2) in [known[:2] for known in pair.held()]
