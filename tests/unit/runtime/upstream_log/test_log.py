"""Tests the log of sent tensors: slots, order, commits, trimming, gaps."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.iteration import Vote
from megatron_ft.runtime.upstream_log.log import UpstreamLog

SENDS = {"forward": ((0, 0), (1, 0), (0, 1)), "backward": ((0, 1), (1, 1))}
SHAPE = (2, 1, 3)


def make(num_iterations: int = 3) -> UpstreamLog:
    return UpstreamLog(
        num_iterations=num_iterations,
        sends=SENDS,  # type: ignore[arg-type]
        shape=SHAPE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def vote(iteration: int) -> Vote:
    values = {"grad_norm": 1.0, "clip_coefficient": 1.0, "loss_scale": 1.0, "loss": 2.0, "aux_loss": 0.0, "z_loss": 0.0}
    return Vote(generation=0, iteration=iteration, found_inf=False, num_tokens=6, **values)  # type: ignore[arg-type]


def tensor(iteration: int, direction: str, position: int) -> torch.Tensor:
    value = iteration * 100 + (50 if direction == "backward" else 0) + position
    return torch.full(SHAPE, float(value))


def run(log: UpstreamLog, iteration: int, *, generation: int = 0, commits: bool = True, shift: int = 0) -> None:
    log.begin(iteration, generation)
    for direction, order in SENDS.items():
        for position in range(len(order)):
            log.append(direction, tensor(iteration + shift, direction, position))  # type: ignore[arg-type]
    log.end()
    if commits:
        log.commit(vote(iteration))


def test_gives_back_what_was_sent_in_order() -> None:
    log = make()
    run(log, 5, generation=2)
    found = list(log.entries(5, "forward"))
    assert [(key.microbatch, key.chunk) for key, _ in found] == list(SENDS["forward"])
    assert {(key.iteration, key.direction, key.generation) for key, _ in found} == {(5, "forward", 2)}
    for position, (_, kept) in enumerate(found):
        assert torch.equal(kept, tensor(5, "forward", position))
    assert [float(kept.view(-1)[0]) for _, kept in log.entries(5, "backward")] == [550.0, 551.0]


def test_keeps_copies() -> None:
    log, sent = make(), tensor(1, "forward", 0)
    log.begin(1, 0)
    log.append("forward", sent)
    sent.zero_()
    for position, direction in ((1, "forward"), (2, "forward"), (0, "backward"), (1, "backward")):
        log.append(direction, tensor(1, direction, position))  # type: ignore[arg-type]
    log.end()
    log.commit(vote(1))
    assert float(next(iter(log.entries(1, "forward")))[1].view(-1)[0]) == 100.0


def test_only_committed_iterations_serve() -> None:
    log = make()
    run(log, 1)
    run(log, 2, commits=False)
    assert log.iterations == (1,) and set(log.votes) == {1}
    with pytest.raises(RecoveryError, match="iteration 2 is not in the upstream log"):
        list(log.entries(2, "forward"))


def test_an_iteration_that_is_run_again_replaces_its_first_try() -> None:
    log = make(num_iterations=1)
    run(log, 1, commits=False)
    run(log, 1, generation=1, shift=3)
    key, kept = next(iter(log.entries(1, "forward")))
    assert key.generation == 1 and float(kept.view(-1)[0]) == 400.0


def test_a_committed_iteration_that_is_run_again_stays_committed() -> None:
    """A replay that fails in the middle of the iteration loses nothing, because it sends the same bits again."""
    log = make()
    run(log, 2)
    log.begin(2, 3)
    log.append("forward", tensor(2, "forward", 0))
    assert log.iterations == (2,)
    assert [float(kept.view(-1)[0]) for _, kept in log.entries(2, "forward")] == [200.0, 201.0, 202.0]


def test_without_a_slot_an_iteration_is_a_gap_and_counted() -> None:
    log = make(num_iterations=2)
    for iteration in (1, 2, 3):
        run(log, iteration)
    assert log.iterations == (1, 2) and log.figures.num_unlogged == 1
    assert set(log.votes) == {1, 2, 3}, "what was voted needs no slot"
    log.trim(1)
    run(log, 4)
    assert log.iterations == (2, 4)


def test_tells_once_of_each_row_of_iterations_without_a_slot() -> None:
    log = make(num_iterations=1)
    reported = []
    for iteration in range(1, 8):
        run(log, iteration)
        reported.append(log.take_gap())
        log.trim(5 if iteration == 5 else 0)
    assert reported == [None, 2, None, None, None, None, 7]
    assert log.figures.num_unlogged == 5
    log.begin(7, 1)
    assert log.take_gap() is None, "the same one, run again"


def test_what_is_not_reported_yet_is_not_lost_where_a_log_grows() -> None:
    log, larger = make(num_iterations=1), make(num_iterations=2)
    run(log, 1)
    run(log, 2)
    larger.grown(log)
    run(larger, 3)
    assert larger.iterations == (1, 3) and larger.take_gap() == 2
    run(larger, 4)
    assert larger.take_gap() == 4


def test_trimming_forgets_what_no_window_needs() -> None:
    log = make(num_iterations=4)
    for iteration in range(1, 5):
        run(log, iteration)
    log.trim(2)
    assert log.iterations == (3, 4)


def test_evaluations_are_not_logged() -> None:
    log = make()
    log.append("forward", tensor(1, "forward", 0))
    assert log.figures.num_tensors == 0


def test_nothing_is_of_an_iteration_that_has_broken() -> None:
    log = make()
    log.begin(1, 0)
    log.append("forward", tensor(1, "forward", 0))
    log.abandon()
    for _ in range(4):
        log.append("forward", tensor(1, "forward", 0))
    assert log.figures.num_tensors == 1
    run(log, 1)
    assert log.iterations == (1,)


def test_an_iteration_that_sends_too_little_or_too_much_is_noticed() -> None:
    log = make()
    log.begin(1, 0)
    log.append("backward", tensor(1, "backward", 0))
    with pytest.raises(AssertionError, match="an iteration sent"):
        log.end()
    log.begin(1, 0)
    log.append("backward", tensor(1, "backward", 0))
    log.append("backward", tensor(1, "backward", 1))
    with pytest.raises(AssertionError, match="at most 2"):
        log.append("backward", tensor(1, "backward", 1))


def test_a_larger_log_takes_over_everything() -> None:
    log = make(num_iterations=2)
    run(log, 3)
    run(log, 4, commits=False)
    larger = make(num_iterations=5)
    larger.grown(log)
    assert larger.iterations == (3,) and larger.figures.num_tensors == 10
    assert [float(kept.view(-1)[0]) for _, kept in larger.entries(3, "backward")] == [350.0, 351.0]
    larger.commit(vote(4))
    assert [float(kept.view(-1)[0]) for _, kept in larger.entries(4, "forward")] == [400.0, 401.0, 402.0]


def test_says_how_much_memory_it_takes() -> None:
    assert make(num_iterations=3).num_bytes == 3 * 5 * 6 * 4


def test_on_a_stream_of_its_own_a_copy_waits_for_the_computation_and_nobody_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The streams of a GPU are replaced by names, recorded in the order in which work is queued on them."""
    seen: list[object] = []

    class Stream:
        def wait_stream(self, other: str) -> None:
            seen.append(f"waits for {other}")

    class Source:
        def record_stream(self, stream: Stream) -> None:
            seen.append("is kept for the stream")

    class Target:
        def copy_(self, source: Source, *, non_blocking: bool) -> None:
            seen.append(("copy", non_blocking))

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        seen.append("begins")
        yield
        seen.append("ends")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the computation")
    monkeypatch.setattr(torch.cuda, "stream", on)
    log = make()
    log._stream = Stream()  # type: ignore[assignment]
    log._copy(Target(), Source())  # type: ignore[arg-type]
    assert seen == ["waits for the computation", "begins", ("copy", True), "ends", "is kept for the stream"]
