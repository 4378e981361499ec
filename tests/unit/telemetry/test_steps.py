"""Tests how records are grouped into wandb steps: each iteration once, in rising order."""

from collections.abc import Iterable

import pytest

from megatron_ft.events import Evaluation, ExpertLoad, Metrics, Record
from megatron_ft.telemetry.sinks.queued import Step, Steps
from tests.unit.telemetry.test_goodput import decided, failed, started, trained


def loaded(iteration: int) -> Record:
    return ExpertLoad(iteration=iteration, layers=((1, 3), (2, 2)), layer_numbers=(2, 4))


def taken(steps: Steps, records: Iterable[Record], *, live: bool = True) -> list[Step]:
    """Return the steps that ``records`` complete. With ``live``, each step is sent at once."""
    found = []
    for record in records:
        if (step := steps.take(record)) is not None:
            found.append(step)
            if live:
                steps.sent(step.iteration)
    return found


def iterations(found: Iterable[Step]) -> list[int]:
    return [step.iteration for step in found]


def train(first: int, last: int, at: float) -> list[Record]:
    return [trained(iteration, at + iteration) for iteration in range(first, last + 1)]


def test_a_step_has_all_of_its_iteration_and_comes_when_the_next_begins() -> None:
    steps = Steps(sent=0)
    assert taken(steps, [started(0.0), trained(1, 1.0), loaded(1), Evaluation(iteration=1, loss=2.5)]) == []
    (step,) = taken(steps, [loaded(2)])
    assert step.iteration == 1 and step.figures["evaluation_loss"] == 2.5 and step.figures["loss"] == 1.0
    assert step.figures["expert_load/layer_2_max_over_even"] == 1.5 and step.figures["job/attempt"] == 1
    assert step.figures["expert_load/layer_4_hhi_over_even"] == 1.0
    last = steps.finish()
    assert last is not None and last.iteration == 2 and "loss" not in last.figures
    assert steps.finish() is None


def test_what_was_sent_is_not_given_again_and_what_was_not_is_replaced() -> None:
    steps = Steps(sent=0)
    first = [*train(1, 5, 0.0), failed(6.0), decided(7.0, 3)]
    assert iterations(taken(steps, first)) == [1, 2, 3, 4]
    changed = Metrics(iteration=5, values={"loss": 9.0}, time_unix_seconds=None)
    found = taken(steps, [*train(4, 4, 8.0), changed, *train(6, 6, 8.0)])
    assert iterations(found) == [5] and found[0].figures["loss"] == 9.0, "the 5 that was lost is void"
    assert "recovery/rollback_seconds" in found[0].figures, "iteration 4 brought it, and could not take it along"


def test_a_recovery_whose_iteration_is_void_is_reported_with_the_next() -> None:
    steps = Steps(sent=0)
    first = [started(0.0), *train(1, 4, 0.0), failed(5.0), decided(6.0, 4), *train(5, 5, 8.0)]
    again = [failed(15.0), decided(16.0, 4), *train(5, 6, 20.0)]
    *_, fifth = taken(steps, [*first, *again])
    assert fifth.iteration == 5
    assert fifth.figures["recovery/rollback_seconds"] == pytest.approx(steps.run.goodput.recovery_seconds)
    read_again = Steps(sent=5)
    assert taken(read_again, [*first, *again], live=False) == []
    (sixth,) = taken(read_again, train(7, 7, 20.0), live=False)
    assert sixth.iteration == 6 and "recovery/rollback_seconds" not in sixth.figures, "it is in the fifth"


def test_a_start_that_goes_back_voids_the_iteration_at_hand_and_one_that_does_not_completes_it() -> None:
    steps = Steps(sent=0)
    assert iterations(taken(steps, [started(0.0), *train(1, 5, 0.0), started(9.0, 4)])) == [1, 2, 3, 4]
    found = taken(steps, [*train(5, 6, 9.0), started(20.0, 6)])
    assert iterations(found) == [5, 6] and [step.figures["job/attempt"] for step in found] == [2, 2]


def test_history_gives_what_the_tracker_lost_and_no_recovery_twice() -> None:
    history = [started(0.0), *train(1, 3, 0.0), started(9.0, 3), *train(4, 8, 9.0), failed(18.0)]
    steps = Steps(sent=6)
    missed = taken(steps, history, live=False)
    assert iterations(missed) == [7] and not any(name.startswith("recovery") for name in missed[0].figures)
    (eighth,) = taken(steps, [started(30.0, 8)])
    assert eighth.iteration == 8 and eighth.figures["job/attempt"] == 2
    (ninth,) = taken(steps, [trained(9, 40.0), trained(10, 41.0)])
    assert ninth.figures["job/attempt"] == 3 and ninth.figures["goodput/interruptions"] == 2
    assert [name for name in ninth.figures if name.startswith("recovery")] == ["recovery/unknown_seconds"]


def test_history_that_went_back_gives_the_newest_of_each() -> None:
    steps = Steps(sent=2)
    history = [started(0.0), *train(1, 6, 0.0), started(9.0, 3), *train(4, 5, 9.0)]
    found = taken(steps, history, live=False)
    assert iterations(found) == [3, 4, 5, 4], "a later one replaces an earlier one"
    assert [step.figures["job/attempt"] for step in found] == [1, 1, 1, 2]
