"""The claim would notice a load that is wrong, a sample that is lost, and an error that names nothing."""

import pytest

from benchmarks.foreign_checkpoints import ACTIONS, judge


@pytest.mark.parametrize(
    ("expected", "loaded", "is_equal", "error", "outcome"),
    [
        ("5", 5, True, "", "loaded"),
        ("5 14", 14, True, "", "loaded"),
        ("5", 5, False, "", "wrong"),
        ("none", 50, False, "", "wrong"),
        ("14", 5, True, "", "lost"),
        ("5", None, True, "", "lost"),
        ("optimizer.lr", 14, True, "", "lost"),
        ("optimizer.lr", None, True, "x: optimizer.lr: was 1, now 2", "named"),
        ("optimizer.lr", None, True, "x: does not fit", "mute"),
        ("none renamed", None, True, "", "nothing"),
        ("none renamed", None, True, "x was renamed", "named"),
        ("5", None, True, "something else", "mute"),
    ],
)
def test_outcomes(expected: str, loaded: int | None, is_equal: bool, error: str, outcome: str) -> None:
    assert judge(expected, loaded, is_equal, error) == outcome


def test_renames_swaps_other_jobs_and_damage_are_all_tried() -> None:
    assert {"rename", "swap_names", "other_run", "other_data", "other_model", "other_optimizer"} < set(ACTIONS)
    assert {"other_schedule", "swap_files", "exchange", "flip", "tear", "older_format"} < set(ACTIONS)
