"""Tests the checks of ``report-page``: they accept a correct page, and find each defect of a damaged one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kill_peers import records_of
from benchmarks.page_checks import look
from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry.goodput import Goodput
from megatron_ft.testing.browser import Tab, browse, why_impossible
from megatron_ft.testing.made_up_runs import MadeUpRun, elastic
from tools import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible())),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a made-up run, beside the files that a real run leaves."""
    run = MadeUpRun(tmp_path_factory.mktemp("runs") / "trial-001")
    elastic(run)
    lines = [line | {"tokens": 100.0} for line in records_of(run.path / "metrics.jsonl")]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    hit = {"kind": "failpoint_hit", "action": "kill", "phase": "backward", "iteration": 5, "rank": 1}
    run.line("failpoints.jsonl", hit)
    output = [Record.from_record(line) for line in records_of(run.path / "events.jsonl")]
    goodput = Goodput.measure([*output, *map(Metrics.from_record, lines)]).summary()
    run.line("summary.json", {"final_loss": lines[-1]["loss"], "goodput": goodput})
    assert report.main([str(run.path)]) == 0
    return run.path / "report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browse(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_a_sound_page_has_no_problems(page: Path, tab: Tab) -> None:
    drawn = look(page.parent, page, tab)
    assert drawn.problems == [] and drawn.num_figures > 40
    assert drawn.num_bytes == page.stat().st_size and 0.0 < drawn.seconds < 60.0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (">Goodput</h2>", ">Gain</h2>", "light: the sections are ["),
        ("<dd>0.5</dd>", "<dd>0.6</dd>", "light: loss is 0.6, not 0.5"),
        ("failed in iteration 5: ", "failed in iteration 6: ", "dark: the fault in iteration 5 is not marked"),
        ("</main>", "<img src='http://127.0.0.1:9/x.png'/></main>", "light: the browser says "),
        ("</main>", "<p style='width: 3000px'>wide</p></main>", "1900 px: the page is wider than the window"),
        ("</main>", "<p style='width: 3000px'>wide</p></main>", "390 px: p.null sticks out"),
        ("prefers-color-scheme: dark", "prefers-color-scheme: none", "dark: the paper is rgb(255, 255, 255)"),
        ("Made from 13 ", "Made from 14 ", "dark: the footer is "),
    ],
)
def test_what_is_spoilt_is_found(page: Path, tab: Tab, old: str, new: str, problem: str) -> None:
    sound = page.read_text(encoding="utf-8")
    assert old in sound
    spoilt = page.with_name("spoilt.html")
    spoilt.write_text(sound.replace(old, new), encoding="utf-8")
    found = look(page.parent, spoilt, tab).problems
    assert any(each.startswith(problem) for each in found), found
