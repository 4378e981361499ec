"""What a job that starts at the same logical layout continues from: the newest state that every rank can have.

A window in memory, a persisted window or a dense checkpoint: the one that contains most iterations. What is not used
says why (rungs 3 and 4 of the ladder).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.strict_json import JsonValue, decode

Where = Literal["own", "copy", "persisted"]
_NEARNESS: dict[str, int] = {"own": 0, "copy": 1, "persisted": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWindow:
    """A window of one rank in a node's memory or on storage; an entry of inventories."""

    start_iteration: int
    generation: int
    """Membership that captured it."""
    num_slices: int
    num_held: int
    """Slices of it that are there, with their hashes."""
    where: Where
    node: int = -1
    """Node whose memory holds it; -1 for storage."""
    committed: bool = False
    """Whether the whole job has replicated it."""
    buffer: int | None = None
    """Buffer that holds it, of the rank's own memory, or of the memory for its copies; None elsewhere."""

    @property
    def key(self) -> WindowKey:
        """What ranks have in common of one window."""
        return WindowKey(start_iteration=self.start_iteration, generation=self.generation)

    @property
    def complete(self) -> bool:
        """Whether all of its slices are there."""
        return self.num_held == self.num_slices

    @property
    def last_iteration(self) -> int:
        """Last iteration that the state contains once it is dense."""
        return self.start_iteration + self.num_slices - 1

    @classmethod
    def from_json(cls, content: JsonValue) -> "StoredWindow":
        """Inverse of ``dataclasses.asdict``. Raises ValueError for anything else."""
        names = {entry.name: entry.type for entry in fields(cls)}
        if not isinstance(content, dict) or content.keys() != names.keys() or content["where"] not in get_args(Where):
            raise ValueError(f"{content!r:.100}: must be an object of {', '.join(names)}")
        hints = {name: hint for name, hint in names.items() if name != "where"}
        return cls(where=content["where"], **{name: decode(hints[name], content[name], name) for name in hints})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySource:
    """Where the job continues.

    ``places`` holds, for each rank, who gives it its window; empty for a checkpoint and for nothing.
    """

    kind: Literal["memory", "persisted", "checkpoint", "nothing"]
    iteration: int
    """Last iteration that the state contains once it is dense; 0 for nothing."""
    places: tuple[StoredWindow, ...] = ()
    declined: tuple[str, ...] = ()

    def validate(self) -> None:
        """Assert that a window is one window, and that ranks have it where the kind says."""
        assert bool(self.places) == (self.kind in ("memory", "persisted")), (
            f"{self.kind} with {len(self.places)} places"
        )
        assert len({place.key for place in self.places}) <= 1, "ranks take different windows"

    def summary(self) -> str:
        """One log line."""
        declined = f"; not used: {'; '.join(self.declined)}" if self.declined else ""
        return f"continue from {self.kind}, iteration {self.iteration}{declined}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        places = [asdict(place) for place in self.places]
        return {"kind": self.kind, "iteration": self.iteration, "places": places, "declined": list(self.declined)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "RecoverySource":
        """Inverse of ``to_json``."""
        places = tuple(StoredWindow.from_json(place) for place in content["places"])
        return cls(
            kind=content["kind"],
            iteration=content["iteration"],
            places=places,
            declined=tuple(content["declined"]),
        )


def choose_source(
    windows_by_rank: Sequence[Sequence[StoredWindow]],
    checkpoint_iteration: int | None,
    *,
    reasons: Sequence[str] = (),
) -> RecoverySource:
    """The newest state that all ranks can have; a checkpoint where it is as new, for it needs no replay.

    Args:
        windows_by_rank: what is held for each rank, wherever it is.
        checkpoint_iteration: that of the newest dense checkpoint that verifies; None without one.
        reasons: why windows that are not listed any more were not used, to be told.
    """
    declined = list(reasons)
    candidates = sorted({window.key for windows in windows_by_rank for window in windows}, reverse=True)
    for key in candidates:
        start = key.start_iteration
        for kind in ("memory", "persisted"):
            places, reason = _places(windows_by_rank, key, kind)
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
    windows_by_rank: Sequence[Sequence[StoredWindow]], key: WindowKey, kind: str
) -> tuple[tuple[StoredWindow, ...] | None, str]:
    """Who gives each rank that window; None and a reason where somebody lacks it."""
    found, missing = [], []
    for rank, windows in enumerate(windows_by_rank):
        same = [window for window in windows if window.key == key and window.complete]
        usable = [window for window in same if (window.where == "persisted") == (kind == "persisted")]
        if usable:
            found.append(min(usable, key=lambda window: (_NEARNESS[window.where], window.node)))
        else:
            missing.append(rank)
    if not found:
        return None, ""
    if missing:
        return None, f"{kind} window of iteration {key.start_iteration}: incomplete, rank {missing[0]} lacks it"
    return tuple(found), ""
