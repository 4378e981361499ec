"""Shows what each rank did during a recovery, and when, in a drawing with a row for each rank, and in two tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megatron_ft import events
from megatron_ft.events import Metrics
from megatron_ft.formatting import counted, seconds, size
from megatron_ft.telemetry.goodput import duration, instant
from megatron_ft.telemetry.report.drawing import CHARACTER_WIDTH, Element, Scale, figure, text, x_axis
from megatron_ft.telemetry.report.recoveries import Course, Recovery

KINDS = {
    "trains": "trains",
    "unfinished": "iteration that was interrupted",
    "forms": "new process groups are formed",
    "starts": "processes start",
    "loads": "loads a checkpoint",
    "replays": "replays (computes again)",
    "receives": "receives the state of living ranks",
    "serves": "sends its state, or its upstream log",
    "waits": "waits and keeps its state",
    "other": "other",
}
"""Kinds of activities of a rank, each with its description in the legend."""
FAILURE = "failure"
"""Label of the first failure that a recovery had to repair. Its moment is time 0 of the recovery's timeline."""
NUM_OPEN = 12
"""Largest number of recoveries whose details the page shows unfolded. If there are more, all of them are folded."""
MAX_STEPS = 200
MAX_LANES = 512
"""Largest number of ranks that the drawing and the table show."""
WIDTH = 1000
TOP, LANE, GAP, GROUP = 34, 22, 4, 12
LEFT, RIGHT = 196, 984
FATE_WIDTH = 94
"""Width in pixels of the column with changes of processes, e.g. ``lost``. It exists only if some process changed."""
BYTES_WIDTH = 130
"""Width in pixels of the column with the bytes that each rank moved. It exists only if some rank moved bytes."""
_BEHIND = ("forms", "starts")
_MARGIN = 0.35
"""Time shown before a recovery and time shown after it, each as a share of the recovery's duration."""
_LEAST_MARGIN_SECONDS = 0.2
_NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Activity of a rank in a timeline. Times are in seconds after the begin of the recovery."""

    kind: str
    """Kind of the activity: a key of ``KINDS``."""
    begin: float
    end: float
    label: str
    """Short text that is drawn inside the activity's bar if there is space."""
    words: str
    """Full description of the activity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Row of the timeline: a rank, or a process that ended in the recovery."""

    rank: int | None
    """Rank after the recovery; None if the process has ended."""
    previous: int | None
    """Rank that this process, or the process that it replaces, had before the recovery; None if there was none."""
    node: int | None
    stage: int | None
    """Pipeline stage of the rank; None if no record names it."""
    fate: str
    """Text about a change of the process, e.g. ``new process`` or ``lost``; empty if it kept its rank."""
    spans: tuple[_Span, ...] = ()
    died_seconds: float | None = None
    """Seconds from the recovery's begin until the process with rank ``previous`` failed; None if no failure known."""
    work: events.StageRecovery | None = None
    """This rank's record of its work in the recovery; None if there is none."""

    @property
    def name(self) -> str:
        """Return the name of the row, e.g. ``rank 3``. The number is the rank after the recovery or, if the process has
        ended, the rank before the recovery."""
        return f"rank {self.previous if self.rank is None else self.rank}"

    @property
    def doing(self) -> str:
        """Describe what the rank did between the last iteration before the recovery and the first iteration after."""
        words = [span.words for span in self.spans if span.kind not in ("trains", "unfinished")]
        return "; ".join([*([self.fate] if self.fate else []), *words]) or "no record"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """Moment of a recovery that the timeline marks across all rows, such as the first failure."""

    seconds: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Content of the timeline of a recovery. Times are in seconds after the first failure; without a failure, after
    the request to change the membership."""

    begin: float
    end: float
    lanes: tuple[Lane, ...]
    """Rows ordered by stage, then by rank. Processes that have ended come last."""
    instants: tuple[_Instant, ...]
    """Moments that the timeline marks, in order. All times are measured from the first moment."""

    @property
    def zero(self) -> str:
        """Return a text for time 0 of the timeline: the failure, or the request to change the membership."""
        return "the failure" if self.instants[0].words == FAILURE else "it was requested"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of activities that occur in the timeline, in the order of ``KINDS``."""
        seen = {span.kind for lane in self.lanes for span in lane.spans}
        return tuple(kind for kind in KINDS if kind in seen)

    @classmethod
    def of(cls, recovery: Recovery) -> "Timeline | None":
        """Make a recovery's timeline. Return None if its records have no times, or if a new job continued the run."""
        course = recovery.course
        if course is None or recovery.is_new_job:
            return None
        lanes = sorted(_lanes(recovery, course.begin), key=_place)
        margin = max(_MARGIN * (course.ready - course.begin), _LEAST_MARGIN_SECONDS)
        last = [at for record in course.after[-1:] if (at := record.time_unix_seconds) is not None]
        resumed = _training(course.after, course.ready, course.begin)[:1]
        ready = max(course.ready - course.begin, *(span.begin for span in resumed), 0.0)
        end = min(max(ready, *(at - course.begin for at in last), 0.0), ready + margin)
        earliest = min((span.begin for span in _training(course.before, 0.0, course.begin)), default=-margin)
        return cls(
            begin=max(-margin, earliest) if course.before else -margin,
            end=max(end, 1e-3),
            lanes=tuple(replace(lane, spans=tuple(_spans(lane, recovery, course))) for lane in lanes),
            instants=tuple(_instants(recovery, course)),
        )


def _instants(recovery: Recovery, course: Course) -> Iterator[_Instant]:
    yield _Instant(seconds=0.0, words=FAILURE if recovery.is_failure else "requested")
    if course.decided > course.begin:
        yield _Instant(seconds=course.decided - course.begin, words="decided")
    if course.ready > course.decided:
        yield _Instant(seconds=course.ready - course.begin, words="ready")
    for first in course.after[:1]:
        if first.time_unix_seconds is not None:
            at = first.time_unix_seconds - course.begin
            yield _Instant(seconds=at, words=f"iteration {first.iteration} done")


def _place(lane: Lane) -> tuple[bool, int, int]:
    number = lane.previous if lane.rank is None else lane.rank
    return lane.rank is None, -1 if lane.stage is None else lane.stage, number or 0


def _lanes(recovery: Recovery, begin: float) -> Iterator[Lane]:
    before, after = recovery.nodes_before, recovery.nodes_after
    stages = {record.rank: record for record in recovery.every(events.StageRecovery)}
    previous = _previous_ranks(recovery)
    keeps = len(previous) == len(before) and all(old in (None, new) for new, old in enumerate(previous))
    dead = _deaths(recovery, begin)
    for rank, node in enumerate(after):
        old = rank if keeps and rank < len(before) else previous[rank]
        is_new = recovery.is_restart or previous[rank] is None
        work = stages.get(rank)
        yield Lane(
            rank=rank,
            previous=old,
            node=node,
            stage=None if work is None else work.stage,
            fate="new process" if is_new else f"was rank {old}" if old not in (None, rank) else "",
            died_seconds=None if old is None else dead.get(old, 0.0 if is_new and not recovery.is_restart else None),
            work=work,
        )
    for old, node in enumerate(() if keeps else before):
        if old not in previous:
            has_left = recovery.decision is not None and node in recovery.decision.left_nodes
            fate = "left on request" if has_left else "not started again" if recovery.is_restart else "lost"
            died = None if has_left else dead.get(old, 0.0)
            yield Lane(rank=None, previous=old, node=node, stage=None, fate=fate, died_seconds=died)


def _previous_ranks(recovery: Recovery) -> tuple[int | None, ...]:
    # The controller's decision contains the previous number of each rank. Without it, the number is derived from nodes.
    before, after = recovery.nodes_before, recovery.nodes_after
    decision = recovery.decision
    if decision is not None and len(decision.previous_ranks) == len(after) > 0:
        return decision.previous_ranks
    if recovery.every(events.StageRecovery):
        failed = {record.rank for record in recovery.every(events.RankFailed)}
        return tuple(None if rank in failed else rank for rank in range(len(after)))
    if recovery.is_restart or None in before + after:
        return tuple(rank if rank < len(before) else None for rank in range(len(after)))
    old = {place: rank for rank, place in enumerate(_local(before))}
    return tuple(old.get(place) for place in _local(after))


def _local(nodes: Sequence[int | None]) -> Iterator[tuple[int | None, int]]:
    """Yield for each rank its node, and its index among the ranks of this node, counted from 0."""
    count: dict[int | None, int] = {}
    for node in nodes:
        count[node] = count.get(node, -1) + 1
        yield node, count[node]


def _deaths(recovery: Recovery, begin: float) -> dict[int, float]:
    dead: dict[int, float] = {}
    for record in recovery.every(events.RankFailed):
        at = instant(record.time_unix_seconds)
        dead.setdefault(record.rank, 0.0 if at is None else max(0.0, at - begin))
    return dead


def _spans(lane: Lane, recovery: Recovery, course: Course) -> Iterator[_Span]:
    if lane.previous is not None:
        end = float("inf") if lane.died_seconds is None else lane.died_seconds
        for span in _before(recovery, course):
            # Nothing is drawn after the end of the process.
            if span.begin < end:
                yield replace(span, end=max(span.begin, min(span.end, end)))
    if lane.rank is not None:
        yield from _during(lane, recovery, course)
        yield from _training(course.after, course.ready, course.begin)


def _before(recovery: Recovery, course: Course) -> list[_Span]:
    spans = _training(course.before, 0.0, course.begin)
    newest = course.before[-1].time_unix_seconds if course.before else None
    if recovery.is_failure and spans and newest is not None and course.begin > newest:
        iteration = course.before[-1].iteration + 1
        words = f"iteration {iteration} was interrupted"
        spans.append(_Span(kind="unfinished", begin=newest - course.begin, end=0.0, label=str(iteration), words=words))
    return spans


def _training(metrics: Sequence[Metrics], from_seconds: float, zero: float) -> list[_Span]:
    """Return one activity per trained iteration. No activity begins before ``from_seconds`` or overlaps another.

    Args:
        zero: Time that is subtracted from the times of the activities.
    """
    spans: list[_Span] = []
    free_from = from_seconds
    for record in metrics:
        end, length = record.time_unix_seconds, duration(float(record.values.get("iteration_seconds", -1.0)))
        if end is None:
            continue
        begin = max(free_from, end - length) if length is not None else free_from
        if 0.0 < begin <= end:
            words, label = f"iteration {record.iteration} trained", str(record.iteration)
            spans.append(_Span(kind="trains", begin=begin - zero, end=end - zero, label=label, words=words))
        # Bars of one lane must not overlap, even if the clocks of two attempts disagree.
        free_from = max(free_from, end)
    return spans


def _during(lane: Lane, recovery: Recovery, course: Course) -> Iterator[_Span]:
    # List spans from the decision until the rank trains. Spans that other spans may cover come first.

    def span(kind: str, end: float | None, length: float | None, label: str, words: str) -> Iterator[_Span]:
        until, length = instant(end), duration(length)
        if until is not None and length is not None:
            relative, words = until - course.begin, f"{words}: {seconds(length)}"
            yield _Span(kind=kind, begin=relative - length, end=relative, label=label, words=words)

    for changed in recovery.every(events.MembershipChanged):
        yield from span("forms", changed.time_unix_seconds, changed.seconds, "", "the membership forms")
    if recovery.is_restart:
        words = "processes start and build their part of the model"
        yield from span("starts", course.ready, course.ready - course.decided, "", words)
    for loaded in recovery.every(events.CheckpointLoaded):
        words = f"loads the checkpoint of iteration {loaded.iteration}"
        yield from span("loads", loaded.time_unix_seconds, loaded.seconds, f"to {loaded.iteration}", words)
    if (work := lane.work) is not None:
        began, length = instant(work.began_unix_seconds), duration(work.seconds)
        if began is not None and length is not None:
            label = f"{work.num_iterations} iterations" if work.role == "replays" else work.role
            yield from span(work.role if work.role in KINDS else "other", began + length, length, label, _work(work))
    elif not recovery.every(events.StageRecovery):
        for replayed in recovery.every(events.WindowReplayed):
            words = f"replays iterations {replayed.start_iteration + 1} to {replayed.iteration}"
            label = counted(replayed.num_iterations, "iteration")
            yield from span("replays", replayed.time_unix_seconds, replayed.seconds, label, words)


def _work(work: events.StageRecovery) -> str:
    direction = {"replays": "received", "receives": "received", "serves": "sent"}.get(work.role, "moved")
    moved = f"{size(work.bytes_moved)} {direction}"
    if work.role == "replays":
        passes = f"{work.num_forward_passes} forward passes"
        return f"replays iterations {work.start_iteration + 1} to {work.iteration}, {passes}, {moved}"
    return f"{work.role}, {moved}" if work.bytes_moved else work.role


def timelines(recoveries: Sequence[Recovery]) -> Iterator[Element]:
    """Return the section of the report page with the details of each recovery."""
    if not recoveries:
        return
    yield Element.of("h2", "Details of each recovery", id="stories")
    is_open = len(recoveries) <= NUM_OPEN
    for recovery in recoveries:
        title = (
            f"{recovery.number}. {recovery.lost}: {recovery.strategy}, continues after iteration {recovery.iteration}"
        )
        yield Element.of(
            "details",
            Element.of("summary", Element.of("h3", title)),
            *_part(recovery),
            class_="recovery-details",
            id=f"recovery-{recovery.number}",
            open="open" if is_open else None,
        )


def _part(recovery: Recovery) -> Iterator[Element]:
    timeline = Timeline.of(recovery)
    if timeline is None:
        yield Element.of("p", "No timeline: the records do not contain the times of the ranks' work.", class_="soft")
    else:
        yield _timeline_plot(f"timeline-{recovery.number}", timeline, f"Timeline of recovery {recovery.number}")
        legend = [Element.of("li", _legend_bar(kind), KINDS[kind]) for kind in timeline.kinds]
        yield Element.of("ul", *legend, class_="legend")
        yield Element.of("details", Element.of("summary", "Work of each rank"), _lane_table(timeline))
    if recovery.declined:
        yield Element.of("p", "Recovery strategies that were not used: " + "; ".join(recovery.declined), class_="soft")
    yield Element.of("details", Element.of("summary", "Recorded events"), _step_table(recovery, timeline))


def _lane_table(timeline: Timeline) -> Element:
    shown = timeline.lanes[:MAX_LANES]
    more = len(timeline.lanes) - len(shown)
    caption = "Ranks by stage" + (f"; {more} more are not shown" if more else "")
    header = ("rank", "stage", "node", "work", "began", "took", "replayed", "forward passes", "log bytes")
    return Element.table(
        caption, header, [_lane_row(lane) for lane in shown], numbers={0, 1, 2, 4, 5, 6, 7, 8}, words=3
    )


def _lane_row(lane: Lane) -> tuple[str, ...]:
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
    place = (_NONE if value is None else str(value) for value in (lane.stage, lane.node))
    return (lane.name.removeprefix("rank "), *place, lane.doing, *times, *counts)


def _step_table(recovery: Recovery, timeline: Timeline | None) -> Element:
    steps = list(_steps_of(recovery))
    zero = "the failure" if timeline is None else timeline.zero
    caption = f"Seconds after {zero}" + ("" if len(steps) <= MAX_STEPS else f"; the first {MAX_STEPS}")
    rows = [(_NONE if at is None else f"{at:.2f} s", words) for at, words in steps[:MAX_STEPS]]
    return Element.table(caption, ("at", "what"), rows, numbers={0}, words=1)


def _steps_of(recovery: Recovery) -> list[tuple[float | None, str]]:
    """Return (seconds after the begin of the recovery, text) of each record, by time. Records without time are last."""
    course, decision = recovery.course, recovery.decision

    def after(at: float | None) -> float | None:
        known = instant(at)
        return None if course is None or known is None else known - course.begin

    notes = [(record.time_unix_seconds, record.describe()) for record in recovery.records]
    steps = [(after(at), note.text) for at, note in notes if note is not None]
    if decision is not None:
        words = decision.declined or f"the controller decided how to continue: {decision.reason}"
        steps.append((after(decision.time_unix_seconds), words))
    for first in () if course is None else course.after[:1]:
        steps.append((after(first.time_unix_seconds), f"first iteration after the recovery: {first.iteration}"))
    return sorted(steps, key=lambda step: float("inf") if step[0] is None else step[0])


def _timeline_plot(name: str, timeline: Timeline, title: str) -> Element:
    """Draw one row for each rank, ordered by pipeline stage. ``name`` must be unique on the page."""
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
    return Element.drawing(
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
        description=_described(timeline),
    )


def _described(timeline: Timeline) -> str:
    moments = [f"{moment.words} at {moment.seconds:.2f} s" for moment in timeline.instants]
    lanes = [f"{lane.name}: {lane.doing}" for lane in timeline.lanes[:16]]
    more = len(timeline.lanes) - len(lanes)
    tail = [f"{more} more ranks are in the table"] if more > 0 else []
    return ". ".join(["; ".join(moments), *lanes, *tail]) + "."


def _group(lanes: Sequence[Lane], y: float) -> Element:
    bottom = y + len(lanes) * (LANE + GAP) - GAP
    first = lanes[0]
    words = "gone" if first.rank is None else "ranks" if first.stage is None else f"stage {first.stage}"
    middle = (y + bottom) / 2
    return Element.of("g", Element.line(66, y, 66, bottom, "axis"), text(words, 58, middle + 4, "strong", "end"))


def _lane(lane: Lane, x: Scale, y: float, most_bytes: int) -> Element:
    node = "" if lane.node is None else f" · node {lane.node}"
    bars = sorted(lane.spans, key=lambda span: span.kind not in _BEHIND)
    end = None
    if lane.died_seconds is not None:
        end = Element.cross(x(lane.died_seconds), y + LANE / 2, f"{lane.name}: its process ended")
    return Element.of(
        "g",
        Element.of("rect", x=x.begin, y=y, width=x.end - x.begin, height=LANE, class_="lane"),
        text(f"{lane.name}{node}", 74, y + LANE / 2 + 4),
        text(lane.fate, x.begin - 8, y + LANE / 2 + 4, "side", "end") if lane.fate else None,
        *(bar for span in bars for bar in _bar(span, x, y)),
        end,
        *_bytes(lane, x.end + 14, y, most_bytes),
    )


def _bar(span: _Span, x: Scale, y: float) -> Iterator[Element]:
    begin, end = x(span.begin), x(span.end)
    if span.end < x.low or span.begin > x.high:
        return
    inset = 0 if span.kind in _BEHIND else 2
    width = max(1.5, end - begin - 1)
    height = LANE - 2 * inset
    title = Element.of("title", span.words)
    yield Element.of("rect", title, x=begin, y=y + inset, width=width, height=height, rx=2, class_=span.kind)
    room = 22 if span.kind == "unfinished" else 6  # the mark of a failure is at its end
    if span.label and width > CHARACTER_WIDTH * len(span.label) + room:
        yield text(span.label, begin + width / 2, y + LANE / 2 + 4, "inbar", "middle")


def _bytes(lane: Lane, x: float, y: float, most: int) -> Iterator[Element]:
    if lane.work is None or lane.work.bytes_moved <= 0 or most <= 0:
        return
    arrow = {"serves": "↑", "replays": "↓", "receives": "↓"}.get(lane.work.role, "")
    width = 40 * min(1.0, lane.work.bytes_moved / most)
    yield Element.of("rect", x=x, y=y + 7, width=max(1.0, width), height=8, class_="log")
    yield text(f"{arrow} {size(lane.work.bytes_moved)}", x + 46, y + LANE / 2 + 4, "side")


def _moments(timeline: Timeline, x: Scale, bottom: float) -> Iterator[Element]:
    # Moments are drawn as lines. Their names are drawn only where they do not overlap.
    free_from = -1.0
    for moment in sorted(timeline.instants, key=lambda moment: moment.seconds):
        if not timeline.begin <= moment.seconds <= timeline.end:
            continue
        at = x(moment.seconds)
        class_ = "failed-moment" if moment.words == FAILURE else "moment"
        title = Element.of("title", f"{moment.words}: {moment.seconds:.2f} s")
        yield Element.of("line", title, x1=at, y1=TOP - 8, x2=at, y2=bottom, class_=class_)
        half = CHARACTER_WIDTH * len(moment.words) / 2
        middle = min(at, WIDTH - half - 2)
        if middle - half > free_from:
            yield text(moment.words, middle, TOP - 13, "tick", "middle")
            free_from = middle + half + 4


def _legend_bar(kind: str) -> Element:
    bar = Element.of("rect", x=1, y=1, width=20, height=10, rx=2, class_=kind)
    return Element.of("svg", bar, viewBox="0 0 22 12", aria_hidden="true")
