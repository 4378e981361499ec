"""Page of a run: heading, alerts, loss, goodput, recoveries, loads and placement. Each drawing has a table beside
it."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from megatron_ft.events import AlertCleared, AlertRaised
from megatron_ft.formatting import seconds
from megatron_ft.records import OtherRecord
from megatron_ft.telemetry.goodput import Goodput, instant
from megatron_ft.telemetry.report.drawing import Element, drawing, element, figure, swatch, table
from megatron_ft.telemetry.report.loss import legend_mark, loss_plot, sampled
from megatron_ft.telemetry.report.maps import load_maps, placement_maps
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.recoveries import Recovery
from megatron_ft.telemetry.report.style import STYLE
from megatron_ft.telemetry.report.timeline import timelines

# Texts of a page come from files of a run. Even if one were not escaped, the page would run and load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_ROWS_OF_LOSS = 24
MAX_ALERTS = 100
_MARKS = (
    ("failure", "ranks failed in this iteration"),
    ("recovery", "the run continued after this iteration, by number"),
    ("change", "nodes joined or left on request, or another job continued the run"),
)
_SHARES = (
    ("useful_seconds", "useful", "iterations that count"),
    ("stalled_seconds", "stalled", "waiting for captures, checkpoints, moves of experts"),
    ("again_seconds", "again", "iterations that were lost and run again"),
    ("skipped_seconds", "skipped", "iterations that the vote did not commit"),
    ("recovery_seconds", "recovering", "recoveries, changes of membership, jobs that continue the run"),
    ("between_jobs_seconds", "between", "between jobs"),
    ("other_seconds", "rest", "starts, evaluations, time between iterations"),
)
"""Field of ``Goodput``, class of the colour, and description."""
_ETTR = (
    "ETTR, the effective training time ratio, is the time of iterations that count divided by wall time. The "
    "formula (MoEvement, section 2.4) uses this run's waiting time per iteration, mean time between "
    "interruptions and mean time lost to one. It leaves out starts, evaluations and time between jobs, so a "
    "large difference comes from these."
)
_HEADER = (
    "#",
    "generation",
    "what was lost",
    "strategy",
    "seconds",
    "pause",
    "after iteration",
    "replayed",
    "trained again",
)
_COLUMNS = (
    "Seconds: from the decision until all ranks were ready. Pause: from the first failure until the first "
    "iteration after it was reported. Replayed: iterations computed again from windows or logs. Trained again: "
    "iterations that had been reported before."
)


def render(report: RunReport, *, refresh_seconds: int | None = None) -> str:
    """Return the page as HTML that loads nothing else; the text is also well-formed XML.

    Args:
        refresh_seconds: Interval at which a browser reads the page again; None if the page does not change.
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
    main = element(
        "main",
        *_heading(report),
        *_alerts(report.alerts),
        *_loss(report),
        *_goodput(report.goodput),
        *_summary(report.recoveries),
        *load_maps(report.loads),
        *placement_maps(report.placements, report.plans),
        *timelines(report.recoveries),
        *_others(report.others),
    )
    body = element("body", main, _footer(report, again))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en').render()}\n"


def _tiles(figures: Iterator[tuple[str, str]]) -> Element:
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in figures), class_="tiles"
    )


def _heading(report: RunReport) -> Iterator[Element]:
    about = ", ".join(part for part in (report.model, report.size) if part)
    yield element(
        "header",
        element("h1", report.name),
        element("p", about, class_="about") if about else None,
        element("p", report.outcome.text, class_=f"outcome {report.outcome.level}"),
    )
    yield _tiles(_run_figures(report))


def _run_figures(report: RunReport) -> Iterator[tuple[str, str]]:
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


def _alerts(alerts: Sequence[AlertRaised | AlertCleared]) -> Iterator[Element]:
    if not alerts:
        return
    yield element("h2", "Alerts", id="alerts")
    # The last report of each alert decides whether it is in force.
    newest = {record.alert: record for record in alerts}
    standing = [record for record in newest.values() if isinstance(record, AlertRaised)]
    if standing:
        words = (record.describe().text for record in standing[:MAX_ALERTS])
        yield element("ul", *(element("li", text, class_="words bad") for text in words))
    else:
        yield element("p", "All alerts are cleared.", class_="good")
    shown = alerts[-MAX_ALERTS:]
    more = len(alerts) - len(shown)
    caption = "In the order of their reports" + (f"; {more:,} earlier ones are not shown" if more else "")
    rows = [(f"{record.iteration:,}", record.describe().text) for record in shown]
    found = table(caption, ("iteration", "what"), rows, numbers={0}, words=1)
    yield element("details", element("summary", "All alerts"), found)


def _loss(report: RunReport) -> Iterator[Element]:
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


def _goodput(found: Goodput) -> Iterator[Element]:
    yield element("h2", "Goodput", id="goodput")
    if found.ettr is None or not found.num_iterations:
        yield element("p", "No iteration has been timed yet.", class_="soft")
        return
    yield _tiles(_goodput_figures(found))
    shares = [
        (class_, words, getattr(found, name), getattr(found, name) / found.wall_seconds)
        for name, class_, words in _SHARES
    ]
    present = [share for share in shares if share[2] > 0]
    yield _share_bar([(class_, f"{words}: {_percent(share)}", share) for class_, words, _, share in present])
    yield element("ul", *(element("li", swatch(class_), words) for class_, words, *_ in present), class_="legend")
    rows = [(words, seconds(took), _percent(share)) for _, words, took, share in shares]
    found_table = table("All shares of the wall time", ("what", "time", "share"), rows, numbers={1, 2})
    yield element("details", element("summary", "The shares as a table"), found_table)
    yield element("p", _ETTR, class_="soft")


def _goodput_figures(found: Goodput) -> Iterator[tuple[str, str]]:
    yield "ETTR, measured", "not known" if found.ettr is None else _percent(found.ettr)
    yield "ETTR, by the formula", "not known" if found.predicted_ettr is None else _percent(found.predicted_ettr)
    if found.num_tokens and found.tokens_per_second is not None:
        yield "goodput", f"{figure(float(f'{found.tokens_per_second:.4g}'))} tokens/s"
    yield "wall time", seconds(found.wall_seconds)
    yield "interruptions", f"{found.num_interruptions:,}"
    if found.num_interruptions:
        yield "time between interruptions", seconds(found.mtbf_seconds)
        yield "time lost to each", seconds(found.lost_per_interruption_seconds)


def _share_bar(shares: Sequence[tuple[str, str, float]]) -> Element:
    width, height, x, shapes = 1000, 30, 0.0, []
    for class_, words, share in shares:
        title = element("title", words)
        shapes.append(element("rect", title, x=x, y=2, width=share * width, height=height - 4, class_=class_))
        x += share * width
    return drawing(
        "goodput-bar",
        *shapes,
        width=width,
        height=height,
        title="Shares of the wall time",
        description="; ".join(words for _, words, _ in shares),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _summary(recoveries: Sequence[Recovery]) -> Iterator[Element]:
    yield element("h2", "Recoveries", id="recoveries")
    if not recoveries:
        yield element("p", "Nothing was lost, and no nodes joined or left.", class_="soft")
        return
    yield table(
        "Each recovery and change of membership; see the details below",
        _HEADER,
        [_recovery_row(recovery) for recovery in recoveries],
        numbers={0, 1, 4, 5, 6, 7, 8},
        words=2,
    )
    yield element("p", _COLUMNS, class_="soft")


def _recovery_row(recovery: Recovery) -> tuple[Element | str, ...]:
    def time(value: float | None) -> str:
        return "not known" if value is None else seconds(value)

    number = str(recovery.number)
    return (
        element("a", number, href=f"#recovery-{number}"),
        str(recovery.generation) if recovery.generation else "another job",
        recovery.lost,
        recovery.strategy,
        time(recovery.seconds),
        time(recovery.pause_seconds),
        f"{recovery.iteration:,}",
        f"{recovery.num_replayed:,}",
        "not known" if recovery.num_again is None else f"{recovery.num_again:,}",
    )


def _others(records: Sequence[OtherRecord]) -> Iterator[Element]:
    if not records:
        return
    yield element("h2", "Other events", id="others")
    shown = records[-MAX_ALERTS:]
    more = len(records) - len(shown)
    caption = "Kinds that other packages define" + (f"; {more:,} earlier ones are left out" if more else "")
    rows = [(_utc(record.time_unix_seconds), record.describe().text) for record in shown]
    yield table(caption, ("UTC", "what"), rows, words=1)


def _utc(at: float | None) -> str:
    known = instant(at)
    return "not known" if known is None else f"{datetime.fromtimestamp(known, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _footer(report: RunReport, again: str | None) -> Element:
    newest = "" if report.newest_unix_seconds is None else f"; the newest is of {_utc(report.newest_unix_seconds)} UTC"
    jobs = f", {report.num_jobs} jobs" if report.num_jobs > 1 else ""
    live = "" if again is None else f" The run continues: this page is read again every {again} s."
    return element(
        "footer", f"Made from {report.num_events:,} events and {report.num_metrics:,} metrics{jobs}{newest}.{live}"
    )
