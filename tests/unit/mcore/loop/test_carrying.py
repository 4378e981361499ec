"""What a rank carries out of a membership that broke, and what ranks make of it together."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.target import Target

TARGET = Target(iteration=4, vote=None)


class Plan:
    """As much of a placement plan as is carried."""

    def __init__(self, name: str) -> None:
        self.name = name

    def to_json(self) -> str:
        return self.name


def trainer_at(monkeypatch: pytest.MonkeyPatch, *, moved: bool, rank: int = 0) -> Any:
    """A rank in an evacuation before iteration 5: one that is still moving experts, or one that has ``moved``."""
    from megatron_ft.mcore.loop import carrying
    from megatron_ft.mcore.loop.migration import Former

    monkeypatch.setattr(carrying, "settle", lambda engine, target: None)
    monkeypatch.setattr(carrying, "take_state", lambda *_: {"router": "new"})
    monkeypatch.setattr(carrying, "capture_extras", lambda engine: {"iteration": 4})
    former = Former(
        before_iteration=5, plans=[Plan("old")], state={"expert": "old"}, is_moving=not moved, is_evacuation=True
    )
    return SimpleNamespace(
        beginning=None,
        former=former,
        placement=SimpleNamespace(plans=[Plan("new" if moved else "old")], loads=None),
        engine=SimpleNamespace(
            iteration=4, is_built=True, model_chunks=None, optimizer=None, newest_vote=None, batch=None
        ),
        snapshots=None,
        context=SimpleNamespace(rank=rank),
        rounded_off=4,
        checkpoints=SimpleNamespace(pending_iteration=None),
    )


def test_a_rank_that_still_moves_experts_is_not_evacuated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another has come through: both go on from the placement before."""
    from megatron_ft.mcore.loop.carrying import carry
    from megatron_ft.mcore.loop.presence import Presence, is_evacuated

    through = carry(trainer_at(monkeypatch, moved=True), TARGET)
    moving = carry(trainer_at(monkeypatch, moved=False, rank=1), TARGET)
    assert through is not None and moving is not None
    assert through.evacuated is not None and through.evacuated.plans[0].to_json() == "new"
    assert moving.evacuated is None
    for present in ([through, moving], [None, moving, through]):
        found = [None if carried is None else Presence.of(carried) for carried in present]
        assert is_evacuated(found, generation=2) is False
    assert [carried.common.placement.plans[0].to_json() for carried in (through, moving)] == ["old", "old"]
    assert is_evacuated([Presence.of(through), None, Presence.of(through)], generation=2) is True


def test_what_a_membership_has_left_behind_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has committed nothing: nor is the placement that had taken over in it gone back from later."""
    from megatron_ft.mcore.loop.carrying import Beginning, carry

    trainer = trainer_at(monkeypatch, moved=False)
    before = carry(trainer_at(monkeypatch, moved=True), TARGET)
    trainer.beginning = Beginning(iteration=4, carried=before)
    assert carry(trainer, TARGET) is before
    assert trainer.former is None


@pytest.mark.parametrize("evacuated", [(None, None), ("c", "d")])
def test_different_placements_are_refused(evacuated: tuple[str | None, str | None]) -> None:
    from megatron_ft.mcore.loop.presence import Presence, is_evacuated

    placements = ("a", "a") if evacuated[0] else ("a", "b")
    pairs = zip(placements, evacuated, strict=True)
    present = [Presence(rank=3, placement=placement, evacuated=moved) for placement, moved in pairs]
    with pytest.raises(RecoveryError, match="generation 7: all ranks must go on from the same placement: rank 0 from"):
        is_evacuated([present[0], None, present[1]], generation=7)


def test_nobody_with_state_is_named() -> None:
    from megatron_ft.mcore.loop.presence import is_evacuated

    with pytest.raises(RecoveryError, match="generation 7 has no rank with state"):
        is_evacuated([None, None], generation=7)
