"""Where the time of a run went: a bar of its shares, a table of them, and ETTR as measured and by the formula."""

from collections.abc import Iterator

from megatron_ft.telemetry.goodput import Goodput
from megatron_ft.telemetry.report.markup import Element, element
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.svg import drawing, figure, swatch
from megatron_ft.telemetry.report.tables import table
from megatron_ft.telemetry.wording import seconds

WIDTH, HEIGHT = 1000, 30
_SHARES = (
    ("useful_seconds", "useful", "iterations that count"),
    ("stalled_seconds", "stalled", "waiting for captures, checkpoints, moves of experts"),
    ("again_seconds", "again", "iterations that were lost and run again"),
    ("skipped_seconds", "skipped", "iterations that the vote did not commit"),
    ("recovery_seconds", "recovering", "recoveries, changes of membership, jobs that go on with the run"),
    ("between_jobs_seconds", "between", "between jobs"),
    ("other_seconds", "rest", "starts, evaluations, between iterations"),
)
"""Field of the figures, class of its colour, and what it is."""


def goodput(report: RunReport) -> Iterator[Element]:
    """ETTR as measured and by the formula, and where the time went."""
    yield element("h2", "Goodput", id="goodput")
    found = report.goodput
    if found.ettr is None or not found.num_iterations:
        yield element("p", "No iteration has been timed yet.", class_="soft")
        return
    tiles = [element("div", element("dt", name), element("dd", value)) for name, value in _figures(found)]
    yield element("dl", *tiles, class_="tiles")
    yield _bar(found)
    present = [(class_, words) for name, class_, words in _SHARES if getattr(found, name) > 0]
    yield element("ul", *(element("li", swatch(class_), words) for class_, words in present), class_="legend")
    rows = [
        (words, seconds(getattr(found, name)), percent(getattr(found, name) / found.wall_seconds))
        for name, _, words in _SHARES
    ]
    yield element(
        "details",
        element("summary", "The shares as a table"),
        table("All of the wall time", ("what", "time", "share"), rows, numbers={1, 2}),
    )
    yield element("p", _WORDS, class_="soft")


_WORDS = (
    "ETTR, the effective training time ratio, is the time of iterations that count over wall time. The formula "
    "(MoEvement, section 2.4) takes this run's waiting per iteration, mean time between interruptions and mean time "
    "lost to one; it knows no starts, no evaluations and no time between jobs, so a large difference is found there."
)


def percent(share: float) -> str:
    """``98.3 %``."""
    return f"{100 * share:.1f} %"


def _figures(found: Goodput) -> Iterator[tuple[str, str]]:
    yield "ETTR, measured", "not known" if found.ettr is None else percent(found.ettr)
    yield "ETTR, by the formula", "not known" if found.predicted_ettr is None else percent(found.predicted_ettr)
    if found.num_tokens and found.tokens_per_second is not None:
        yield "goodput", f"{figure(float(f'{found.tokens_per_second:.4g}'))} tokens/s"
    yield "wall time", seconds(found.wall_seconds)
    yield "interruptions", f"{found.num_interruptions:,}"
    if found.num_interruptions:
        yield "up between them", seconds(found.mtbf_seconds)
        yield "lost to each", seconds(found.lost_per_interruption_seconds)


def _bar(found: Goodput) -> Element:
    shapes, x, told = [], 0.0, []
    for name, class_, words in _SHARES:
        share = getattr(found, name) / found.wall_seconds
        if share <= 0:
            continue
        told.append(f"{words}: {percent(share)}")
        shapes.append(
            element("rect", element("title", told[-1]), x=x, y=2, width=share * WIDTH, height=HEIGHT - 4, class_=class_)
        )
        x += share * WIDTH
    return drawing(
        "goodput-bar",
        *shapes,
        width=WIDTH,
        height=HEIGHT,
        title="Shares of the wall time",
        description="; ".join(told),
    )
