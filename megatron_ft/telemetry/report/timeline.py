"""The drawing of a recovery: one lane per rank, by stage; who computes, who waits, what moves."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from megatron_ft.telemetry.report.lanes import KINDS, Lane, Span
from megatron_ft.telemetry.report.markup import Element, element
from megatron_ft.telemetry.report.story import FAILURE, Timeline
from megatron_ft.telemetry.report.svg import CHARACTER_WIDTH, Scale, cross, drawing, figure, line, text, x_axis
from megatron_ft.telemetry.wording import size

WIDTH = 1000
TOP, LANE, GAP, GROUP = 34, 22, 4, 12
LEFT, RIGHT = 196, 984
FATE_WIDTH = 94
"""Room for what became of a rank, where anything did."""
BYTES_WIDTH = 130
"""Column at the right in which bytes stand, where any moved."""
MAX_LANES = 512
"""Ranks drawn; the table lists no more either."""
_BEHIND = ("forms", "starts")


def timeline_plot(name: str, timeline: Timeline, title: str) -> Element:
    """The drawing; ``name`` is unique on the page."""
    lanes = timeline.lanes[:MAX_LANES]
    most = max((lane.work.bytes_moved for lane in lanes if lane.work is not None), default=0)
    right = RIGHT - (BYTES_WIDTH if most else 0)
    left = LEFT + (FATE_WIDTH if any(lane.fate for lane in lanes) else 0)
    x = Scale(low=timeline.begin, high=timeline.end, begin=left, end=right)
    rows: list[Element] = []
    y = float(TOP)
    for _, members in groupby(lanes, key=lambda lane: (lane.rank is None, lane.stage)):
        group = list(members)
        rows.append(_group(group, y))
        rows += (_lane(lane, x, y + index * (LANE + GAP), most) for index, lane in enumerate(group))
        y += len(group) * (LANE + GAP) + GROUP
    bottom = y - GROUP + 6
    return drawing(
        name,
        x_axis(
            x,
            bottom,
            label=f"seconds after {timeline.zero}",
            words=lambda value: f"{figure(round(value, 9))} s",
            top=TOP - 4,
        ),
        *rows,
        *_moments(timeline, x, bottom),
        text("upstream log", right + 14, bottom + 16, "label") if most else None,
        width=WIDTH,
        height=int(bottom + 44),
        title=title,
        description=described(timeline),
    )


def described(timeline: Timeline) -> str:
    """What is to be seen, in words."""
    moments = [f"{moment.words} at {moment.seconds:.2f} s" for moment in timeline.instants]
    lanes = [f"{lane.name}: {doing(lane)}" for lane in timeline.lanes[:16]]
    more = len(timeline.lanes) - len(lanes)
    tail = [f"{more} more ranks are in the table"] if more > 0 else []
    return ". ".join(["; ".join(moments), *lanes, *tail]) + "."


def doing(lane: Lane) -> str:
    """What a rank did between its last iteration before and its first one after, in words."""
    told = [span.words for span in lane.spans if span.kind not in ("trains", "unfinished")]
    return "; ".join([*([lane.fate] if lane.fate else []), *told]) or "no record"


def _group(lanes: Sequence[Lane], y: float) -> Element:
    """A bracket and the stage's name beside its ranks."""
    bottom = y + len(lanes) * (LANE + GAP) - GAP
    first = lanes[0]
    words = "gone" if first.rank is None else "ranks" if first.stage is None else f"stage {first.stage}"
    middle = (y + bottom) / 2
    return element("g", line(66, y, 66, bottom, "axis"), text(words, 58, middle + 4, "strong", "end"))


def _lane(lane: Lane, x: Scale, y: float, most_bytes: int) -> Element:
    node = "" if lane.node is None else f" · node {lane.node}"
    bars = sorted(lane.spans, key=lambda span: span.kind not in _BEHIND)
    end = None
    if lane.died_seconds is not None:
        end = cross(x(lane.died_seconds), y + LANE / 2, f"{lane.name}: its process ended")
    return element(
        "g",
        element("rect", x=x.begin, y=y, width=x.end - x.begin, height=LANE, class_="lane"),
        text(f"{lane.name}{node}", 74, y + LANE / 2 + 4),
        text(lane.fate, x.begin - 8, y + LANE / 2 + 4, "side", "end") if lane.fate else None,
        *(bar for span in bars for bar in _bar(span, x, y)),
        end,
        *_bytes(lane, x.end + 14, y, most_bytes),
    )


def _bar(span: Span, x: Scale, y: float) -> Iterator[Element]:
    begin, end = x(span.begin), x(span.end)
    if span.end < x.low or span.begin > x.high:
        return
    inset = 0 if span.kind in _BEHIND else 2
    width = max(1.5, end - begin - 1)
    yield element(
        "rect",
        element("title", span.words),
        x=begin,
        y=y + inset,
        width=width,
        height=LANE - 2 * inset,
        rx=2,
        class_=span.kind,
    )
    room = 22 if span.kind == "unfinished" else 6  # the mark of a failure stands at its end
    if span.label and width > CHARACTER_WIDTH * len(span.label) + room:
        yield text(span.label, begin + width / 2, y + LANE / 2 + 4, "inbar", "middle")


def _bytes(lane: Lane, x: float, y: float, most: int) -> Iterator[Element]:
    """How much of the log a rank sent or received, as a bar and in figures."""
    if lane.work is None or lane.work.bytes_moved <= 0 or most <= 0:
        return
    arrow = {"serves": "↑", "replays": "↓"}.get(lane.work.role, "")
    width = 40 * min(1.0, lane.work.bytes_moved / most)
    yield element("rect", x=x, y=y + 7, width=max(1.0, width), height=8, class_="log")
    yield text(f"{arrow} {size(lane.work.bytes_moved)}", x + 46, y + LANE / 2 + 4, "side")


def _moments(timeline: Timeline, x: Scale, bottom: float) -> Iterator[Element]:
    """Moments as lines; words where they do not run into each other."""
    free_from = -1.0
    for moment in sorted(timeline.instants, key=lambda moment: moment.seconds):
        if not timeline.begin <= moment.seconds <= timeline.end:
            continue
        at = x(moment.seconds)
        class_ = "failed-moment" if moment.words == FAILURE else "moment"
        title = element("title", f"{moment.words}: {moment.seconds:.2f} s")
        yield element("line", title, x1=at, y1=TOP - 8, x2=at, y2=bottom, class_=class_)
        half = CHARACTER_WIDTH * len(moment.words) / 2
        middle = min(at, WIDTH - half - 2)
        if middle - half > free_from:
            yield text(moment.words, middle, TOP - 13, "tick", "middle")
            free_from = middle + half + 4


def legend_bar(kind: str) -> Element:
    """A small bar of a kind."""
    assert kind in KINDS, f"{kind} is nothing that a rank is seen to do"
    bar = element("rect", x=1, y=1, width=20, height=10, rx=2, class_=kind)
    return element("svg", bar, viewBox="0 0 22 12", aria_hidden="true")
