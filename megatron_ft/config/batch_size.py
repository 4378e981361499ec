"""Number of samples of each iteration: constant, or growing at the start of the training (ramp-up)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ft.config.job import JobConfig, TrainingConfig
from megatron_ft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Phase:
    """Consecutive iterations that have the same number of samples each."""

    first_iteration: int
    """First iteration, counted from 1."""
    samples_before: int
    """Total number of samples in the iterations before ``first_iteration``."""
    batch_size: int


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Number of samples of each iteration. The schedule depends only on the configuration. All ranks therefore compute
    the same numbers, in every parallel layout and after every recovery."""

    phases: tuple[_Phase, ...]

    @classmethod
    def of(cls, training: TrainingConfig) -> "BatchSchedule":
        """Compute the schedule like ``RampupBatchsizeNumMicroBatchesCalculator`` of Megatron-Core. The samples of the
        ramp-up are divided into equal parts. After each part, the batch size grows by the increment. After the last
        part, the batch size is ``training.global_batch_size``."""
        last = training.global_batch_size
        if training.rampup_batch_size is None:
            return cls((_Phase(1, 0, last),))
        start, increment, ramp = training.rampup_batch_size
        if start == last:
            return cls((_Phase(1, 0, last),))
        phases: list[_Phase] = []
        iteration, consumed, part = 1, 0, ramp / ((last - start) // increment)
        while True:
            # Divide in floating point as Megatron-Core does: rounding can decide at which iteration the batch grows.
            size = last if consumed > ramp else min(last, start + int(consumed / part) * increment)
            if not phases or size != phases[-1].batch_size:
                phases.append(_Phase(iteration, consumed, size))
            if size == last:
                return cls(tuple(phases))
            iteration, consumed = iteration + 1, consumed + size

    def batch_size(self, iteration: int) -> int:
        """Return the number of samples in ``iteration``. The first iteration has number 1."""
        return self._phase(iteration).batch_size

    def samples_before(self, iteration: int) -> int:
        """Return the total number of samples in the iterations before ``iteration``. The first iteration is 1."""
        phase = self._phase(iteration)
        return phase.samples_before + (iteration - phase.first_iteration) * phase.batch_size

    def _phase(self, iteration: int) -> _Phase:
        assert iteration >= 1, f"iteration {iteration} must be at least 1"
        return self.phases[bisect_right(self.phases, iteration, key=lambda phase: phase.first_iteration) - 1]

    def num_iterations(self, num_samples: int) -> int:
        """Return the number of whole iterations that use the first ``num_samples`` samples of a run.

        Megatron-LM counts one more iteration if the samples end within the ramp-up.
        """
        phase = self.phases[bisect_right(self.phases, num_samples, key=lambda each: each.samples_before) - 1]
        return phase.first_iteration - 1 + (num_samples - phase.samples_before) // phase.batch_size


def with_train_iterations(config: JobConfig) -> JobConfig:
    """Return ``config`` with ``training.train_iterations`` computed from ``training.train_samples``, if this is given.

    Raises:
        ConfigError: the keys of the batch size are not valid, or there are too few samples for one iteration.
    """
    training = config.training
    check_batch_size(training)
    if training.train_samples is None:
        return config
    iterations = BatchSchedule.of(training).num_iterations(training.train_samples)
    if iterations < 1:
        constraint = "must be at least one batch (training.global_batch_size or start of training.rampup_batch_size)"
        raise ConfigError.of("training.train_samples", training.train_samples, constraint)
    return replace(config, training=replace(training, train_iterations=iterations))


def check_batch_size(training: TrainingConfig) -> None:
    """Check ``training.train_samples`` and ``training.rampup_batch_size``. Raises ConfigError."""
    samples, ramp, last = training.train_samples, training.rampup_batch_size, training.global_batch_size
    if samples is not None and samples < 1:
        raise ConfigError.of("training.train_samples", samples, "must be at least 1")
    if ramp is None:
        return
    if (problem := _problem(ramp, last, training.micro_batch_size)) is not None:
        raise ConfigError.of("training.rampup_batch_size", list(ramp), problem)
    if samples is None:
        constraint = "needs training.train_samples, because batches of a ramp-up have different sizes"
        raise ConfigError.of("training.rampup_batch_size", list(ramp), constraint)


def _problem(ramp: Sequence[int], last: int, micro_batch_size: int) -> str | None:
    if len(ramp) != 3:
        return "must be three numbers: first batch size, increment, samples of the ramp-up"
    start, increment, samples = ramp
    if min(start, increment, samples) < 1:
        return "must contain only numbers of at least 1"
    if start % micro_batch_size or increment % micro_batch_size:
        return f"the first two numbers must be multiples of training.micro_batch_size={micro_batch_size}"
    if start > last or (last - start) % increment:
        return f"the first number, increased in steps of the second, must reach training.global_batch_size={last}"
    return None
