"""State that a restarted job of the same layout continues from: the newest one that is available to every rank.

Candidates are windows in memory, persisted windows and the newest dense checkpoint; the one with most iterations is
chosen, and a reason is given for every other one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Where = Literal["own", "copy", "persisted"]
_NEARNESS: dict[str, int] = {"own": 0, "copy": 1, "persisted": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWindow:
    """A stored window of one rank."""

    start_iteration: int
    num_slices: int
    generation: int
    """Membership that captured it; windows of different generations are never mixed."""
    where: Where
    node: int = -1
    """Node whose memory holds it; -1 for storage."""
    complete: bool = True
    """Whether it has all its slices."""
    buffer: int | None = None
    """Buffer of the rank's own memory that holds it; None elsewhere."""

    @property
    def identity(self) -> tuple[int, int]:
        """(start iteration, generation), the same on all ranks."""
        return self.start_iteration, self.generation

    @property
    def last_iteration(self) -> int:
        """Iteration of the dense state."""
        return self.start_iteration + self.num_slices - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySource:
    """State that the job continues from."""

    kind: Literal["memory", "persisted", "checkpoint", "nothing"]
    iteration: int
    """Iteration of the dense state; 0 for ``nothing``."""
    places: tuple[StoredWindow, ...] = ()
    """Window of each rank; empty for ``checkpoint`` and ``nothing``."""
    declined: tuple[str, ...] = ()
    """Reasons why other candidates are not used."""

    def validate(self) -> None:
        """Assert that ranks have one and the same window where the kind is a window."""
        assert bool(self.places) == (self.kind in ("memory", "persisted")), (
            f"{self.kind} with {len(self.places)} places"
        )
        assert len({place.identity for place in self.places}) <= 1, "ranks take different windows"

    def summary(self) -> str:
        declined = f"; not used: {'; '.join(self.declined)}" if self.declined else ""
        return f"continue from {self.kind}, iteration {self.iteration}{declined}"


def choose_source(
    windows_by_rank: Sequence[Sequence[StoredWindow]],
    checkpoint_iteration: int | None,
    *,
    reasons: Sequence[str] = (),
) -> RecoverySource:
    """Choose the newest state that is available to all ranks; of equals a checkpoint, which needs no replay.

    Args:
        windows_by_rank: stored windows of each rank.
        checkpoint_iteration: iteration of the newest valid dense checkpoint; None without one.
        reasons: reasons why windows that are not listed cannot be used.
    """
    declined = list(reasons)
    candidates = sorted({window.identity for windows in windows_by_rank for window in windows}, reverse=True)
    for identity in candidates:
        start = identity[0]
        for kind in ("memory", "persisted"):
            places, reason = _places(windows_by_rank, identity, kind)
            if places is None:
                declined += [reason] if reason else []
                continue
            last = places[0].last_iteration
            if checkpoint_iteration is not None and checkpoint_iteration >= last:
                declined.append(f"{kind} window of iteration {start}: the checkpoint is as new")
                continue
            return RecoverySource(kind=kind, iteration=last, places=places, declined=tuple(declined))
    if checkpoint_iteration is not None:
        return RecoverySource(kind="checkpoint", iteration=checkpoint_iteration, declined=tuple(declined))
    return RecoverySource(kind="nothing", iteration=0, declined=tuple(declined))


def _places(
    windows_by_rank: Sequence[Sequence[StoredWindow]], identity: tuple[int, int], kind: str
) -> tuple[tuple[StoredWindow, ...] | None, str]:
    """Stored window of each rank; None and a reason if a rank has none."""
    found, missing = [], []
    for rank, windows in enumerate(windows_by_rank):
        same = [window for window in windows if window.identity == identity and window.complete]
        usable = [window for window in same if (window.where == "persisted") == (kind == "persisted")]
        if usable:
            found.append(min(usable, key=lambda window: (_NEARNESS[window.where], window.node)))
        else:
            missing.append(rank)
    if not found:
        return None, ""
    if missing:
        return None, f"{kind} window of iteration {identity[0]}: incomplete, rank {missing[0]} lacks it"
    return tuple(found), ""
