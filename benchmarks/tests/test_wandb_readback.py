"""Reading back from wandb: a complete run has no problems, and each defect of an incomplete one is found."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wandb_readback import WandbHistory, WandbStep, history_of
from megatron_ft import events
from megatron_ft.config.job import JobConfig
from megatron_ft.telemetry import open_sinks
from megatron_ft.telemetry.sinks import wandb as wandb_sink
from megatron_ft.testing.made_up_runs import RUN_STARTED, run_records

STARTED = events.RunStarted(run_name="trial", model="moe_micro", world_size=2)
ENDED = events.RunFinished(exit_code=0, reason="done")


def step(iteration: int, folder: int = 1, attempt: int = 1, **figures: float) -> WandbStep:
    own = {"iteration": iteration, "job/attempt": attempt, "loss": float(iteration)}
    return WandbStep(folder=folder, step=iteration, figures=own | figures)


def whole(**changes: Any) -> WandbHistory:
    """Two attempts: 1 to 4, of which 3 and 4 were lost, and on to 6; wandb had lost 2 and got it from the second."""
    losses: Mapping[int, Sequence[float]] = {
        1: (1.0,),
        2: (2.0,),
        3: (3.5, 3.0),
        4: (4.5, 4.0),
        **{iteration: (float(iteration),) for iteration in (5, 6)},
    }
    history = WandbHistory(
        run_ids=("abc", "abc"),
        own_id="abc",
        steps=(step(1), step(2, 2), *(step(iteration, 2, 2) for iteration in (3, 4, 5, 6))),
        begins={1: 1, 2: 2},
        losses=losses,
        events=(STARTED, STARTED, ENDED),
    )
    return dataclasses.replace(history, **changes)


def without(*iterations: int) -> tuple[WandbStep, ...]:
    return tuple(each for each in whole().steps if each.iteration not in iterations)


def test_a_whole_run_has_no_problems_and_says_what_happened() -> None:
    history = whole()
    assert history.problems() == []
    assert (history.num_attempts, history.num_run_again, history.num_sent_late) == (2, 2, 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": without(4)}, "iteration 4 is missing"),
        ({"steps": without(6)}, "iteration 6 is missing"),
        ({"steps": (*whole().steps, step(6, 2, 2))}, "iteration 6 comes after 6"),
        ({"steps": (*whole().steps, step(2, 2, 2))}, "iteration 2 comes after 6"),
        ({"steps": (*without(6), step(6, 2, 2, loss=6.5))}, "loss 6.5 of iteration 6 was never reported"),
        ({"steps": (*without(6), dataclasses.replace(step(6, 2, 2), step=7))}, "step 7 is iteration 6"),
        ({"steps": (*without(6), step(6, 2, 1))}, "attempts [1, 2] in wandb, 2 in the events, or out of order"),
        ({"steps": (*without(6), step(6, 2, 3))}, "attempts [1, 2, 3] in wandb, 2 in the events, or out of order"),
        ({"begins": {1: 1}}, "folders [2] have no restart marker"),
        ({"run_ids": ("abc", "xyz")}, "run ids ['abc', 'xyz'] in the folders, abc in wandb_run_id"),
        ({"run_ids": ()}, "run ids [] in the folders, abc in wandb_run_id"),
        (
            {"events": (STARTED, STARTED)},
            "the run has not ended, or was killed: wandb keeps its newest steps in memory",
        ),
    ],
)
def test_what_is_wrong_is_found(changes: Mapping[str, Any], problem: str) -> None:
    assert whole(**changes).problems() == [problem]


def test_many_problems_of_a_kind_are_counted() -> None:
    found = whole(steps=()).problems()
    assert found == [*(f"iteration {iteration} is missing" for iteration in range(1, 6)), "... and 1 more"]


def test_an_iteration_whose_reporter_died_before_it_reported_is_no_gap() -> None:
    changed = events.MembershipChanged(generation=1, world_size=1, nodes=(1,), reason="", iteration=4, seconds=1.0)
    untold = {iteration: losses for iteration, losses in whole().losses.items() if iteration != 4}
    history = whole(steps=without(4), losses=untold, events=(STARTED, changed, STARTED, ENDED))
    assert history.problems() == [] and history.untold == {4}
    assert whole(steps=without(4), events=(STARTED, changed, STARTED, ENDED)).problems() == ["iteration 4 is missing"]


@pytest.mark.slow
@pytest.mark.wandb
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("believed", "problem"),
    [(None, []), (4, ["iteration 5 comes after 6"]), (8, ["iteration 7 is missing", "iteration 8 is missing"])],
    ids=["whole", "a duplicate", "a gap"],
)
def test_folders_that_wandb_wrote(
    config: JobConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch, believed: int | None, problem: list[str]
) -> None:
    """The second attempt believes that wandb has the iterations up to ``believed``, and wandb takes what it gets."""
    pytest.importorskip("wandb")
    config.telemetry.wandb = "offline"
    for first, last in ((1, 6), (5, 10)):
        if first > 1 and believed is not None:
            monkeypatch.setattr(wandb_sink, "last_offline_step", lambda run_dir: believed)
        sinks = open_sinks(config, run_dir, world_size=2, stream=io.StringIO())
        sinks.write(RUN_STARTED | ({} if first == 1 else {"resumed_from": "x", "resumed_from_iteration": first - 1}))
        for record in run_records(first, last):
            sinks.write(record)
        sinks.close(0, "done")
    history = history_of(run_dir)
    assert history.problems() == problem
    assert (history.num_attempts, history.num_run_again, history.begins) == (2, 2, {1: 1, 2: 2})
