"""A run's page: heading, figures, loss, time, recoveries and the story of each; a table stands beside each drawing."""

from collections.abc import Iterator
from datetime import datetime, timezone

from megatron_ft.telemetry.report.alerts import alerts
from megatron_ft.telemetry.report.goodput import goodput
from megatron_ft.telemetry.report.load_maps import load_maps
from megatron_ft.telemetry.report.loss import legend_mark, loss_plot, sampled
from megatron_ft.telemetry.report.markup import Element, element
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.placement_maps import placement_maps
from megatron_ft.telemetry.report.recoveries import Recovery
from megatron_ft.telemetry.report.stories import stories
from megatron_ft.telemetry.report.style import STYLE
from megatron_ft.telemetry.report.svg import figure
from megatron_ft.telemetry.report.tables import table
from megatron_ft.telemetry.wording import seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_ROWS_OF_LOSS = 24


def render(report: RunReport, *, refresh_seconds: int | None = None) -> str:
    """The page as HTML that needs nothing else; it is well-formed XML, too.

    Args:
        refresh_seconds: how often a browser reads it again; None where it stays as it is.
    """
    again = None if refresh_seconds is None else str(refresh_seconds)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        None if again is None else element("meta", http_equiv="refresh", content=again),
        element("title", f"{report.name}: report of a run"),
        element("style", STYLE),
    )
    sections = [section for make in SECTIONS for section in make(report)]
    body = element("body", element("main", *sections), _footer(report, again))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en').render()}\n"


def heading(report: RunReport) -> Iterator[Element]:
    """Which run, how large, how it ended, and its figures."""
    about = ", ".join(part for part in (report.model, report.size) if part)
    yield element(
        "header",
        element("h1", report.name),
        element("p", about, class_="about") if about else None,
        element("p", report.outcome.text, class_=f"outcome {report.outcome.level}"),
    )
    tiles = [element("div", element("dt", name), element("dd", value)) for name, value in _figures(report)]
    yield element("dl", *tiles, class_="tiles")


def loss(report: RunReport) -> Iterator[Element]:
    """The loss curve, its legend, and a table of it."""
    yield element("h2", "Loss", id="loss")
    if not report.loss:
        yield element("p", "No loss has been reported yet.", class_="soft")
        return
    yield loss_plot(report)
    kinds = [("curve", "training loss")]
    kinds += [("evaluation", "validation loss")] if report.evaluations else []
    kinds += [(kind, words) for kind, words in _MARKS if any(mark.kind == kind for mark in report.marks)]
    yield element("ul", *(element("li", legend_mark(kind), words) for kind, words in kinds), class_="legend")
    rows = [(f"{iteration:,}", figure(value)) for iteration, value in sampled(report.loss, _ROWS_OF_LOSS)]
    found = table("Some of its iterations", ("iteration", "loss (nats per token)"), rows, numbers={0, 1})
    yield element("details", element("summary", "The curve as a table"), found)


_MARKS = (
    ("failure", "ranks failed in this iteration"),
    ("recovery", "the run went on after this iteration, by number"),
    ("change", "nodes joined or left as asked, or another job went on with the run"),
)


def summary_of_recoveries(report: RunReport) -> Iterator[Element]:
    """All recoveries in one table."""
    yield element("h2", "Recoveries", id="recoveries")
    if not report.recoveries:
        yield element("p", "Nothing was lost, and no nodes came or left.", class_="soft")
        return
    yield table(
        "Each way of going on; the stories below say more",
        (
            "#",
            "generation",
            "what was lost",
            "rung",
            "seconds",
            "pause",
            "after iteration",
            "replayed",
            "trained again",
        ),
        [_row(recovery) for recovery in report.recoveries],
        numbers={0, 1, 4, 5, 6, 7, 8},
        words=2,
    )
    yield element("p", _COLUMNS, class_="soft")


_COLUMNS = (
    "Seconds: from the decision until all ranks were ready. Pause: from the first failure until the first iteration "
    "after it was reported. Replayed: iterations computed from windows or logs. Trained again: iterations that had "
    "been reported before."
)


def _row(recovery: Recovery) -> tuple[Element | str, ...]:
    number = str(recovery.number)
    return (
        element("a", number, href=f"#recovery-{number}"),
        str(recovery.generation) if recovery.generation else "another job",
        recovery.lost,
        recovery.rung,
        _seconds(recovery.seconds),
        _seconds(recovery.pause_seconds),
        f"{recovery.iteration:,}",
        f"{recovery.num_replayed:,}",
        "not known" if recovery.num_again is None else f"{recovery.num_again:,}",
    )


SECTIONS = (heading, alerts, loss, goodput, summary_of_recoveries, load_maps, placement_maps, stories)
"""What a page has, from the top down: each takes the report and gives elements."""


def _figures(report: RunReport) -> Iterator[tuple[str, str]]:
    if report.iteration is not None:
        of = "" if report.train_iterations is None else f" / {report.train_iterations:,}"
        yield "iteration", f"{report.iteration:,}{of}"
    if report.loss:
        yield "loss", figure(round(report.loss[-1][1], 4))
    if report.evaluations:
        yield "validation loss", figure(round(report.evaluations[-1][1], 4))
    failures = [recovery for recovery in report.recoveries if recovery.is_failure]
    yield "recoveries", str(len(failures))
    pauses = [recovery.pause_seconds for recovery in failures if recovery.pause_seconds is not None]
    if pauses:
        yield "all pauses", seconds(sum(pauses))
    if failures:
        yield "iterations again", f"{sum(recovery.num_again or 0 for recovery in failures):,}"


def _footer(report: RunReport, again: str | None) -> Element:
    newest = "" if report.newest_unix_seconds is None else f"; the newest is of {_utc(report.newest_unix_seconds)}"
    jobs = f", {report.num_jobs} jobs" if report.num_jobs > 1 else ""
    live = "" if again is None else f" The run goes on: this page is read again every {again} s."
    told = f"From {report.num_events:,} events and {report.num_metrics:,} metrics{jobs}{newest}."
    return element("footer", told + live)


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _seconds(value: float | None) -> str:
    return "not known" if value is None else seconds(value)
