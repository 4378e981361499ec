"""Tests the report page of a run in a real browser: it is complete, readable in light and dark mode, and makes no
network request."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.testing.browser import Tab, browse, why_impossible
from megatron_ft.testing.made_up_runs import MadeUpRun, elastic
from tools import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible())),
]
SECTIONS = ["Alerts", "Loss", "Goodput", "Recoveries", "Expert load", "Placement", "Details of each recovery"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a made-up run that has content in every section."""
    run = MadeUpRun(tmp_path_factory.mktemp("runs") / "trial-001")
    elastic(run)
    assert report.main([str(run.path)]) == 0
    return run.path / "report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browse(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def requests(tab: Tab) -> list[str]:
    """Return the requests that the page made."""
    return [request["request"]["url"] for request in tab.events_named("Network.requestWillBeSent")]


def complaints(tab: Tab) -> list[object]:
    """Return the errors that the browser reported for the page."""
    entries = [entry["entry"]["text"] for entry in tab.events_named("Log.entryAdded")]
    return [*entries, *tab.events_named("Runtime.exceptionThrown"), *tab.events_named("Runtime.consoleAPICalled")]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_shows_every_part_and_fetches_nothing(page: Path, tab: Tab, tmp_path: Path, dark: bool) -> None:
    tab.open(page.as_uri(), dark=dark)
    assert requests(tab) == [page.as_uri()] and complaints(tab) == []
    assert tab.evaluate("[...document.querySelectorAll('h2')].map(part => part.textContent)") == SECTIONS
    assert tab.evaluate("document.compatMode") == "CSS1Compat"
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(17, 22, 29)" if dark else "rgb(255, 255, 255)")
    tab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "page.png").stat().st_size > 2e4


@pytest.mark.parametrize("width", [390, 1100, 1900])
def test_nothing_sticks_out(page: Path, tab: Tab, width: int) -> None:
    tab.open(page.as_uri(), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    empty = "[...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().height < 5"
    assert tab.evaluate(f"{empty} && !one.closest('details:not([open])')).length") == 0


def test_what_is_drawn_can_be_seen(page: Path, tab: Tab) -> None:
    tab.open(page.as_uri())
    same_colour = """[...document.querySelectorAll('svg [class]')].filter(shape => {
      const style = getComputedStyle(shape);
      return style.fill === 'rgb(0, 0, 0)' && style.stroke === 'none' && shape.tagName !== 'text';
    }).map(shape => shape.getAttribute('class'))"""
    assert tab.evaluate(same_colour) == [], "a class without a colour is drawn black"


def test_a_page_that_asks_for_something_is_found_out(page: Path, tab: Tab) -> None:
    bad = page.with_name("bad.html")
    bad.write_text("<!DOCTYPE html><img src='http://127.0.0.1:9/x.png'><script>console.error('x')</script>")
    tab.open(bad.as_uri())
    assert "http://127.0.0.1:9/x.png" in requests(tab) and complaints(tab) != []
