"""The story of each recovery: its timeline, a table of what each rank did, and what was recorded in which order."""

from collections.abc import Iterator

from megatron_ft.telemetry.report.lanes import KINDS, Lane
from megatron_ft.telemetry.report.markup import Element, element
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.recoveries import Recovery
from megatron_ft.telemetry.report.story import Timeline
from megatron_ft.telemetry.report.tables import table
from megatron_ft.telemetry.report.timeline import MAX_LANES, doing, legend_bar, timeline_plot
from megatron_ft.telemetry.wording import seconds, size

NUM_OPEN = 12
"""Stories that a page shows at once; where there are more, all are folded."""
MAX_STEPS = 200
_NONE = "-"


def stories(report: RunReport) -> Iterator[Element]:
    """One part for each recovery."""
    if not report.recoveries:
        return
    yield element("h2", "How each went", id="stories")
    is_open = len(report.recoveries) <= NUM_OPEN
    for recovery in report.recoveries:
        yield element(
            "details",
            element("summary", element("h3", title(recovery))),
            *_story(recovery),
            class_="story",
            id=f"recovery-{recovery.number}",
            open="open" if is_open else None,
        )


def title(recovery: Recovery) -> str:
    """``1. node 2: replicas, goes on after iteration 63``."""
    return f"{recovery.number}. {recovery.lost}: {recovery.rung}, goes on after iteration {recovery.iteration}"


def _story(recovery: Recovery) -> Iterator[Element]:
    timeline = recovery.timeline
    if timeline is None:
        yield element("p", "No timeline: nothing says when its ranks did what.", class_="soft")
    else:
        yield timeline_plot(f"timeline-{recovery.number}", timeline, f"Timeline of recovery {recovery.number}")
        legend = [element("li", legend_bar(kind), KINDS[kind]) for kind in timeline.kinds]
        yield element("ul", *legend, class_="legend")
        yield element("details", element("summary", "What each rank did"), _lanes(timeline))
    if recovery.declined:
        yield element("p", "Not used: " + "; ".join(recovery.declined), class_="soft")
    yield element("details", element("summary", "What was recorded"), _steps(recovery))


def _lanes(timeline: Timeline) -> Element:
    shown = timeline.lanes[:MAX_LANES]
    more = len(timeline.lanes) - len(shown)
    caption = "Ranks by stage" + (f"; {more} more are left out" if more else "")
    header = ("rank", "stage", "node", "what it did", "began", "took", "replayed", "forward passes", "log bytes")
    return table(caption, header, [_lane(lane) for lane in shown], numbers={0, 1, 2, 4, 5, 6, 7, 8}, words=3)


def _lane(lane: Lane) -> tuple[str, ...]:
    work = lane.work
    spans = [span for span in lane.spans if span.kind not in ("trains", "unfinished")]
    own = [span for span in spans if work is not None and span.kind in (work.role, "other")] or spans
    times = (_NONE, _NONE)
    if own:
        begin, end = min(span.begin for span in own), max(span.end for span in own)
        times = (f"{begin:.2f} s", seconds(end - begin))
    counts = (_NONE, _NONE, _NONE)
    if work is not None:
        counts = (f"{work.num_iterations:,}", f"{work.num_forward_passes:,}", size(work.bytes_moved))
    place = (
        lane.name.removeprefix("rank "),
        *(_NONE if value is None else str(value) for value in (lane.stage, lane.node)),
    )
    return (*place, doing(lane), *times, *counts)


def _steps(recovery: Recovery) -> Element:
    steps, shown = recovery.steps, recovery.steps[:MAX_STEPS]
    zero = "the failure" if recovery.timeline is None else recovery.timeline.zero
    caption = f"Seconds after {zero}" + ("" if len(shown) == len(steps) else f"; the first {MAX_STEPS}")
    rows = [(_NONE if step.seconds is None else f"{step.seconds:.2f} s", step.text) for step in shown]
    return table(caption, ("at", "what"), rows, numbers={0}, words=1)
