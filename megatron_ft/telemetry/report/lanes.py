"""A rank's lane in the timeline of a recovery: where it stands, which process it was, what became of that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ft import events
from megatron_ft.telemetry.report.episodes import Episode
from megatron_ft.telemetry.times import instant

KINDS = {
    "trains": "trains",
    "unfinished": "iteration that was under way",
    "forms": "the membership forms",
    "starts": "processes start",
    "loads": "loads a checkpoint",
    "replays": "replays (computes again)",
    "serves": "serves its log",
    "waits": "waits with its state",
    "other": "other",
}
"""What a rank can be seen to do, and the words for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something a rank did for a while."""

    kind: str
    """One of ``KINDS``."""
    begin: float
    """Seconds after the failure."""
    end: float
    """Seconds after the failure."""
    label: str
    """Stands in the bar where there is room."""
    words: str
    """Said of it in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank, or a process that was one and is none any more."""

    rank: int | None
    """Its number after the recovery; None where it is gone."""
    previous: int | None
    """Its number before; None for a process that is new at a place that is new."""
    node: int | None
    stage: int | None
    """Its pipeline stage, where a record says it."""
    fate: str
    """What became of it, in words; empty where nothing did."""
    spans: tuple[Span, ...] = ()
    died_seconds: float | None = None
    """Seconds after the failure at which its process, or the one before at its place, ended."""
    work: events.StageRecovery | None = None
    """What it reported of itself."""

    @property
    def name(self) -> str:
        """``rank 3``; of one that is gone the number that it had."""
        return f"rank {self.previous if self.rank is None else self.rank}"


def places(episode: Episode, begin: float) -> list[Lane]:
    """A lane for each rank after the recovery, and for each one before that has no place any more; by stage and rank.

    Args:
        begin: the first failure, in seconds since 1970.
    """
    return _sorted(_places(episode, begin))


def _places(episode: Episode, begin: float) -> Iterator[Lane]:
    stages = {record.rank: record for record in episode.every(events.StageRecovery)}
    previous = _previous_ranks(episode)
    keeps = len(previous) == len(episode.before.nodes) and all(old in (None, new) for new, old in enumerate(previous))
    dead = _deaths(episode, begin)
    for rank, node in enumerate(episode.after.nodes):
        old = rank if keeps and rank < len(episode.before.nodes) else previous[rank]
        is_new = episode.is_restart or previous[rank] is None
        moved = f"was rank {old}" if old not in (None, rank) else ""
        work = stages.get(rank)
        yield Lane(
            rank=rank,
            previous=old,
            node=node,
            stage=None if work is None else work.stage,
            fate="new process" if is_new else moved,
            died_seconds=None if old is None else dead.get(old, 0.0 if is_new and not episode.is_restart else None),
            work=work,
        )
    if not keeps:
        taken = set(previous)
        for old, node in enumerate(episode.before.nodes):
            if old not in taken:
                yield _gone(episode, old, node, dead.get(old, 0.0))


def _gone(episode: Episode, old: int, node: int | None, died_seconds: float) -> Lane:
    has_left = episode.decision is not None and node in episode.decision.left_nodes
    fate = "left as asked" if has_left else "not started again" if episode.is_restart else "lost"
    died = None if has_left else died_seconds
    return Lane(rank=None, previous=old, node=node, stage=None, fate=fate, died_seconds=died)


def _previous_ranks(episode: Episode) -> tuple[int | None, ...]:
    """For each rank after the recovery its number before; by the decision, or by nodes where there is none."""
    num_ranks = len(episode.after.nodes)
    if episode.decision is not None and len(episode.decision.previous_ranks) == num_ranks > 0:
        return episode.decision.previous_ranks
    if episode.every(events.StageRecovery):
        failed = {record.rank for record in episode.every(events.RankFailed)}
        return tuple(None if rank in failed else rank for rank in range(num_ranks))
    if episode.is_restart or None in episode.before.nodes + episode.after.nodes:
        return tuple(rank if rank < len(episode.before.nodes) else None for rank in range(num_ranks))
    old = {place: rank for rank, place in enumerate(_local(episode.before.nodes))}
    return tuple(old.get(place) for place in _local(episode.after.nodes))


def _local(nodes: Sequence[int | None]) -> Iterator[tuple[int | None, int]]:
    """(node, number on the node) of each rank."""
    count: dict[int | None, int] = {}
    for node in nodes:
        count[node] = count.get(node, -1) + 1
        yield node, count[node]


def _deaths(episode: Episode, begin: float) -> dict[int, float]:
    """Rank before the recovery to the seconds after which it was gone."""
    dead: dict[int, float] = {}
    for record in episode.every(events.RankFailed):
        at = instant(record.time_unix_seconds)
        dead.setdefault(record.rank, 0.0 if at is None else max(0.0, at - begin))
    return dead


def _sorted(lanes: Iterator[Lane]) -> list[Lane]:
    def place(lane: Lane) -> tuple[bool, int, int]:
        number = lane.previous if lane.rank is None else lane.rank
        return lane.rank is None, -1 if lane.stage is None else lane.stage, number or 0

    return sorted(lanes, key=place)
