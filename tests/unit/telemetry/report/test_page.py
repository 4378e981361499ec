"""Tests the page: self-contained, well-formed and escaped; every drawing has a description and a table."""

import re

import pytest

from megatron_ft import events
from megatron_ft.telemetry.report.page import render
from megatron_ft.testing.made_up_runs import MadeUpRun, elastic, localized, stage_recovery, started

from .conftest import Parts, drawing_of, drawings, titles

HOSTILE = "</title><script src='https://evil.example/x.js'>alert(1)</script>\" onload=\"x\u202e\x00&amp;\ud800"


def test_pages_are_well_formed(reported: MadeUpRun) -> None:
    page = reported.page()
    parts = Parts(page)
    assert parts.names.count("html") == 1 and "script" not in parts.names
    recoveries = [title for title in titles(page) if title.startswith("Timeline of recovery ")]
    assert len(recoveries) == len(reported.report().recoveries) and recoveries
    assert titles(page)[:2] == ["Loss over iterations", "Shares of the wall time"]


def test_alerts_that_stand_are_on_top(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.say(1.0, events.AlertRaised(alert="stall_share", value=0.2, limit=0.05, iteration=1))
    run.say(2.0, events.AlertCleared(alert="stall_share", value=0.01, limit=0.05, iteration=7))
    assert "All alerts are cleared." in run.page() and "alert cleared" in run.page()
    run.say(3.0, events.AlertRaised(alert="free_disk_share", value=0.01, limit=0.05, iteration=9))
    page = run.page()
    assert "All alerts are cleared." not in page
    alert = "alert: 1.0 % of the file system of the run's folder is free"
    assert f'<li class="words bad">{alert}' in page.replace("&#x27;", "'")
    assert page.index('id="alerts"') < page.index('id="loss"')


def test_every_part_can_be_led_to(run: MadeUpRun) -> None:
    elastic(run)
    parts = {value for name, value in Parts(run.page()).attributes if name == "id"}
    assert {"loss", "goodput", "recoveries", "stories", "expert-load", "placement"} <= parts


def test_nothing_is_fetched(reported: MadeUpRun) -> None:
    page = reported.page()
    assert "http://" not in page and "https://" not in page and "@import" not in page and "url(" not in page
    references = [value for name, value in Parts(page).attributes if name in ("src", "href", "xlink:href", "data")]
    assert all(value is not None and value.startswith("#") for value in references)
    names = {name for name, _ in Parts(page).attributes}
    assert not {name for name in names if name.startswith("on")}, "no handlers either"


def test_references_inside_the_page_lead_somewhere(reported: MadeUpRun) -> None:
    attributes = Parts(reported.page()).attributes
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {(value or "").removeprefix("#") for name, value in attributes if name == "href"}
    assert targets and targets <= set(ids)
    described = [(value or "").split() for name, value in attributes if name == "aria-labelledby"]
    assert described and all(set(names) <= set(ids) for names in described)


def test_every_class_that_is_used_is_in_the_style_sheet_and_needs_no_escaping(reported: MadeUpRun) -> None:
    from megatron_ft.telemetry.report.style import STYLE

    assert not set("<>&") & set(STYLE)
    used = {
        name for key, value in Parts(reported.page()).attributes if key == "class" for name in (value or "").split()
    }
    assert {name for name in used if f".{name}" not in STYLE} <= {"recovery-details"}


@pytest.mark.parametrize("title", [HOSTILE, "<svg onload=x>", "a" * 5000])
def test_hostile_text_stays_text(run: MadeUpRun, title: str) -> None:
    run.say(0.0, started(name=title))
    run.train(1, 3, 0.0)
    run.say(2.0, events.RankFailed(rank=2, node=2, signal=title, first=True, iteration=4, error=title, phase=title))
    run.decide(2.1, 0, title, declined=title, lost_nodes=[2])
    run.say(2.5, events.RecoveryStarted(generation=1, strategy=title, iteration=3, declined=(title,)))
    about = {"world_size": 4, "nodes": (0, 1, 3, 4), "reason": title, "iteration": 3}
    run.say(2.5, events.MembershipChanged(generation=1, seconds=0.3, **about))
    run.say(3.0, stage_recovery(0, title, began=2.5, seconds=0.5, bytes_moved=10))
    run.say(4.0, events.RunStopped(exit_code=1, reason=title))
    page = run.page()
    page.encode("utf-8")
    parts = Parts(page)
    assert len([title for title in titles(page) if title.startswith("Timeline of recovery ")]) == 1
    assert "script" not in parts.names
    assert not {name for name, _ in parts.attributes if name.startswith("on")}
    assert not re.search(r"<(?!/?(?:[a-z]+[0-9]?)[ >/]|!DOCTYPE)", page)


def test_each_rank_has_a_lane_and_a_row(run: MadeUpRun) -> None:
    localized(run)
    page = run.page()
    timeline = drawing_of(page, "Timeline of recovery 1")
    words = ["".join(text.itertext()) for text in timeline.iter("text")]
    lanes = [word for word in words if word.startswith("rank ")]
    assert lanes == ["rank 0 · node 0", "rank 1 · node 1", "rank 2 · node 4", "rank 3 · node 3"]
    assert [word for word in words if word.startswith("stage")] == ["stage 0", "stage 1"]
    assert [word for word in words if "MB" in word] == ["↑ 3.5 MB", "↓ 1.5 MB", "↓ 2.0 MB"]
    bars = [bar.get("class") for bar in timeline.iter("rect") if bar.get("class") in ("replays", "serves", "waits")]
    assert bars == ["serves", "waits", "replays", "replays"]
    assert "replays iterations 8 to 12, 40 forward passes, 1.5 MB received" in page


def test_shapes_lie_inside_their_drawings(reported: MadeUpRun) -> None:
    for drawing in drawings(reported.page()):
        _, _, width, height = (float(value) for value in str(drawing.get("viewBox")).split())
        for bar in drawing.iter("rect"):
            x, y, wide, high = (float(str(bar.get(name))) for name in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and wide >= 0 and x + wide <= width and y + high <= height


def test_failures_and_recoveries_are_marked_on_the_loss(run: MadeUpRun) -> None:
    elastic(run)
    curve = drawing_of(run.page(), "Loss")
    assert len([path for path in curve.iter("path") if path.get("class") == "failure"]) == 1
    assert [mark.get("class") for mark in curve.iter("line") if mark.get("class") in ("recovery", "change")] == [
        "recovery",
        "change",
    ]
    assert [link.get("href") for link in curve.iter("a")] == ["#recovery-1", "#recovery-2"]


def test_a_run_without_events(run: MadeUpRun) -> None:
    page = run.page()
    Parts(page)
    assert "trial-001" in page and "nothing reported yet" in page and "No loss has been reported yet." in page


def test_a_page_that_is_read_again_says_so(run: MadeUpRun) -> None:
    live, still = render(run.report(), refresh_seconds=5), run.page()
    assert "the browser reloads this page every 5 s" in live and 'http-equiv="refresh"' in live
    assert "reloads" not in still and "refresh" not in still


def test_a_calm_run(run: MadeUpRun) -> None:
    run.say(0.0, started(), events.RanksReady(seconds=0.1))
    run.say(run.train(1, 1, 0.1), events.Evaluation(iteration=1, loss=4.5))
    page = run.page()
    assert "Nothing was lost" in page and "validation loss" in page and "Details of each recovery" not in page
    assert titles(page) == ["Loss over iterations", "Shares of the wall time"]


def test_many_recoveries_are_folded(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    at = 0.0
    for generation in range(1, 41):
        at = run.train(generation, generation, at)
        about = {"world_size": 2, "nodes": (0, 1), "reason": "again", "iteration": generation}
        run.say(at + 0.5, events.MembershipChanged(generation=generation, seconds=0.5, **about))
        at += 0.5
    parts = Parts(run.page())
    assert ("open", "open") not in parts.attributes
    assert ("id", "recovery-40") in parts.attributes


def test_a_membership_of_very_many_ranks_is_cut_short(run: MadeUpRun) -> None:
    run.say(0.0, started(2))
    about = {"world_size": 10**12, "nodes": (0, 1), "reason": "more", "iteration": 1}
    run.say(2.0, events.MembershipChanged(generation=1, seconds=0.5, **about))
    page = run.page()
    assert "3584 more are not shown" in page and len(page) < 4_000_000


def test_speed_and_memory_are_medians_and_left_out_if_not_reported(run: MadeUpRun) -> None:
    run.say(0.0, started())
    run.train(1, 1, 0.0)
    assert "TFLOP/s per GPU" not in run.page() and "MFU" not in run.page()
    for iteration, rate in ((2, 100.0), (3, 300.0), (4, 320.0)):
        values = {"loss": 4.0, "tflops_per_gpu": rate, "mfu": rate / 1000, "memory_peak_bytes": 3 * 10**9}
        run.line("metrics.jsonl", events.Metrics(iteration=iteration, values=values).to_record())
    page = run.page()
    assert "<dt>TFLOP/s per GPU</dt><dd>300</dd>" in page and "<dt>MFU</dt><dd>30.0 %</dd>" in page
    assert "<dt>peak memory of a rank</dt><dd>3.0 GB</dd>" in page
