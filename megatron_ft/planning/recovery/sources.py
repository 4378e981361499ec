"""State from which a restarted job of the same layout continues: the newest that is available to every rank.

Candidates are windows in memory, persisted windows and the newest dense checkpoint. The candidate with most iterations
is chosen, and a reason is given for every other one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.strict_json import JsonValue, decode

Where = Literal["own", "copy", "persisted"]
_NEARNESS: dict[str, int] = {"own": 0, "copy": 1, "persisted": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWindow:
    """A window of one rank in a node's memory or on storage; an entry of inventories."""

    start_iteration: int
    generation: int
    """Membership that captured it; windows of different generations are never mixed."""
    num_slices: int
    num_held: int
    """Slices that are stored, with their hashes."""
    where: Where
    node: int = -1
    """Node whose memory holds it; -1 for storage."""
    committed: bool = False
    """Whether all ranks have replicated it."""
    buffer: int | None = None
    """Buffer of the window in the rank's own memory or in the memory for its copies; None elsewhere."""

    @property
    def key(self) -> WindowKey:
        """Identity of the window, the same on all ranks."""
        return WindowKey(start_iteration=self.start_iteration, generation=self.generation)

    @property
    def complete(self) -> bool:
        """Whether all of its slices are stored."""
        return self.num_held == self.num_slices

    @property
    def last_iteration(self) -> int:
        """Iteration of the dense state."""
        return self.start_iteration + self.num_slices - 1

    @classmethod
    def from_json(cls, content: JsonValue) -> "StoredWindow":
        """Read the values of ``dataclasses.asdict``. Raises ValueError for anything else."""
        # Inventories come from other nodes: every field is checked before it is used.
        names = {entry.name: entry.type for entry in fields(cls)}
        if not isinstance(content, dict) or content.keys() != names.keys() or content["where"] not in get_args(Where):
            raise ValueError(f"{content!r:.100}: must be an object of {', '.join(names)}")
        hints = {name: hint for name, hint in names.items() if name != "where"}
        return cls(where=content["where"], **{name: decode(hints[name], content[name], name) for name in hints})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySource:
    """State from which the job continues."""

    kind: Literal["memory", "persisted", "checkpoint", "nothing"]
    iteration: int
    """Iteration of the dense state; 0 for ``nothing``."""
    places: tuple[StoredWindow, ...] = ()
    """Window of each rank; empty for ``checkpoint`` and ``nothing``."""
    declined: tuple[str, ...] = ()
    """Reasons why other candidates are not used."""

    def validate(self) -> None:
        """Assert that, if the kind is a window, all ranks have the same one."""
        assert bool(self.places) == (self.kind in ("memory", "persisted")), (
            f"{self.kind} with {len(self.places)} places"
        )
        assert len({place.key for place in self.places}) <= 1, "ranks load different windows"

    def summary(self) -> str:
        declined = f"; not used: {'; '.join(self.declined)}" if self.declined else ""
        return f"continue from {self.kind}, iteration {self.iteration}{declined}"


def choose_source(
    windows_by_rank: Sequence[Sequence[StoredWindow]],
    checkpoint_iteration: int | None,
    *,
    reasons: Sequence[str] = (),
) -> RecoverySource:
    """Choose the newest state that is available to all ranks; if a checkpoint is as new as a window, it is chosen,
    because it needs no replay.

    Args:
        windows_by_rank: stored windows of each rank.
        checkpoint_iteration: iteration of the newest valid dense checkpoint; None without one.
        reasons: reasons why windows that are not listed cannot be used.
    """
    declined = list(reasons)
    # Of captures of the same iteration the one of the newest generation comes first; generations are never mixed.
    candidates = sorted({window.key for windows in windows_by_rank for window in windows}, reverse=True)
    for key in candidates:
        start = key.start_iteration
        # Memory first: it has the same bytes and is read without waiting for storage.
        for kind in ("memory", "persisted"):
            places, reason = _places(windows_by_rank, key, kind)
            if places is None:
                declined += [reason] if reason else []
                continue
            last = places[0].last_iteration
            # A checkpoint is dense already; a window would have to be replayed first.
            if checkpoint_iteration is not None and checkpoint_iteration >= last:
                declined.append(f"{kind} window of iteration {start}: the checkpoint is at least as new")
                continue
            return RecoverySource(kind=kind, iteration=last, places=places, declined=tuple(declined))
    if checkpoint_iteration is not None:
        return RecoverySource(kind="checkpoint", iteration=checkpoint_iteration, declined=tuple(declined))
    return RecoverySource(kind="nothing", iteration=0, declined=tuple(declined))


def _places(
    windows_by_rank: Sequence[Sequence[StoredWindow]], key: WindowKey, kind: str
) -> tuple[tuple[StoredWindow, ...] | None, str]:
    # Stored window of each rank; None and a reason if a rank has none.
    found, missing = [], []
    for rank, windows in enumerate(windows_by_rank):
        same = [window for window in windows if window.key == key and window.complete]
        # Peers may still have a part that this rank's own node has lost.
        usable = [window for window in same if (window.where == "persisted") == (kind == "persisted")]
        if usable:
            found.append(min(usable, key=lambda window: (_NEARNESS[window.where], window.node)))
        else:
            missing.append(rank)
    if not found:
        return None, ""
    if missing:
        return None, f"{kind} window of iteration {key.start_iteration}: incomplete, missing on rank {missing[0]}"
    return tuple(found), ""
