"""Chooses the newest state that every rank can load, so that a restarted job with the same layout continues from it.

Candidates are windows in memory, persisted windows and the newest dense checkpoint. The result also contains the reason
why each candidate that was tried before the chosen one cannot be used.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.serde import JsonValue, decode

Where = Literal["own", "copy", "persisted"]
_NEARNESS: dict[str, int] = {"own": 0, "copy": 1, "persisted": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWindow:
    """Snapshot window of one rank in the memory of a node or on storage. Nodes list their windows in this form."""

    start_iteration: int
    generation: int
    """Index of the membership that captured the window. Windows of different memberships are never mixed."""
    num_slices: int
    num_held: int
    """Number of stored slices. A slice counts only if its hash is stored too."""
    where: Where
    node: int = -1
    """Node whose memory contains the window; -1 for storage."""
    committed: bool = False
    """Whether every rank's window with this ``key`` is replicated."""
    buffer: int | None = None
    """Index of the buffer that contains the window; None if the window is on storage or was listed by a peer."""
    buffer_bytes: int = 0
    """Size in bytes of the buffer that contains the window; 0 if it is unknown, as on storage."""

    @property
    def key(self) -> WindowKey:
        """Start iteration and generation, which identify the window on all ranks."""
        return WindowKey(start_iteration=self.start_iteration, generation=self.generation)

    @property
    def complete(self) -> bool:
        """Whether all slices of the window are stored."""
        return self.num_held == self.num_slices

    @property
    def last_iteration(self) -> int:
        """Iteration whose complete state a replay of the window restores."""
        return self.start_iteration + self.num_slices - 1

    @classmethod
    def from_json(cls, content: JsonValue) -> "StoredWindow":
        """Create the window from the result of ``dataclasses.asdict``. Raises ValueError for any other value."""
        # Inventories come from other nodes: every field is checked before it is used.
        names = {entry.name: entry.type for entry in fields(cls)}
        if not isinstance(content, dict) or content.keys() != names.keys() or content["where"] not in get_args(Where):
            constraint = f"must be an object with the keys {', '.join(names)} and with where=own, copy or persisted"
            raise ValueError(f"stored window {content!r:.100}: {constraint}")
        hints = {name: hint for name, hint in names.items() if name != "where"}
        return cls(where=content["where"], **{name: decode(hints[name], content[name], name) for name in hints})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySource:
    """State from which the job continues."""

    kind: Literal["memory", "persisted", "checkpoint", "nothing"]
    iteration: int
    """Iteration whose state the ranks have after the recovery; 0 for ``nothing``."""
    places: tuple[StoredWindow, ...] = ()
    """Window that each rank loads, by rank; empty for ``checkpoint`` and ``nothing``."""
    declined: tuple[str, ...] = ()
    """Reasons why other saved state is not used."""

    def validate(self) -> None:
        """Assert that all ranks load the same window, or no window if ``kind`` is not a window."""
        assert bool(self.places) == (self.kind in ("memory", "persisted")), (
            f"a source of kind {self.kind} cannot have {len(self.places)} windows"
        )
        assert len({place.key for place in self.places}) <= 1, "ranks load different windows"

    def summary(self) -> str:
        declined = f"; not used: {'; '.join(self.declined)}" if self.declined else ""
        return f"continue from {self.kind}, iteration {self.iteration}{declined}"

    @classmethod
    def choose(
        cls,
        windows_by_rank: Sequence[Sequence[StoredWindow]],
        checkpoint_iteration: int | None,
        *,
        reasons: Sequence[str] = (),
        unreachable: Collection[str] = (),
    ) -> "RecoverySource":
        """Choose the newest state that all ranks can load. If a checkpoint is as new as a window, the checkpoint is
        chosen, because it needs no replay.

        Args:
            windows_by_rank: stored windows of each rank.
            checkpoint_iteration: iteration of the newest valid dense checkpoint; None without one.
            reasons: reasons why other windows, which are not in ``windows_by_rank``, cannot be used.
            unreachable: why nodes have not listed their windows. The windows of these nodes may be missing.
        """
        declined = list(reasons)
        # If several generations captured a window of the same iteration, the newest generation comes first.
        candidates = sorted({window.key for windows in windows_by_rank for window in windows}, reverse=True)
        for key in candidates:
            start = key.start_iteration
            # Memory comes first: it contains the same bytes as storage and is faster to read.
            for kind in ("memory", "persisted"):
                places, reason = _places(windows_by_rank, key, kind)
                if places is None:
                    declined += ["; ".join([reason, *(unreachable if kind == "memory" else ())])] if reason else []
                    continue
                last = places[0].last_iteration
                # A checkpoint is dense already; a window would have to be replayed first.
                if checkpoint_iteration is not None and checkpoint_iteration >= last:
                    declined.append(f"{kind} window of iteration {start}: the checkpoint is at least as new")
                    continue
                return cls(kind=kind, iteration=last, places=places, declined=tuple(declined))
        if checkpoint_iteration is not None:
            return cls(kind="checkpoint", iteration=checkpoint_iteration, declined=tuple(declined))
        return cls(kind="nothing", iteration=0, declined=tuple(declined))


def _places(
    windows_by_rank: Sequence[Sequence[StoredWindow]], key: WindowKey, kind: str
) -> tuple[tuple[StoredWindow, ...] | None, str]:
    # Returns the stored window of each rank, or None and the reason if a rank has no such window.
    found, missing = [], []
    for rank, windows in enumerate(windows_by_rank):
        same = [window for window in windows if window.key == key and window.complete]
        # A peer may still have the rank's window if the rank's own node has lost it.
        usable = [window for window in same if (window.where == "persisted") == (kind == "persisted")]
        if usable:
            found.append(min(usable, key=lambda window: (_NEARNESS[window.where], window.node)))
        else:
            missing.append(rank)
    if not found:
        return None, ""
    if missing:
        return None, f"{kind} window of iteration {key.start_iteration}: no complete window of rank {missing[0]}"
    return tuple(found), ""
