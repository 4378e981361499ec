"""Tests maps of expert load: their figures, colours and largest number of cells."""

import re

import pytest

from megatron_ft.events import ExpertLoad
from megatron_ft.telemetry.report.maps import MAX_CELLS, MAX_COLUMNS, MAX_ROWS, ExpertLoads, _level
from megatron_ft.testing.made_up_runs import MadeUpRun, started

from .conftest import Parts, drawing_of, drawings


def load(iteration: int, *layers: tuple[int, ...], numbers: tuple[int, ...] | None = None) -> ExpertLoad:
    return ExpertLoad(iteration=iteration, layers=layers, layer_numbers=numbers)


def test_tokens_become_shares_of_the_even_share() -> None:
    found = ExpertLoads.of([load(1, (2, 2, 2, 2), (8, 0, 0, 0)), load(2, (1, 2, 3, 2), (8, 0, 0, 0))])
    assert found is not None and found.num_experts == 4 and found.stretches == ((1, 1), (2, 2))
    even, skewed = found.layers
    assert even.columns == ((1.0, 1.0, 1.0, 1.0), (0.5, 1.0, 1.5, 1.0))
    assert (even.busiest, even.max_over_even, even.min_over_even) == (2, 1.5, 0.5)
    assert even.herfindahl == pytest.approx((1 + 4 + 9 + 4) / 64) and skewed.herfindahl == 1.0
    assert skewed.columns == ((4.0, 0.0, 0.0, 0.0),) * 2


def test_an_iteration_that_was_run_again_counts_once() -> None:
    found = ExpertLoads.of([load(1, (4, 0)), load(2, (4, 0)), load(2, (0, 4))])
    assert found is not None and found.layers[0].columns == ((2.0, 0.0), (0.0, 2.0))


def test_many_iterations_are_added_up() -> None:
    found = ExpertLoads.of([load(iteration, (1, 3) if iteration <= 50 else (4, 0)) for iteration in range(1, 101)])
    assert found is not None and len(found.stretches) == MAX_COLUMNS
    assert [last + 1 for _, last in found.stretches[:-1]] == [first for first, _ in found.stretches[1:]]
    assert found.layers[0].columns[0] == (0.5, 1.5) and found.layers[0].columns[-1] == (2.0, 0.0)


def test_many_experts_share_rows_and_the_busiest_stands_for_them() -> None:
    tokens = [1] * 256
    tokens[5] = 257
    found = ExpertLoads.of([load(1, tuple(tokens))])
    assert found is not None and found.experts_per_row == 4 and len(found.layers[0].columns[0]) == MAX_ROWS
    assert found.layers[0].columns[0][1] == 257 * 256 / 512 and found.layers[0].columns[0][0] == 0.5


def test_large_models_have_fewer_columns() -> None:
    layers = tuple((1,) * 64 for _ in range(60))
    found = ExpertLoads.of([load(iteration, *layers) for iteration in range(100)])
    assert found is not None and len(found.stretches) == MAX_CELLS // (60 * 64) < MAX_COLUMNS


def test_records_of_another_shape_are_left_out() -> None:
    found = ExpertLoads.of([load(1, (1, 1, 1)), load(2, (2, 2), numbers=(4,)), load(3, (3, 1), numbers=(4,))])
    assert found is not None and found.stretches == ((2, 2), (3, 3)) and found.layers[0].number == 4
    assert ExpertLoads.of([load(1, (1, 1), (1, 1, 1))]) is None and ExpertLoads.of([load(1)]) is None


def test_without_tokens_all_is_below_the_even_share() -> None:
    found = ExpertLoads.of([load(1, (0, 0)), load(2, (-5, 5))])
    assert found is not None and found.layers[0].columns == ((0.0, 0.0), (0.0, 2.0))


@pytest.mark.parametrize(
    ("over_even", "class_"),
    [(0.0, "load-0"), (0.25, "load-1"), (1.0, "load-3"), (2.0, "load-5"), (4.0, "load-6"), (64.0, "load-6")],
)
def test_colours(over_even: float, class_: str) -> None:
    assert _level(over_even) == class_


def test_each_layer_has_a_map_with_all_its_cells(run: MadeUpRun) -> None:
    run.say(0.0, started())
    for iteration in range(1, 5):
        run.say(iteration, load(iteration, (1, 2, 3, 2), (8, 0, 0, 0), (2, 2, 2, 2), numbers=(2, 4, 6)))
    page = run.page()
    drawing = drawing_of(page, "Load of experts: layer 2 to layer 6")
    assert [text.text for text in drawing.iter("text") if text.get("class") == "strong"] == [
        "layer 2",
        "layer 4",
        "layer 6",
    ]
    pixels: dict[str, float] = {}
    for path in drawing.iter("path"):
        if (class_ := str(path.get("class"))).startswith("load-"):
            pixels[class_] = pixels.get(class_, 0.0) + sum(map(float, re.findall(r"h([\d.]+)v", str(path.get("d")))))
    # rows of 444 pixels; layer 2: one at 1/2, two even, one at 1.5; layer 4: one at 4, three at 0; layer 6: four even
    rows = {"load-0": 3, "load-2": 1, "load-3": 6, "load-4": 1, "load-6": 1}
    assert pixels == {class_: pytest.approx(444.0 * count) for class_, count in rows.items()}
    assert "0.281" in page, "HHI of layer 2: 18 / 64"
    Parts(page)


def test_many_layers_are_folded(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.say(1.0, load(1, *((1, 3) for _ in range(20))))
    maps = [drawing for drawing in drawings(run.page()) if "Load of experts" in str(drawing.findtext("title"))]
    assert [drawing.findtext("title") for drawing in maps] == [
        "Load of experts: layer 1 to layer 8",
        "Load of experts: layer 9 to layer 16",
        "Load of experts: layer 17 to layer 20",
    ]
    assert "Layers not shown above" in run.page()
