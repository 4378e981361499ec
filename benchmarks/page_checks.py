"""Compares the report page of a run in a real browser with the run's records.

The expected figures are computed from the lines of the run's files, without the code that makes the page.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kill_peers import records_of
from megatron_ft.testing.browser import Tab

WIDTHS = (390, 600, 900, 1100, 1440, 1900)
_PAPERS = {False: "rgb(255, 255, 255)", True: "rgb(17, 22, 29)"}
"""Background colour in light mode (False) and in dark mode (True)."""
_CLOSE = 1e-5
"""Relative tolerance of a loss, because pages round losses to six digits."""
_STICKS_OUT = """
(() => {
  const wide = one => {
    const box = one.getBoundingClientRect();
    return box.width > 0 && (box.left < -1 || box.right > document.documentElement.clientWidth + 1);
  };
  const scrolls = one => one && (getComputedStyle(one).overflowX !== 'visible' || scrolls(one.parentElement));
  return [...document.querySelectorAll('body *')]
    .filter(one => !one.closest('svg *, details:not([open])') && wide(one) && !scrolls(one.parentElement))
    .map(one => `${one.tagName.toLowerCase()}.${one.getAttribute('class')}`).slice(0, 5);
})()
"""
"""Script that returns the classes of elements that extend beyond the window and are not inside a scrolling element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Parsed lines of a run's files."""

    metrics: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]
    hits: Sequence[dict[str, Any]]
    """Faults, as ranks recorded them before they happened."""
    summary: dict[str, Any]

    @classmethod
    def of(cls, run_dir: Path) -> "Files":
        """Read a run that has ended."""
        names = ("metrics.jsonl", "events.jsonl", "failpoints.jsonl")
        metrics, events, hits = (records_of(run_dir / name) for name in names)
        return cls(
            metrics=metrics, events=events, hits=hits, summary=json.loads((run_dir / "summary.json").read_text())
        )

    def every(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        """Return the newest loss of each iteration."""
        return {line["iteration"]: line["loss"] for line in self.metrics}

    @property
    def sections(self) -> list[str]:
        """Return the headings of the sections that the page must have."""
        present = {
            "Alerts": bool(self.every("alert_raised")),
            "Loss": True,
            "Goodput": True,
            "Recoveries": True,
            "Expert load": bool(self.every("expert_load")),
            "Placement": bool(self.every("placement_in_force")),
            "Details of each recovery": bool(self.hits),
        }
        return [name for name, is_present in present.items() if is_present]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Result of checks of a page in the browser: problems, time and number of compared figures."""

    problems: Sequence[str]
    num_bytes: int
    seconds: float
    """Longest time from opening the page until it was drawn completely."""
    num_figures: int
    """Number of compared figures."""


def look(run_dir: Path, page: Path, tab: Tab) -> Drawn:
    """Open a page in light and dark mode and at all widths. If the page is correct, ``problems`` of the result is
    empty."""
    files, problems, seconds = Files.of(run_dir), [], []
    num_figures = 0
    for dark in (False, True):
        tab.open(page.as_uri(), dark=dark)
        seconds.append(_drawing_seconds(tab))
        theme = "dark: " if dark else "light: "
        checks = [*_quiet(page, tab), *_whole(files, tab, _PAPERS[dark]), *_loss(files, tab)]
        compared = list(_figures(files, tab))
        num_figures += len(compared)
        checks += [f"{name} is {shown}, not {right}" for name, shown, right in compared if not _equal(shown, right)]
        problems += [theme + problem for problem in checks]
    for width, dark in itertools.product(WIDTHS, (False, True)):
        tab.open(page.as_uri(), width=width, dark=dark)
        seconds.append(_drawing_seconds(tab))
        problems += [f"{width} px: {problem}" for problem in [*_quiet(page, tab), *_inside(tab)]]
    size = page.stat().st_size
    return Drawn(problems=problems, num_bytes=size, seconds=max(seconds), num_figures=num_figures)


def _drawing_seconds(tab: Tab) -> float:
    tab.evaluate("document.body.getBoundingClientRect().height")  # makes the browser lay out the whole page
    return float(tab.evaluate("performance.now()")) / 1000.0


def _quiet(page: Path, tab: Tab) -> Iterator[str]:
    """Yield problems if the page loads another file, or if the browser reports a message."""
    asked = [request["request"]["url"] for request in tab.events_named("Network.requestWillBeSent")]
    if asked != [page.as_uri()]:
        yield f"the page loaded {len(asked)} files: {[url[:80] for url in asked if url != page.as_uri()]}"
    messages = [entry["entry"]["text"] for entry in tab.events_named("Log.entryAdded")]
    messages += [json.dumps(event)[:200] for event in tab.events_named("Runtime.exceptionThrown")]
    messages += [json.dumps(event)[:200] for event in tab.events_named("Runtime.consoleAPICalled")]
    yield from (f"the browser says {text}" for text in messages)


def _whole(files: Files, tab: Tab, paper: str) -> Iterator[str]:
    """Yield problems of sections: each must exist, have content, and have the background colour of the mode."""
    sections = tab.evaluate("[...document.querySelectorAll('h2')].map(part => part.textContent)")
    if sections != files.sections:
        yield f"the sections are {sections}, not {files.sections}"
    empty = tab.evaluate(
        "[...document.querySelectorAll('h2')].filter(part => !part.nextElementSibling ||"
        " part.nextElementSibling.tagName === 'H2').map(part => part.textContent)"
    )
    yield from (f"section {name} is empty" for name in empty)
    if (colour := tab.evaluate("getComputedStyle(document.body).backgroundColor")) != paper:
        yield f"the paper is {colour}, not {paper}"
    flat = "[...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().height < 5"
    if num_flat := tab.evaluate(f"{flat} && !one.closest('details:not([open])')).length"):
        yield f"{num_flat} drawings have no height"


def _loss(files: Files, tab: Tab) -> Iterator[str]:
    """Yield problems of the loss curve. Each injected fault must have a labelled cross at its iteration, and recoveries
    must have numbers."""
    crosses: list[tuple[str, float]] = tab.evaluate(
        "[...document.querySelectorAll('svg path.failure')].filter(mark => mark.querySelector('title')?.textContent)"
        ".map(mark => { const box = mark.getBBox();"
        " return [mark.querySelector('title').textContent, box.x + box.width / 2]; })"
    )
    curve: list[float] = tab.evaluate(
        "[...document.querySelector('polyline.curve').points].map(point => point.x)"  # one for each iteration
    )
    iterations = sorted(files.losses)
    if len(curve) != len(iterations):
        yield f"the curve has {len(curve)} points for {len(iterations)} iterations"
        return
    for hit in files.hits:
        at = hit["iteration"]
        found = [x for words, x in crosses if words.startswith(f"failed in iteration {at}: ")]
        if not found:
            yield f"the fault in iteration {at} is not marked: {[words for words, _ in crosses]}"
        elif at in files.losses and abs(found[0] - curve[iterations.index(at)]) > 1.0:
            yield f"the mark of iteration {at} stands at {found[0]:.1f}, the curve at {curve[iterations.index(at)]:.1f}"


def _figures(files: Files, tab: Tab) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, shown value, expected value) of each figure to compare."""
    tiles: dict[str, str] = dict(
        tab.evaluate(
            "[...document.querySelectorAll('dl.tiles > div')].map(tile =>"
            " [tile.querySelector('dt').textContent, tile.querySelector('dd').textContent])"
        )
    )
    last, goodput = max(files.losses), files.summary["goodput"]
    yield "iteration", tiles.get("iteration"), f"{last} / {files.every('run_started')[-1]['train_iterations']:,}"
    yield "loss", _number(tiles.get("loss")), round(files.losses[last], 4)
    yield "loss in summary.json", files.summary["final_loss"], files.losses[last]
    yield "iterations again", tiles.get("iterations again"), f"{len(files.metrics) - len(files.losses)}"
    yield "recoveries", tiles.get("recoveries"), str(len({hit["iteration"] for hit in files.hits}))
    yield "interruptions", tiles.get("interruptions"), str(goodput["interruptions"])
    for name, key in (("ETTR, measured", "ettr"), ("ETTR, predicted by the formula", "ettr_predicted")):
        yield name, tiles.get(name), f"{100 * goodput[key]:.1f} %"
    yield "goodput", _number(tiles.get("goodput")), float(f"{goodput['tokens_per_second']:.4g}")
    rows = _table(tab, "Training loss of some iterations")
    yield "rows of the loss table", len(rows) > 0, True
    for iteration, loss in rows:
        yield f"loss of iteration {iteration}", _number(loss), files.losses[int(iteration.replace(",", ""))]
    yield from _loads(files, tab)
    footer = tab.evaluate("document.querySelector('footer').textContent")
    made = f"Made from {len(files.events):,} events and {len(files.metrics):,} metrics"
    yield "the footer", footer[: len(made)], made


def _loads(files: Files, tab: Tab) -> Iterator[tuple[str, Any, Any]]:
    """Yield the newest load of each layer, as shown and as expected. In runs as short as these, each iteration has its
    own column."""
    newest = files.every("expert_load")[-1]
    rows = _table(tab, f"Tokens of an expert divided by the mean, iteration {newest['iteration']}")
    yield "layers with loads", len(rows), len(newest["layers"])
    for row, tokens in zip(rows, newest["layers"], strict=False):
        total = sum(tokens)
        busiest, most = f"{tokens.index(max(tokens))}", f"{max(tokens) * len(tokens) / total:.2f}"
        skew = f"{sum((count / total) ** 2 for count in tokens):.3f}"
        yield f"loads of layer {row[0]}", [row[1], row[2], row[4]], [busiest, most, skew]


def _inside(tab: Tab) -> Iterator[str]:
    """Yield elements that are wider than the window and cannot be scrolled."""
    if not tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"):
        yield "the page is wider than the window"
    out = tab.evaluate(_STICKS_OUT)
    yield from (f"{name} sticks out" for name in out)


def _table(tab: Tab, caption: str) -> list[list[str]]:
    """Return the cells of a table, row by row."""
    found: list[list[str]] = tab.evaluate(
        "[...document.querySelectorAll('table')].filter(one => one.caption.textContent === "
        f"{json.dumps(caption)}).flatMap(one => [...one.tBodies[0].rows].map(row =>"
        " [...row.cells].map(cell => cell.textContent)))"
    )
    return found


def _number(text: str | None) -> float | None:
    found = None if text is None else re.match(r"[-+0-9.,e]+", text)
    return None if found is None else float(found.group().replace(",", ""))


def _equal(shown: Any, right: Any) -> bool:
    if isinstance(shown, float) and isinstance(right, float):
        return abs(shown - right) <= _CLOSE * abs(right)
    return bool(shown == right)
