"""Tests the current placement on the page: read, drawn and described; damaged files are refused."""

import json
import re

import pytest

from megatron_ft.errors import DataError
from megatron_ft.testing.made_up_runs import PLAN, MadeUpRun, placed, started

from .conftest import Parts, drawing_of


def test_the_newest_placement_is_drawn_and_all_are_listed(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    placed(run, 1)
    placed(run, 9, at=5.0, reason="saves 50 %")
    assert run.files().plans == (PLAN,)
    page = run.page()
    Parts(page)
    drawing = drawing_of(page, "Placement: layer 2")
    cells = {str(path.get("class")): len(re.findall("M", str(path.get("d")))) for path in drawing.iter("path")}
    # expert 0 on rank 0; 1 twice on rank 0 and once on rank 1; 2 and 3 on rank 1
    assert cells == {"held-1": 4, "held-2": 1}
    assert "Used since iteration 9 (saves 50 %)." in page and PLAN.summary() in page
    assert "3.0 MB" in page and "50.0 %" in page and "node1" in page


def test_a_plan_that_the_folder_does_not_hold_is_described_in_words(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    placed(run, 1).unlink()
    page = run.page()
    assert (
        "The slots are not drawn, because the run's folder does not contain this placement's plan."
    ) in page and PLAN.summary() in page


def test_runs_without_replicas_have_no_such_part(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    assert 'id="placement"' not in run.page() and 'id="expert-load"' not in run.page()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("[1", "Expecting"),
        ("[]", "stages: must contain"),
        ('{"stages": [3]}', "stages: must contain"),
        ({"ranks": [0]}, "ranks=[0]: must be distinct"),
        ({"ranks": ["0", 1]}, "stages.ranks[0]='0': must be int"),
        ({"num_experts": 10**12}, "stages.num_experts=1000000000000: must be 1 to"),
        ({"slots": [[[0, 1], [2, 9]]]}, "must be from 0 to 3"),
        ({"slots": None}, "stages.slots=None"),
    ],
)
def test_damage_is_named(run: MadeUpRun, change: str | dict[str, object], says: str) -> None:
    run.say(0.0, started(2))
    path = placed(run, 1)
    text = change if isinstance(change, str) else json.dumps({"stages": [PLAN.to_json() | change]})
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(str(path))) as refused:
        run.files()
    assert says in str(refused.value)


def test_a_field_that_is_missing_is_named(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    plan = PLAN.to_json()
    del plan["algorithm"]
    placed(run, 1).write_text(json.dumps({"stages": [plan]}))
    with pytest.raises(DataError, match=re.escape("stages.algorithm: is required")):
        run.files()
