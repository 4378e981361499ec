"""Compares formulas of a stage's idle time with the virtual clock, and tests how a slice is divided."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.cost.pipeline_clock import IterationSeconds, PassSeconds, StageSeconds, receive_waits
from megatron_ft.planning.pipeline import PipelineShape
from megatron_ft.planning.snapshot.bubbles import IdleProfile, StageIdle


def even(shape: PipelineShape, passes: PassSeconds) -> list[StageSeconds]:
    return [StageSeconds(chunks=(passes,) * shape.num_chunks)] * shape.num_stages


def check(shape: PipelineShape, passes: PassSeconds) -> None:
    """Compare every stage with the simulated pipeline."""
    stages = even(shape, passes)
    makespan = IterationSeconds.of(shape, stages).makespan_seconds
    for stage, waits in enumerate(receive_waits(shape, stages)):
        idle = StageIdle.of(shape, stage, passes)
        assert idle.receive_seconds == pytest.approx(sum(end - start for start, end in waits))
        assert idle.total_seconds == pytest.approx(makespan - stages[stage].busy_seconds(shape.num_microbatches))
        first = waits[0][1] if waits and waits[0][0] == 0.0 else 0.0
        assert idle.before_seconds == pytest.approx(first)


# Multiples of 1/64 have exact sums, so a rounding error cannot look like a short wait.
seconds = st.integers(min_value=1, max_value=512).map(lambda number: number / 64)


@given(num_stages=st.integers(1, 9), num_microbatches=st.integers(1, 20), forward=seconds, backward=seconds)
def test_1f1b(num_stages: int, num_microbatches: int, forward: float, backward: float) -> None:
    shape = PipelineShape(num_stages=num_stages, num_microbatches=num_microbatches)
    check(shape, PassSeconds(forward_seconds=forward, backward_seconds=backward))


@given(
    num_stages=st.integers(2, 6),
    more_in_group=st.integers(0, 4),
    num_groups=st.integers(1, 3),
    rest=st.integers(0, 10),
    num_chunks=st.integers(2, 4),
    forward=seconds,
    backward=seconds,
)
def test_interleaved_stages(
    num_stages: int,
    more_in_group: int,
    num_groups: int,
    rest: int,
    num_chunks: int,
    forward: float,
    backward: float,
) -> None:
    size = num_stages + more_in_group
    assume(rest == 0 or num_stages <= rest < size)
    shape = PipelineShape(
        num_stages=num_stages,
        num_microbatches=num_groups * size + rest,
        num_chunks=num_chunks,
        microbatch_group_size=size,
    )
    check(shape, PassSeconds(forward_seconds=forward, backward_seconds=backward))


def test_the_paper_s_pipeline_by_hand() -> None:
    """Four stages, f=1 and b=2: the first stage waits 9 s for the first gradient, the last one 3 s for a sample."""
    shape = PipelineShape(num_stages=4, num_microbatches=8)
    found = [StageIdle.of(shape, stage, PassSeconds(forward_seconds=1.0, backward_seconds=2.0)) for stage in range(4)]
    assert [(idle.before_seconds, idle.between_seconds, idle.after_seconds) for idle in found] == [
        (0.0, 9.0, 0.0),
        (1.0, 6.0, 2.0),
        (2.0, 3.0, 4.0),
        (3.0, 0.0, 6.0),
    ]


def test_invalid_shapes_are_refused() -> None:
    invalid = PipelineShape(num_stages=3, num_microbatches=4, num_chunks=2)
    with pytest.raises(ConfigError, match="groups of 3 microbatches"):
        StageIdle.of(invalid, 0, PassSeconds(forward_seconds=1.0, backward_seconds=2.0))


def test_only_what_fits_nowhere_is_copied_at_once() -> None:
    profile = IdleProfile(idle_seconds=2.0, tail_seconds=0.5, idle_bytes_per_second=100.0, busy_bytes_per_second=40.0)
    assert [profile.bytes_at_once(number) for number in (0, 219, 220, 221, 1000)] == [0, 0, 0, 1, 780]


def test_unequal_stages_wait_for_the_slowest() -> None:
    """By hand: the second stage computes 3 s for each microbatch that the first one has after 1 s."""
    shape = PipelineShape(num_stages=2, num_microbatches=2)
    fast = StageSeconds(chunks=(PassSeconds(forward_seconds=1.0, backward_seconds=1.0),))
    slow = StageSeconds(chunks=(PassSeconds(forward_seconds=1.0, backward_seconds=2.0),))
    assert receive_waits(shape, [fast, slow]) == (((2.0, 4.0), (5.0, 7.0)), ((0.0, 1.0),))
    assert receive_waits(shape, [fast, slow], send_seconds=0.5) == (((2.0, 5.0), (6.0, 8.0)), ((0.0, 1.5),))
