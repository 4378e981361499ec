"""Tests the state that a rank keeps after a failed membership, and the choice that ranks make from it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.job import ParallelConfig
from megatron_ft.errors import RecoveryError
from megatron_ft.planning.recovery.membership import Target

TARGET = Target(iteration=4, vote=None)


class Plan:
    """Replacement for a placement plan."""

    def __init__(self, name: str) -> None:
        self.name = name

    def to_json(self) -> str:
        return self.name


def train_state(seen: str) -> Any:
    """Return the state after iteration 4, with generators that show when it was captured."""
    from megatron_ft.mcore.state.train_state import TrainState
    from megatron_ft.planning.iteration import History

    return TrainState(iteration=4, rng={"seen": seen}, buffers={}, grad_scalers=(), group_steps=(), history=History())


def trainer_at(monkeypatch: pytest.MonkeyPatch, *, moved: bool, rank: int = 0, generation: int = 1) -> Any:
    """Return a rank in an evacuation before iteration 5. Its experts are still moving, or ``moved``."""
    from megatron_ft.mcore.moe.placement_manager import PreviousPlacement
    from megatron_ft.mcore.recovery import replicas as module

    monkeypatch.setattr(module, "resolve_iteration", lambda engine, target: None)
    monkeypatch.setattr(module, "held_state", lambda *_: {"router": "new"})
    former = PreviousPlacement(
        before_iteration=5,
        plans=[Plan("old")],
        state={"expert": "old"},
        host=None if moved else train_state("before"),
        is_evacuation=True,
    )
    trainer = object.__new__(module.ElasticTrainer)
    vars(trainer).update(
        membership_start=None,
        previous_placement=former,
        config=SimpleNamespace(
            parallel=ParallelConfig(use_distributed_optimizer=False), recovery=SimpleNamespace(keep_layout=False)
        ),
        placement=SimpleNamespace(plans=[Plan("new" if moved else "old")], loads=None),
        engine=SimpleNamespace(
            iteration=4,
            is_built=moved,
            state_copies=None,
            model_chunks=None,
            optimizer=None,
            newest_vote=None,
            batch=None,
            train_state=lambda: train_state("now"),
        ),
        snapshots=None,
        nodes=(0, 1, 2),
        context=SimpleNamespace(rank=rank, generation=generation, world_size=3, members=(0, 1, 2)),
        rounded_off=4,
    )
    return trainer


def test_a_rank_that_still_moves_experts_is_not_evacuated(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has completed the evacuation and another has not, so both continue from the placement before it."""
    from megatron_ft.mcore.state.rank_status import RankStatus

    through = trainer_at(monkeypatch, moved=True).carry(TARGET)
    moving = trainer_at(monkeypatch, moved=False, rank=1).carry(TARGET)
    assert through is not None and moving is not None
    names = [[held.placement.plans[0].to_json() for held in carried.holdings] for carried in (through, moving)]
    assert names == [["old", "new"], ["old"]]
    for present in ([through, moving], [None, moving, through]):
        found = [RankStatus.of(() if carried is None else carried.holdings) for carried in present]
        assert choose(found)[0] == (1, False)
    both = [RankStatus.of(through.holdings), RankStatus(), RankStatus.of(through.holdings)]
    assert choose(both) == ((1, True), (0, None, 0))
    assert (moving.host.rng, through.host.rng) == ({"seen": "before"}, {"seen": "now"})


def test_a_rank_that_replaces_experts_continues_from_the_earlier_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have come to different steps, so each of them names the experts that it has."""
    from megatron_ft.mcore.moe.placement_manager import PreviousPlacement

    for is_adopted in (False, True):
        trainer = trainer_at(monkeypatch, moved=True)
        trainer.previous_placement = PreviousPlacement(
            before_iteration=5, plans=[Plan("old")], state={}, is_in_place=True
        )
        trainer.placement.plans = [Plan("new" if is_adopted else "old")]
        carried = trainer.carry(TARGET)
        assert carried is not None and carried.has_moved
        assert [held.placement.plans[0].to_json() for held in carried.holdings] == ["old"]
        assert carried.state == {"router": "new"}
    committed = trainer_at(monkeypatch, moved=True)
    committed.previous_placement = None
    assert not committed.carry(TARGET).has_moved


def test_a_membership_that_did_not_form_here_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The placement that was introduced in that membership is not used later either."""
    from megatron_ft.mcore.state.carried import MembershipStart

    trainer = trainer_at(monkeypatch, moved=False)
    before = trainer_at(monkeypatch, moved=True).carry(TARGET)
    trainer.membership_start = MembershipStart(iteration=4, carried=before)
    assert trainer.carry(TARGET) is before
    assert trainer.previous_placement is None


def test_a_membership_that_formed_counts_beside_what_was_carried_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joining rank has only a holding of this membership."""
    from megatron_ft.mcore.state.carried import MembershipStart

    before = trainer_at(monkeypatch, moved=True).carry(TARGET)
    assert before is not None
    before.state = {"gone": "old"}
    for carried, generations in ((before, [1, 1, 2]), (None, [2])):
        trainer = trainer_at(monkeypatch, moved=True, generation=2)
        trainer.previous_placement = None
        trainer.membership_start = MembershipStart(iteration=4, carried=carried, changes=("join(...)",), is_formed=True)
        found = trainer.carry(TARGET)
        assert found is not None and [held.generation for held in found.holdings] == generations
        assert found.holdings[-1].changes == ("join(...)",)
        assert found.state == {**({} if carried is None else {"gone": "old"}), "router": "new"}


# -- what ranks continue from ------------------------------------------------------------------------------------


def presence(*holdings: tuple[int, int], spared: Sequence[int] = ()) -> Any:
    """Return the status of a rank with holdings, each given by generation and rank. It was a hot spare in the
    generations ``spared``."""
    from megatron_ft.mcore.state.rank_status import RankStatus

    rows = tuple(((generation, False), rank, 0, f"p{generation}") for generation, rank in holdings)
    output = RankStatus(holdings=rows, spared=tuple(spared))
    assert RankStatus.from_json(output.to_json()) == output
    return output


def choose(present: list[Any], *, nodes: list[int] | None = None, lost: tuple[int, ...] = ()) -> Any:
    """Return the chosen holding if the placements of the generations ``lost`` lack experts."""
    from megatron_ft.mcore.state.rank_status import choose_holding

    numbers = list(range(len(present))) if nodes is None else nodes
    return choose_holding(present, numbers, 7, is_whole=lambda key, _: key[0] not in lost)


def test_the_newest_membership_that_all_had_formed_is_gone_on_from() -> None:
    stayer, newcomer = presence((3, 1), (4, 0)), presence((4, 2))
    assert choose([stayer, newcomer, presence()]) == ((4, False), (0, 2, None))


def test_where_some_had_not_formed_all_go_back_to_what_they_carried() -> None:
    formed, not_formed, newcomer = presence((3, 1), (4, 0)), presence((3, 2)), presence((4, 2))
    assert choose([formed, not_formed]) == ((3, False), (1, 2))
    assert choose([formed, not_formed, newcomer]) == ((3, False), (1, 2, None))


def test_a_placement_by_which_experts_are_lost_is_passed_over() -> None:
    formed, not_formed, newcomer = presence((3, 1), (4, 0)), presence((3, 2)), presence((4, 2))
    assert choose([formed, not_formed, newcomer], lost=(3,)) == ((4, False), (0, None, 2))
    assert choose([formed, formed], lost=(4,)) == ((3, False), (1, 1))
    assert choose([formed, newcomer], lost=(3, 4)) == ((4, False), (0, 2)), "the first of those is named"


def test_a_node_takes_part_with_all_its_ranks_or_none() -> None:
    formed, newcomer = presence((3, 1), (4, 0)), presence((4, 2))
    assert choose([formed, formed, newcomer, presence()], nodes=[0, 0, 1, 1]) == ((4, False), (0, 0, None, None))
    with pytest.raises(
        RecoveryError, match="generation 7 cannot be formed: it needs a node whose ranks all have the same state"
    ):
        choose([newcomer, presence()], nodes=[1, 1])


def test_a_hot_spare_does_not_hide_the_state_of_its_node() -> None:
    """A node with a hot spare of generation 4 keeps its state of it; a rank that was not a spare then must have it."""
    formed = presence((4, 0))
    assert choose([formed, presence(spared=[4])], nodes=[1, 1]) == ((4, False), (0, None))
    with pytest.raises(RecoveryError, match="it needs a node whose ranks all have the same state"):
        choose([formed, presence(spared=[3])], nodes=[1, 1])


def test_different_placements_are_refused() -> None:
    from megatron_ft.mcore.state.rank_status import RankStatus

    one, other = (RankStatus(holdings=(((3, False), 3, 0, digest),)) for digest in ("a", "b"))
    with pytest.raises(
        RecoveryError, match="generation 7: all ranks must have the same placement.*: rank 0 a, rank 2 b;"
    ):
        choose([one, presence(), other])


def test_nobody_with_state_is_named() -> None:
    with pytest.raises(RecoveryError, match="generation 7: all ranks that had state are lost"):
        choose([presence(), presence()])
