"""Tests ramp-up of the batch size and lengths in samples: against Megatron's calculator, and equal in every layout."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron_ft.config.batch_size import BatchSchedule, with_train_iterations
from megatron_ft.config.job import JobConfig, TrainingConfig
from megatron_ft.config.remembered import changes
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.data.batches import BatchReader, plan_batches
from megatron_ft.testing import engines


def training(ramp: list[int] | None, last: int, **values: int) -> TrainingConfig:
    return TrainingConfig(rampup_batch_size=ramp, global_batch_size=last, **{"micro_batch_size": 1, **values})


def sizes_of_megatron(ramp: list[int], last: int) -> Iterator[int]:
    start, increment, samples = ramp
    calculator = RampupBatchsizeNumMicroBatchesCalculator(last, 1, 1, False, 0, start, increment, samples)
    consumed = 0
    while True:
        calculator.update(consumed, consistency_check=False, verbose=False)
        size = calculator.get_current_global_batch_size()
        yield size
        consumed += size


@settings(max_examples=150, deadline=None)
@given(start=st.integers(1, 8), increment=st.integers(1, 7), steps=st.integers(0, 9), samples=st.integers(1, 3000))
def test_batches_are_those_of_megatron(start: int, increment: int, steps: int, samples: int) -> None:
    last = start + steps * increment
    schedule = BatchSchedule.of(training([start, increment, samples], last))
    # With equal sizes Megatron divides by zero; its own arguments have a constant size then.
    expected = iter(lambda: last, None) if not steps else sizes_of_megatron([start, increment, samples], last)
    consumed = 0
    for iteration in range(1, 400):
        assert schedule.samples_before(iteration) == consumed
        assert schedule.batch_size(iteration) == next(expected)
        consumed += schedule.batch_size(iteration)
        assert schedule.num_iterations(consumed) == iteration
        assert schedule.num_iterations(consumed - 1) == iteration - 1


@pytest.mark.parametrize("data_parallel_size", [1, 2, 3, 4])
def test_every_number_of_lanes_reads_each_sample_once_and_in_the_same_iteration(data_parallel_size: int) -> None:
    values = training([2, 2, 30], 8, micro_batch_size=2)
    schedule, plan = BatchSchedule.of(values), plan_batches(values, data_parallel_size, 1)
    for iteration in range(1, 15):
        now, read = plan.at(iteration), []
        for rank in range(data_parallel_size):
            firsts = [now.first_sample(iteration, rank, number) for number in range(now.num_microbatches)]
            read += [first + row for first in firsts if first is not None for row in range(2)]
        begin, end = schedule.samples_before(iteration), schedule.samples_before(iteration + 1)
        assert sorted(read) == list(range(begin, end))
    assert [schedule.batch_size(number) for number in range(1, 12)] == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8]


def test_the_length_in_samples_gives_the_iterations_and_the_schedule() -> None:
    config = JobConfig()
    config.training = training([2, 2, 30], 8, train_samples=100)
    config = with_train_iterations(config)
    assert config.training.train_iterations == 10 + (100 - 34) // 8
    validate(config)
    assert config.optimizer.num_samples(config.training) == (16, 100, 0)
    config.optimizer.lr_warmup_samples, config.optimizer.lr_decay_samples = 20, 80
    validate(config)
    assert config.optimizer.num_samples(config.training) == (20, 80, 0)
    longer = with_train_iterations(replace(config, training=replace(config.training, train_samples=1000)))
    assert [change.key for change in changes(config, longer) if change.concern] == [], "the decay is given"
    other = with_train_iterations(replace(config, training=replace(config.training, rampup_batch_size=[4, 2, 30])))
    (change,) = [change for change in changes(config, other) if change.concern]
    assert change.key == "training.rampup_batch_size" and change.concern == "schedule"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rampup_batch_size": [2, 2]}, "must be three numbers"),
        ({"rampup_batch_size": [0, 2, 30]}, "numbers of at least 1"),
        ({"rampup_batch_size": [3, 2, 30]}, "the first two numbers must be multiples of training.micro_batch_size=2"),
        ({"rampup_batch_size": [2, 4, 30]}, "must reach training.global_batch_size=8"),
        ({"rampup_batch_size": [10, 2, 30]}, "must reach training.global_batch_size=8"),
        ({"rampup_batch_size": [2, 2, 30], "train_samples": None}, "needs training.train_samples"),
        ({"train_samples": 1}, "training.train_samples=1: must be at least one batch"),
        ({"train_samples": 0}, "training.train_samples=0: must be at least 1"),
    ],
)
def test_what_is_refused(values: dict[str, object], message: str) -> None:
    config = JobConfig()
    config.training = replace(training(None, 8, micro_batch_size=2, train_samples=100), **values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        with_train_iterations(config)


def test_keys_of_the_other_unit_are_refused() -> None:
    config = JobConfig()
    config.optimizer.lr_decay_samples = 10
    with pytest.raises(ConfigError, match=r"lr_decay_samples=10: must be null with training\.train_samples=null"):
        validate(config)
    config = JobConfig()
    config.training.train_samples, config.optimizer.lr_decay_iterations = 960, 5
    with pytest.raises(ConfigError, match=r"must be null .* set optimizer\.lr_decay_samples"):
        validate(config)


RAMP = {
    "training.rampup_batch_size": [1, 1, 10],
    "training.train_samples": 60,
    "training.train_iterations": 19,
    "optimizer.lr_warmup_iterations": None,
    "optimizer.lr_warmup_samples": 4,
}


def test_learning_rates_and_losses_follow_the_samples() -> None:
    """The reference is one engine per batch size, whose samples begin where the earlier iterations ended."""
    with engines.engine_of(engines.micro_config(RAMP)) as engine:
        results = [engine.run_iteration(number) for number in range(1, 10)]
        reader = engine.reader("train", 5)
        assert isinstance(reader, BatchReader) and reader.plan.global_batch_size == 2
        evaluated = engine.evaluate()[1]
    sizes = [1, 1, 1, 1, 2, 2, 3, 4, 4]
    assert [result.vote.num_tokens for result in results] == [16 * size for size in sizes]
    assert evaluated == 4 * 4 * 16, "evaluations have the whole batch"
    consumed = [sum(sizes[:number]) for number in range(9)]
    assert [result.learning_rate for result in results[:4]] == pytest.approx([1e-2 * n / 4 for n in consumed[:4]])
    rates = [result.learning_rate for result in results[4:]]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == len(rates)


def test_a_rollback_within_the_ramp_up_repeats_the_iteration_to_the_bit() -> None:
    with engines.engine_of(engines.micro_config(RAMP)) as engine:
        expected = [engine.run_iteration(number).vote.loss for number in range(1, 8)]
        rate = engine.optimizer.param_groups[0]["lr"]
    with engines.engine_of(engines.micro_config(RAMP)) as engine:
        losses = [engine.run_iteration(number).vote.loss for number in range(1, 6)]
        engine.prepare(6)
        engine.abort()
        losses += [engine.run_iteration(number).vote.loss for number in (6, 7)]
        assert losses == expected and engine.optimizer.param_groups[0]["lr"] == rate
        assert torch.isfinite(torch.tensor(losses)).all()
