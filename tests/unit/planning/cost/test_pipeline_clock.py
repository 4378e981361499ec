"""Compares the virtual clock of a pipeline with formulas and with schedules computed by hand."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.planning.cost.pipeline_clock import (
    CopiedIteration,
    IterationSeconds,
    PassSeconds,
    StageCopy,
    StageSeconds,
    receive_waits,
)
from megatron_ft.planning.pipeline import PipelineShape

FORWARD, BACKWARD, UPDATE = 1.0, 2.0, 0.5


def even(shape: PipelineShape) -> list[StageSeconds]:
    """Return stages with equal times."""
    one = PassSeconds(forward_seconds=FORWARD, backward_seconds=BACKWARD)
    return [StageSeconds(chunks=(one,) * shape.num_chunks, update_seconds=UPDATE)] * shape.num_stages


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 4), (2, 4), (3, 6), (4, 4), (8, 16), (12, 24)])
def test_1f1b_fills_and_drains(num_stages: int, num_microbatches: int) -> None:
    """(M + PP - 1) (f + b): Narayanan et al., 2021, section 2.2."""
    shape = PipelineShape(num_stages=num_stages, num_microbatches=num_microbatches)
    result = IterationSeconds.of(shape, even(shape))
    expected = (num_microbatches + num_stages - 1) * (FORWARD + BACKWARD) + UPDATE
    assert result.makespan_seconds == pytest.approx(expected)
    assert result.num_executions == num_stages * num_microbatches
    busy = num_stages * (num_microbatches * (FORWARD + BACKWARD) + UPDATE)
    assert result.busy_seconds == pytest.approx(busy)


@pytest.mark.parametrize(("num_stages", "num_chunks", "num_microbatches"), [(2, 2, 4), (3, 2, 6), (4, 3, 8)])
def test_interleaving_shrinks_the_bubble(num_stages: int, num_chunks: int, num_microbatches: int) -> None:
    """(M * V + PP - 1) (f + b), with f and b of one chunk, because the bubble is that of one chunk."""
    shape = PipelineShape(num_stages=num_stages, num_chunks=num_chunks, num_microbatches=num_microbatches)
    expected = (num_microbatches * num_chunks + num_stages - 1) * (FORWARD + BACKWARD) + UPDATE
    assert IterationSeconds.of(shape, even(shape)).makespan_seconds == pytest.approx(expected)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_stage_alone_never_waits(stage: int, num_chunks: int) -> None:
    shape = PipelineShape(num_stages=4, num_chunks=num_chunks, num_microbatches=8)
    result = IterationSeconds.of(shape, even(shape), replayed=[stage])
    expected = 8 * num_chunks * (FORWARD + BACKWARD) + UPDATE
    assert result == IterationSeconds(makespan_seconds=expected, busy_seconds=expected, num_executions=8)


def test_the_last_stages_together_are_a_shorter_pipeline() -> None:
    shape = PipelineShape(num_stages=6, num_microbatches=5)
    result = IterationSeconds.of(shape, even(shape), replayed=[4, 5])
    assert result.makespan_seconds == pytest.approx((5 + 1) * (FORWARD + BACKWARD) + UPDATE)
    assert result.num_executions == 10


def test_separate_stages_replay_side_by_side() -> None:
    shape = PipelineShape(num_stages=5, num_microbatches=4)
    alone = IterationSeconds.of(shape, even(shape), replayed=[1])
    both = IterationSeconds.of(shape, even(shape), replayed=[1, 3])
    assert both.makespan_seconds == alone.makespan_seconds and both.num_executions == 2 * alone.num_executions


def test_two_stages_with_sends_by_hand() -> None:
    """f0 ends at 1 and arrives at 1.25. The last stage runs f0 and b0 until 4.25, and b0 arrives at 4.5. Stage 0 runs
    f1 early, and b0 until 6.5."""
    shape = PipelineShape(num_stages=2, num_microbatches=2)
    result = IterationSeconds.of(shape, even(shape), send_seconds=0.25)
    # Stage 1: f0 1.25-2.25, b0 -4.25, f1 -5.25, b1 -7.25; stage 0: b0 4.5-6.5, b1 7.5-9.5.
    assert result.makespan_seconds == pytest.approx(9.5 + UPDATE)


def test_a_slow_log_holds_a_replay_up() -> None:
    """A tensor arrives every 10 s, the third at 30 s. Then the last forward pass and two backward passes run."""
    shape = PipelineShape(num_stages=3, num_microbatches=3)
    result = IterationSeconds.of(shape, even(shape), replayed=[1], send_seconds=10.0)
    assert result.makespan_seconds == pytest.approx(30 + FORWARD + 2 * BACKWARD + UPDATE)


def test_the_slowest_stage_holds_a_pipeline_up_but_not_another_replay() -> None:
    shape = PipelineShape(num_stages=3, num_microbatches=4)
    stages = even(shape)
    slow = PassSeconds(forward_seconds=10 * FORWARD, backward_seconds=10 * BACKWARD)
    stages[2] = StageSeconds(chunks=(slow,), update_seconds=UPDATE)
    assert IterationSeconds.of(shape, stages).makespan_seconds >= 4 * 30
    assert IterationSeconds.of(shape, stages, replayed=[0]).makespan_seconds == 4 * 3 + UPDATE


def test_iterations_follow_each_other() -> None:
    one = IterationSeconds(makespan_seconds=2.0, busy_seconds=3.0, num_executions=4)
    assert one + one == IterationSeconds(makespan_seconds=4.0, busy_seconds=6.0, num_executions=8)


TIMES = st.integers(1, 20).map(float)


@given(data=st.data(), num_stages=st.integers(2, 4), num_chunks=st.integers(1, 2), groups=st.integers(1, 2))
def test_more_stages_never_replay_faster(data: st.DataObject, num_stages: int, num_chunks: int, groups: int) -> None:
    """No replay is faster than its busiest stage, or slower than all of its passes in sequence."""
    shape = PipelineShape(num_stages=num_stages, num_chunks=num_chunks, num_microbatches=groups * num_stages)
    passes = st.builds(PassSeconds, forward_seconds=TIMES, backward_seconds=TIMES)
    chunks = st.tuples(*[passes] * num_chunks)
    stages = [data.draw(st.builds(StageSeconds, chunks=chunks, update_seconds=TIMES)) for _ in range(num_stages)]
    everything = IterationSeconds.of(shape, stages)
    for size in range(1, num_stages):
        for replayed in combinations(range(num_stages), size):
            result = IterationSeconds.of(shape, stages, replayed=replayed)
            busiest = max(stages[stage].busy_seconds(shape.num_microbatches) for stage in replayed)
            assert busiest <= result.makespan_seconds <= everything.makespan_seconds
            assert result.makespan_seconds <= result.busy_seconds
            assert result.num_executions * num_stages == everything.num_executions * size


def test_stages_that_are_not_there_are_refused() -> None:
    shape = PipelineShape(num_stages=2, num_microbatches=2)
    for replayed in ([], [2], [-1]):
        with pytest.raises(AssertionError):
            IterationSeconds.of(shape, even(shape), replayed=replayed)
    with pytest.raises(AssertionError):
        IterationSeconds.of(shape, even(shape)[:1])


TWO = PipelineShape(num_stages=2, num_microbatches=2)
"""By hand, with f=1 and b=2: the first stage runs F0 0-1, F1 1-2, waits until 4, B0 4-6, waits until 7, B1 7-9. The
last stage waits until 1 and then runs F0, B0, F1, B1 until 7."""


def copied(seconds: float, at_once: tuple[float, float]) -> CopiedIteration:
    copies = [StageCopy(seconds=seconds, at_once_seconds=each) for each in at_once]
    return CopiedIteration.of(TWO, even(TWO), copies)


def test_a_copy_in_bubbles_costs_nothing_while_it_fits() -> None:
    assert receive_waits(TWO, even(TWO)) == (((2.0, 4.0), (6.0, 7.0)), ((0.0, 1.0),))
    undisturbed = IterationSeconds.of(TWO, even(TWO)).makespan_seconds
    fits = copied(1.0, (0.0, 0.0))
    assert fits.makespan_seconds == undisturbed == 9.0 + UPDATE
    assert (fits.idle_copy_seconds, fits.late_copy_seconds) == ((1.0, 1.0), (0.0, 0.0))


def test_a_copy_at_once_takes_half_of_the_core() -> None:
    """The first stage copies during F0, so F0 ends at 2. The last stage has copied before that."""
    shared = copied(1.0, (1.0, 1.0))
    assert shared.makespan_seconds == 10.0 + UPDATE
    assert (shared.idle_copy_seconds, shared.late_copy_seconds) == ((0.0, 1.0), (0.0, 0.0))


def test_what_fits_into_no_bubble_prolongs_the_last_passes() -> None:
    """The first stage copies 3 s while it waits and 1 s during B1. The last stage copies 1 s while it waits, 1 s during
    its last F1 and 2 s during B1, which therefore end at 5 and 9. The first stage then waits for 2 s more."""
    late = copied(4.0, (0.0, 0.0))
    assert late.idle_copy_seconds == (4.0, 1.0)
    assert late.late_copy_seconds == (0.0, 0.0)
    assert late.makespan_seconds == 12.0 + UPDATE


def test_what_is_left_after_the_last_pass_delays_the_update() -> None:
    late = copied(20.0, (0.0, 0.0))
    first, last = late.late_copy_seconds
    assert late.makespan_seconds >= 20.0 + UPDATE and first > 0 and last > 0
    # The last stage computes 6 s, copies 20 s, and waits 1 s, during which it copies, too.
    assert last == 20.0 - 1.0 - 3.0


@given(
    num_stages=st.integers(1, 5),
    num_microbatches=st.integers(1, 8),
    num_chunks=st.integers(1, 2),
    seconds=st.floats(0, 30),
    share=st.floats(0, 1),
)
def test_every_copy_ends_and_costs_at_most_its_own_time(
    num_stages: int, num_microbatches: int, num_chunks: int, seconds: float, share: float
) -> None:
    num_chunks = 1 if num_stages == 1 else num_chunks
    shape = PipelineShape(num_stages=num_stages, num_microbatches=num_microbatches * num_stages, num_chunks=num_chunks)
    copies = [StageCopy(seconds=seconds, at_once_seconds=share * seconds)] * num_stages
    found = CopiedIteration.of(shape, even(shape), copies)
    undisturbed = IterationSeconds.of(shape, even(shape)).makespan_seconds
    # Passes of all stages depend on each other, so the copies of all stages may add up.
    assert undisturbed - 1e-9 <= found.makespan_seconds <= undisturbed + num_stages * seconds + 1e-9
    assert all(0 <= used <= seconds + 1e-9 for used in found.idle_copy_seconds)
