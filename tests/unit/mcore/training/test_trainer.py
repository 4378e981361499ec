"""Tests which end of the training loop is the end of the run. A stand-in of the trainer's parts counts iterations."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.serialize import from_dict
from megatron_ft.mcore.training.trainer import Trainer


@pytest.mark.parametrize(
    ("keys", "stops_after", "expected"),
    [
        ({}, None, (True, 8)),
        ({"exit_at_iteration": 5}, None, (False, 5)),
        ({"exit_at_iteration": 9}, None, (True, 8)),
        ({}, 5, (False, 5)),
        ({}, 8, (True, 8)),
        ({"evaluate_only": True}, None, (True, 0)),
    ],
)
def test_a_run_is_complete_after_its_last_iteration_or_an_evaluation(
    keys: dict[str, Any], stops_after: int | None, expected: tuple[bool, int]
) -> None:
    engine = SimpleNamespace(iteration=0)
    trainer = SimpleNamespace(
        config=from_dict({"training": {"train_iterations": 8, **keys}}),
        engine=engine,
        collectives=SimpleNamespace(any=lambda _: False),
        rounded_off=0,
        snapshots=None,
        profiler=SimpleNamespace(stop=lambda: None),
        checkpoints=SimpleNamespace(finish=lambda: None),
        is_complete=False,
        iterate=lambda iteration: setattr(engine, "iteration", iteration),
        membership_ends=lambda: False,
        save=lambda: None,
        _stop_is_voted=lambda: engine.iteration == stops_after,
        _evaluate=lambda iteration, due: None,
        _digest=lambda due: None,
    )
    Trainer.run(trainer)  # type: ignore[arg-type]
    assert trainer.ended and (trainer.is_complete, engine.iteration) == expected
