"""Draws the loss curve with the failures and recoveries of a run."""

import math
from collections.abc import Iterator, Sequence

from megatron_ft.telemetry.report.drawing import (
    Element,
    Scale,
    cross,
    drawing,
    element,
    figure,
    line,
    text,
    x_axis,
    y_axis,
)
from megatron_ft.telemetry.report.model import Mark, RunReport
from megatron_ft.telemetry.report.recoveries import ranges

WIDTH, HEIGHT = 1000, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 984, 54, 280
MAX_POINTS = 900
"""Limit of drawn iterations. Above it, only the lowest and highest loss of neighbours are drawn."""


def loss_plot(report: RunReport) -> Element:
    """Draw training and validation loss over iterations, failures as crosses, and recoveries as numbered lines."""
    x, y = _scales(report)
    points = [(x(iteration), y(loss)) for iteration, loss in thinned(report.loss)]
    return drawing(
        "loss",
        x_axis(x, BOTTOM, label="iteration", words=lambda value: f"{value:,.10g}"),
        y_axis(y, LEFT, RIGHT, label="loss (nats per token)"),
        *_marks(report.marks, x),
        _curve(points),
        *(_evaluation(x(iteration), y(loss), iteration, loss) for iteration, loss in thinned(report.evaluations)),
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


def thinned(points: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Reduce ``points`` to about ``most``. Keeps the lowest and highest of neighbours, so that no spike is lost."""
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
        return element("circle", cx=points[0][0], cy=points[0][1], r=3, class_="dot")
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_="curve")


def _evaluation(x: float, y: float, iteration: int, loss: float) -> Element:
    words = element("title", f"validation loss {figure(loss)} after iteration {iteration}")
    return element("path", words, d=f"M{x:.2f} {y - 5:.2f}l5 5l-5 5l-5 -5z", class_="evaluation")


def _marks(marks: Sequence[Mark], x: Scale) -> Iterator[Element]:
    for mark in marks:
        if mark.number is not None:
            at = x(mark.iteration)
            title = element("title", f"{mark.number}: {mark.words}")
            yield element("line", title, x1=at, y1=TOP - 8, x2=at, y2=BOTTOM, class_=mark.kind)
        else:
            yield cross(x(mark.iteration), TOP, mark.words)
    for numbers, at in badges([(x(mark.iteration), mark.number) for mark in marks if mark.number is not None]):
        yield _badge(numbers, at)


def badges(places: Sequence[tuple[float, int]]) -> list[tuple[tuple[int, ...], float]]:
    """Return (numbers, pixel) of the badges for (pixel, number). Badges that would overlap are merged."""
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
    box = element("rect", x=at - width / 2, y=TOP - 28, width=width, height=18, rx=9, class_="badge")
    words = element("title", f"recovery {ranges(numbers)}")
    label = text(ranges(numbers), at, TOP - 15, "tick", "middle")
    return element("a", words, box, label, href=f"#recovery-{numbers[0]}")


def sampled(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return ``most`` points at even distances, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def legend_mark(kind: str) -> Element:
    """Draw the mark of a legend entry."""
    shapes = {
        "curve": line(0, 6, 22, 6, "curve"),
        "failure": cross(11, 6, "", 4.0),
        "recovery": line(11, 0, 11, 12, "recovery"),
        "change": line(11, 0, 11, 12, "change"),
        "evaluation": element("path", d="M11 1l5 5l-5 5l-5 -5z", class_="evaluation"),
    }
    return element("svg", shapes[kind], viewBox="0 0 22 12", aria_hidden="true")
