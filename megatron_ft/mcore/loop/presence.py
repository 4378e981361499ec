"""What ranks tell each other as they join in a membership, and what they find in it. Pure."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.loop.carrying import Carried
from megatron_ft.mcore.loop.placing import PlacementState


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What a rank that has state says of it."""

    rank: int
    """In the membership that the state was taken in."""
    placement: str
    """Digest of the placement that its state goes with."""
    evacuated: str | None
    """Digest of the one that took over for the ranks that stay; None where this rank has not come through that."""

    @classmethod
    def of(cls, carried: Carried) -> "Presence":
        """Of a rank that carries ``carried``."""
        evacuated = None if carried.evacuated is None else digest_of(carried.evacuated)
        return cls(rank=carried.rank, placement=digest_of(carried.common.placement), evacuated=evacuated)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def digest_of(placement: PlacementState | None) -> str:
    """Hexadecimal SHA-256 of a placement's JSON."""
    content = None if placement is None else placement.to_json()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_evacuated(present: Sequence[Presence | None], generation: int) -> bool:
    """Whether all that have state go on from the placement that took over for them; the same answer on every rank.

    Args:
        present: what each rank of membership ``generation`` has said; None of newcomers.

    Raises:
        RecoveryError: nobody has state, or the placements to go on from differ.
    """
    known = {rank: presence for rank, presence in enumerate(present) if presence is not None}
    if not known:
        raise RecoveryError(f"generation {generation} has no rank with state: all that had any are lost")
    evacuated = all(presence.evacuated is not None for presence in known.values())
    chosen = {rank: presence.evacuated if evacuated else presence.placement for rank, presence in known.items()}
    if len(set(chosen.values())) > 1:
        digests = ", ".join(f"rank {rank} from {str(digest)[:12]}" for rank, digest in chosen.items())
        raise RecoveryError(f"generation {generation}: all ranks must go on from the same placement: {digests}")
    return evacuated
