"""Tests which rank reads which sample: every sample once, in any layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.iteration import BatchPlan

PLANS = st.builds(
    lambda microbatches, size, ranks, multiple: BatchPlan(
        global_batch_size=microbatches * size,
        micro_batch_size=size,
        data_parallel_size=ranks,
        num_microbatches_multiple=multiple,
    ),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 5),
)


def samples(plan: BatchPlan, iteration: int) -> list[int]:
    """Return every sample that any rank reads in an iteration, in the order of ranks and microbatches."""
    firsts = [
        plan.first_sample(iteration, rank, microbatch)
        for rank in range(plan.data_parallel_size)
        for microbatch in range(plan.num_microbatches)
    ]
    return [first + offset for first in firsts if first is not None for offset in range(plan.micro_batch_size)]


@given(plan=PLANS, iteration=st.integers(1, 10**9))
def test_an_iteration_reads_each_of_its_samples_once(plan: BatchPlan, iteration: int) -> None:
    """The set of samples is the same in every layout, and no sample is left out."""
    plan.validate()
    size = plan.global_batch_size
    assert sorted(samples(plan, iteration)) == list(range((iteration - 1) * size, iteration * size))


@given(plan=PLANS)
def test_padding_is_at_the_end_and_no_more_than_needed(plan: BatchPlan) -> None:
    num_padding = 0
    for rank in range(plan.data_parallel_size):
        real = [plan.first_sample(1, rank, number) is not None for number in range(plan.num_microbatches)]
        assert real == sorted(real, reverse=True), "a real microbatch follows a padding one"
        num_padding += real.count(False)
    assert num_padding == plan.num_padding_microbatches
    assert plan.num_microbatches % plan.num_microbatches_multiple == 0
    fewer = plan.num_microbatches - plan.num_microbatches_multiple
    assert fewer * plan.data_parallel_size < plan.num_real_microbatches


def test_by_hand() -> None:
    """Seven microbatches of two samples on three ranks are three per rank; the last ones of ranks 1 and 2 are
    padding."""
    plan = BatchPlan(global_batch_size=14, micro_batch_size=2, data_parallel_size=3)
    dealt = [[plan.first_sample(2, rank, number) for number in range(plan.num_microbatches)] for rank in range(3)]
    assert dealt == [[14, 20, 26], [16, 22, None], [18, 24, None]]


def test_refuses_half_a_microbatch() -> None:
    plan = BatchPlan(global_batch_size=9, micro_batch_size=2, data_parallel_size=1)
    with pytest.raises(ConfigError, match=r"training\.global_batch_size=9: must be a multiple of .*=2"):
        plan.validate()
