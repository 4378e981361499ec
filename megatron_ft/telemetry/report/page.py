"""Builds the report page of a run: heading, alerts, loss, goodput, recoveries, loads and placement. Each drawing has a
table beside it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from megatron_ft.events import AlertCleared, AlertRaised
from megatron_ft.formatting import seconds, size
from megatron_ft.records import OtherRecord
from megatron_ft.telemetry.goodput import Goodput, instant
from megatron_ft.telemetry.report.drawing import Element, Scale, figure, text, x_axis
from megatron_ft.telemetry.report.maps import load_maps, placement_maps
from megatron_ft.telemetry.report.model import Mark, RunReport
from megatron_ft.telemetry.report.recoveries import Recovery, ranges
from megatron_ft.telemetry.report.style import STYLE
from megatron_ft.telemetry.report.timeline import timelines

WIDTH, HEIGHT = 1000, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 984, 54, 280
MAX_POINTS = 900
"""Largest number of iterations that are drawn one by one. In a longer run, only the lowest and the highest loss of each
group of neighbouring iterations are drawn."""


def _loss_plot(report: RunReport) -> Element:
    """Draw training and validation loss over iterations. Crosses mark failures. Numbered lines mark recoveries."""
    x, y = _scales(report)
    points = [(x(iteration), y(loss)) for iteration, loss in _thinned(report.loss)]
    return Element.drawing(
        "loss",
        x_axis(x, BOTTOM, label="iteration", words=lambda value: f"{value:,.10g}"),
        y.y_axis(LEFT, RIGHT, label="loss (nats per token)"),
        *_marks(report.marks, x),
        _curve(points),
        *(_evaluation(x(iteration), y(loss), iteration, loss) for iteration, loss in _thinned(report.evaluations)),
        width=WIDTH,
        height=HEIGHT,
        title="Loss over iterations",
        description=_described(report),
        role="group",
    )


def _described(report: RunReport) -> str:
    first, last = report.loss[0], report.loss[-1]
    lowest = min(report.loss, key=lambda point: point[1])
    curve = (
        f"The training loss goes from {figure(first[1])} at iteration {first[0]} to {figure(last[1])} at "
        f"iteration {last[0]}. The lowest is {figure(lowest[1])} at iteration {lowest[0]}."
    )
    return " ".join([curve, *(f"{mark.words}." for mark in report.marks[:20])])


def _thinned(points: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Reduce ``points`` to about ``most`` points. Each group of adjacent points is replaced by its lowest and its
    highest point, so that no spike of the loss is hidden."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[int, float]] = []
    for begin in range(0, len(points), size):
        group = points[begin : begin + size]
        kept += sorted({min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])})
    return kept


def _scales(report: RunReport) -> tuple[Scale, Scale]:
    iterations = [iteration for iteration, _ in report.loss] + [mark.iteration for mark in report.marks]
    losses = [loss for _, loss in (*report.loss, *report.evaluations)]
    low, high = min(losses), max(losses)
    margin = 0.06 * (high - low) or 0.05 * max(abs(high), 1.0)
    x = Scale(low=min(iterations), high=max(iterations), begin=LEFT + 8, end=RIGHT - 8)
    return x, Scale(low=low - margin, high=high + margin, begin=BOTTOM, end=TOP)


def _curve(points: Sequence[tuple[float, float]]) -> Element:
    if len(points) == 1:
        return Element.of("circle", cx=points[0][0], cy=points[0][1], r=3, class_="dot")
    return Element.of("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_="curve")


def _evaluation(x: float, y: float, iteration: int, loss: float) -> Element:
    words = Element.of("title", f"validation loss {figure(loss)} after iteration {iteration}")
    return Element.of("path", words, d=f"M{x:.2f} {y - 5:.2f}l5 5l-5 5l-5 -5z", class_="evaluation")


def _marks(marks: Sequence[Mark], x: Scale) -> Iterator[Element]:
    for mark in marks:
        if mark.number is not None:
            at = x(mark.iteration)
            title = Element.of("title", f"{mark.number}: {mark.words}")
            yield Element.of("line", title, x1=at, y1=TOP - 8, x2=at, y2=BOTTOM, class_=mark.kind)
        else:
            yield Element.cross(x(mark.iteration), TOP, mark.words)
    for numbers, at in _badges([(x(mark.iteration), mark.number) for mark in marks if mark.number is not None]):
        yield _badge(numbers, at)


def _badges(places: Sequence[tuple[float, int]]) -> list[tuple[tuple[int, ...], float]]:
    """Merge marks of recoveries that would overlap on the plot. ``places`` contains (x in pixels, recovery's number) of
    each mark. Return (numbers of the recoveries, x in pixels) of each mark after the merge."""
    found: list[tuple[tuple[int, ...], float]] = []
    for at, number in sorted(places):
        numbers: tuple[int, ...] = (number,)
        while found and found[-1][1] + _badge_width(found[-1][0]) / 2 + 2 > at - _badge_width(numbers) / 2:
            earlier, place = found.pop()
            at = (place * len(earlier) + at * len(numbers)) / (len(earlier) + len(numbers))
            numbers = tuple(sorted((*earlier, *numbers)))
        found.append((numbers, at))
    return found


def _badge_width(numbers: Sequence[int]) -> float:
    return 12 + 6.5 * len(ranges(numbers))


def _badge(numbers: Sequence[int], at: float) -> Element:
    width = _badge_width(numbers)
    box = Element.of("rect", x=at - width / 2, y=TOP - 28, width=width, height=18, rx=9, class_="badge")
    words = Element.of("title", f"recovery {ranges(numbers)}")
    label = text(ranges(numbers), at, TOP - 15, "tick", "middle")
    return Element.of("a", words, box, label, href=f"#recovery-{numbers[0]}")


def _sampled(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return at most ``most`` of the points, evenly spaced by index. The first and the last point are always kept."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def _legend_mark(kind: str) -> Element:
    """Draw the symbol of a legend entry."""
    shapes = {
        "curve": Element.line(0, 6, 22, 6, "curve"),
        "failure": Element.cross(11, 6, "", 4.0),
        "recovery": Element.line(11, 0, 11, 12, "recovery"),
        "change": Element.line(11, 0, 11, 12, "change"),
        "evaluation": Element.of("path", d="M11 1l5 5l-5 5l-5 -5z", class_="evaluation"),
    }
    return Element.of("svg", shapes[kind], viewBox="0 0 22 12", aria_hidden="true")


# Texts of a page come from files of a run. This policy forbids scripts and requests, even if a text were not escaped.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_ROWS_OF_LOSS = 24
MAX_ALERTS = 100
_MARKS = (
    ("failure", "iteration in which ranks failed"),
    ("recovery", "iteration after which the run continued, with the number of the recovery"),
    ("change", "iteration at which nodes joined or left on request, or another job continued the run"),
)
_SHARES = (
    ("useful_seconds", "useful", "useful iterations"),
    ("stalled_seconds", "stalled", "waiting for captures, checkpoints or moving experts"),
    ("again_seconds", "again", "iterations that were lost and run again"),
    ("skipped_seconds", "skipped", "iterations that the commit vote rejected"),
    ("recovery_seconds", "recovering", "recoveries, changes of membership, jobs that continue the run"),
    ("between_jobs_seconds", "between", "between jobs"),
    ("other_seconds", "rest", "starts, evaluations, time between iterations"),
)
"""Shares of the wall time in the goodput bar: field of ``Goodput``, CSS class of the colour, and description."""
_ETTR = (
    "ETTR, the effective training time ratio, is the time of useful iterations (committed and not lost "
    "later) divided by wall time. The formula (MoEvement, section 2.4) uses this run's waiting time per "
    "iteration, mean time between interruptions and mean time lost per interruption. It leaves out starts, "
    "evaluations and time between jobs. If the two figures differ much, these times are the reason."
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
    "Seconds: from the decision until all ranks were ready. Pause: from the first failure until the next "
    "iteration was reported. Replayed: iterations computed again from windows or logs. Trained again: "
    "iterations that had been reported before."
)


def render(report: RunReport, *, refresh_seconds: int | None = None) -> str:
    """Return the report page as one self-contained HTML file, which is also well-formed XML.

    Args:
        refresh_seconds: Interval at which the browser reloads the page; None for a page that does not change.
    """
    again = None if refresh_seconds is None else str(refresh_seconds)
    head = Element.of(
        "head",
        Element.of("meta", charset="utf-8"),
        Element.of("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        Element.of("meta", name="viewport", content="width=device-width, initial-scale=1"),
        None if again is None else Element.of("meta", http_equiv="refresh", content=again),
        Element.of("title", f"{report.name}: report of a run"),
        Element.of("style", STYLE),
    )
    main = Element.of(
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
    body = Element.of("body", main, _footer(report, again))
    return f"<!DOCTYPE html>\n{Element.of('html', head, body, lang='en').render()}\n"


def _tiles(figures: Iterator[tuple[str, str]]) -> Element:
    return Element.of(
        "dl",
        *(Element.of("div", Element.of("dt", name), Element.of("dd", value)) for name, value in figures),
        class_="tiles",
    )


def _heading(report: RunReport) -> Iterator[Element]:
    about = ", ".join(part for part in (report.model, report.size) if part)
    yield Element.of(
        "header",
        Element.of("h1", report.name),
        Element.of("p", about, class_="about") if about else None,
        Element.of("p", report.outcome.text, class_=f"outcome {report.outcome.level}"),
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
    yield from _speed(report.speed)
    failures = [recovery for recovery in report.recoveries if recovery.is_failure]
    yield "recoveries", str(len(failures))
    pauses = [recovery.pause_seconds for recovery in failures if recovery.pause_seconds is not None]
    if pauses:
        yield "all pauses", seconds(sum(pauses))
    if failures:
        yield "iterations again", f"{sum(recovery.num_again or 0 for recovery in failures):,}"


def _speed(speed: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if (rate := speed.get("tokens_per_second_per_gpu")) is not None:
        yield "tokens/s per GPU", figure(float(f"{rate:.4g}"))
    if (rate := speed.get("tflops_per_gpu")) is not None:
        yield "TFLOP/s per GPU", figure(float(f"{rate:.3g}"))
    if (share := speed.get("mfu")) is not None:
        yield "MFU", _percent(share)
    if (peak := speed.get("memory_peak_bytes")) is not None:
        yield "peak memory of a rank", size(peak)


def _alerts(alerts: Sequence[AlertRaised | AlertCleared]) -> Iterator[Element]:
    if not alerts:
        return
    yield Element.of("h2", "Alerts", id="alerts")
    # The last report of each alert determines whether the alert is still active.
    newest = {record.alert: record for record in alerts}
    standing = [record for record in newest.values() if isinstance(record, AlertRaised)]
    if standing:
        words = (record.describe().text for record in standing[:MAX_ALERTS])
        yield Element.of("ul", *(Element.of("li", text, class_="words bad") for text in words))
    else:
        yield Element.of("p", "All alerts are cleared.", class_="good")
    shown = alerts[-MAX_ALERTS:]
    more = len(alerts) - len(shown)
    caption = "In the order of their reports" + (f"; {more:,} earlier ones are not shown" if more else "")
    rows = [(f"{record.iteration:,}", record.describe().text) for record in shown]
    found = Element.table(caption, ("iteration", "what"), rows, numbers={0}, words=1)
    yield Element.of("details", Element.of("summary", "All alerts"), found)


def _loss(report: RunReport) -> Iterator[Element]:
    yield Element.of("h2", "Loss", id="loss")
    if not report.loss:
        yield Element.of("p", "No loss has been reported yet.", class_="soft")
        return
    yield _loss_plot(report)
    kinds = [("curve", "training loss")]
    kinds += [("evaluation", "validation loss")] if report.evaluations else []
    kinds += [(kind, words) for kind, words in _MARKS if any(mark.kind == kind for mark in report.marks)]
    yield Element.of("ul", *(Element.of("li", _legend_mark(kind), words) for kind, words in kinds), class_="legend")
    rows = [(f"{iteration:,}", figure(value)) for iteration, value in _sampled(report.loss, _ROWS_OF_LOSS)]
    found = Element.table(
        "Training loss of some iterations", ("iteration", "loss (nats per token)"), rows, numbers={0, 1}
    )
    yield Element.of("details", Element.of("summary", "The curve as a table"), found)


def _goodput(found: Goodput) -> Iterator[Element]:
    yield Element.of("h2", "Goodput", id="goodput")
    if found.ettr is None or not found.num_iterations:
        yield Element.of("p", "No iteration has been timed yet.", class_="soft")
        return
    yield _tiles(_goodput_figures(found))
    shares = [
        (class_, words, getattr(found, name), getattr(found, name) / found.wall_seconds)
        for name, class_, words in _SHARES
    ]
    present = [share for share in shares if share[2] > 0]
    yield _share_bar([(class_, f"{words}: {_percent(share)}", share) for class_, words, _, share in present])
    yield Element.of(
        "ul", *(Element.of("li", Element.swatch(class_), words) for class_, words, *_ in present), class_="legend"
    )
    rows = [(words, seconds(took), _percent(share)) for _, words, took, share in shares]
    found_table = Element.table("All shares of the wall time", ("what", "time", "share"), rows, numbers={1, 2})
    yield Element.of("details", Element.of("summary", "The shares as a table"), found_table)
    yield Element.of("p", _ETTR, class_="soft")


def _goodput_figures(found: Goodput) -> Iterator[tuple[str, str]]:
    yield "ETTR, measured", "not known" if found.ettr is None else _percent(found.ettr)
    yield (
        ("ETTR, predicted by the formula"),
        "not known" if found.predicted_ettr is None else _percent(found.predicted_ettr),
    )
    if found.num_tokens and found.tokens_per_second is not None:
        yield "goodput", f"{figure(float(f'{found.tokens_per_second:.4g}'))} tokens/s"
    yield "wall time", seconds(found.wall_seconds)
    yield "interruptions", f"{found.num_interruptions:,}"
    if found.num_interruptions:
        yield "time between interruptions", seconds(found.mtbf_seconds)
        yield "time lost per interruption", seconds(found.lost_per_interruption_seconds)


def _share_bar(shares: Sequence[tuple[str, str, float]]) -> Element:
    width, height, x, shapes = 1000, 30, 0.0, []
    for class_, words, share in shares:
        title = Element.of("title", words)
        shapes.append(Element.of("rect", title, x=x, y=2, width=share * width, height=height - 4, class_=class_))
        x += share * width
    return Element.drawing(
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
    yield Element.of("h2", "Recoveries", id="recoveries")
    if not recoveries:
        yield Element.of("p", "Nothing was lost, and no nodes joined or left.", class_="soft")
        return
    yield Element.table(
        "Each recovery and change of membership; see the details below",
        _HEADER,
        [_recovery_row(recovery) for recovery in recoveries],
        numbers={0, 1, 4, 5, 6, 7, 8},
        words=2,
    )
    yield Element.of("p", _COLUMNS, class_="soft")


def _recovery_row(recovery: Recovery) -> tuple[Element | str, ...]:
    def time(value: float | None) -> str:
        return "not known" if value is None else seconds(value)

    number = str(recovery.number)
    return (
        Element.of("a", number, href=f"#recovery-{number}"),
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
    yield Element.of("h2", "Other events", id="others")
    shown = records[-MAX_ALERTS:]
    more = len(records) - len(shown)
    caption = "Events of kinds that other packages define" + (f"; {more:,} earlier ones are left out" if more else "")
    rows = [(_utc(record.time_unix_seconds), record.describe().text) for record in shown]
    yield Element.table(caption, ("UTC", "what"), rows, words=1)


def _utc(at: float | None) -> str:
    known = instant(at)
    return "not known" if known is None else f"{datetime.fromtimestamp(known, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _footer(report: RunReport, again: str | None) -> Element:
    newest = (
        ""
        if report.newest_unix_seconds is None
        else (f"; the newest was written at {_utc(report.newest_unix_seconds)} UTC")
    )
    jobs = f", {report.num_jobs} jobs" if report.num_jobs > 1 else ""
    live = "" if again is None else f" The run continues, and the browser reloads this page every {again} s."
    return Element.of(
        "footer", f"Made from {report.num_events:,} events and {report.num_metrics:,} metrics{jobs}{newest}.{live}"
    )
