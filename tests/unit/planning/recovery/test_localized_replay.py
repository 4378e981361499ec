"""Tests which stages replay, which stages send them tensors, and when localized recovery is impossible."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.localized_replay import LocalizedPlan, Standing, units_of
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.planning.state.declined import Declined
from megatron_ft.topology import Topology

WINDOW = WindowKey(start_iteration=4, generation=0)
TARGET = 9
LOGGED = tuple(range(5, 10))


def decide(
    stages_lost: set[int], num_stages: int, *, per_stage: int = 2, is_ring: bool = False, **changes: object
) -> LocalizedPlan | Declined:
    """Return the plan if the first rank of each lost stage has no state."""
    standings = [
        Standing(stage=stage, iteration=None)
        if stage in stages_lost and place == 0
        else Standing(
            **{"stage": stage, "iteration": TARGET, "window": WINDOW, "logged": LOGGED, "voted": LOGGED, **changes}
        )  # type: ignore[arg-type]
        for stage in range(num_stages)
        for place in range(per_stage)
    ]
    return LocalizedPlan.of(standings, num_stages=num_stages, is_ring=is_ring)


def planned(*arguments: object, **options: object) -> LocalizedPlan:
    found = decide(*arguments, **options)  # type: ignore[arg-type]
    assert isinstance(found, LocalizedPlan), found
    return found


@pytest.mark.parametrize(
    ("lost", "num_stages", "is_ring", "regions"),
    [
        ({0}, 1, False, ((0,),)),
        ({1}, 4, False, ((1,),)),
        ({1, 2}, 4, False, ((1, 2),)),
        ({0, 2}, 4, False, ((0,), (2,))),
        ({0, 3}, 4, False, ((0,), (3,))),
        ({0, 3}, 4, True, ((0, 3),)),
        ({0, 1}, 2, True, ((0, 1),)),
        (set(), 4, False, ()),
    ],
)
def test_regions(lost: set[int], num_stages: int, is_ring: bool, regions: tuple[tuple[int, ...], ...]) -> None:
    plan = planned(lost, num_stages, is_ring=is_ring)
    assert plan.regions == regions
    assert plan.iterations == range(5, 10)


def test_neighbours_serve_across_the_edges_only() -> None:
    plan = planned({1, 2}, 5)
    assert plan.serves(0) == (("forward", 1),)
    assert plan.serves(3) == (("backward", 2),)
    assert plan.serves(4) == plan.serves(1) == ()


def test_the_last_stage_serves_the_first_where_chunks_are_interleaved() -> None:
    assert planned({0}, 3, is_ring=True).serves(2) == (("forward", 0),)
    assert planned({0}, 3, is_ring=False).serves(2) == ()
    assert set(planned({1}, 2, is_ring=True).serves(0)) == {("forward", 1), ("backward", 1)}


def test_the_newest_window_that_anybody_knows_is_taken() -> None:
    newer = WindowKey(start_iteration=7, generation=2)
    standings = [
        Standing(stage=0, iteration=TARGET, voted=LOGGED, window=WINDOW, logged=LOGGED),
        Standing(stage=1, iteration=TARGET, voted=LOGGED, window=newer, logged=(8, 9)),
        Standing(stage=1, iteration=None),
    ]
    plan = LocalizedPlan.of(standings, num_stages=2, is_ring=False)
    assert isinstance(plan, LocalizedPlan) and plan.window == newer and plan.iterations == range(8, 10)


def test_declines_without_a_window() -> None:
    found = decide({1}, 2, window=None)
    assert isinstance(found, Declined) and "no window has been committed" in found.reason


def test_a_stage_whose_log_has_a_gap_beside_the_region_replays_too() -> None:
    standings = [
        Standing(stage=0, iteration=TARGET, voted=LOGGED, window=WINDOW, logged=LOGGED),
        Standing(stage=1, iteration=TARGET, voted=LOGGED, window=WINDOW, logged=(5, 6, 8, 9)),
        Standing(stage=2, iteration=None),
        Standing(stage=3, iteration=TARGET, voted=LOGGED, window=WINDOW, logged=LOGGED),
    ]
    plan = LocalizedPlan.of(standings, num_stages=4, is_ring=False)
    assert isinstance(plan, LocalizedPlan) and plan.regions == ((1, 2),)
    assert plan.reasons == ("stage 1: the upstream log of rank 1 lacks iterations [7], which an adjacent stage needs",)


def test_declines_where_no_rank_has_the_votes() -> None:
    found = decide({1}, 3, voted=(5, 6, 8, 9))
    assert isinstance(found, Declined) and "rank 0 has the most, but lacks the votes of iterations [7]" in found.reason


def test_declines_where_several_ranks_have_a_part_of_the_votes() -> None:
    """One rank sends the votes to all. Otherwise, missing votes would be noticed only after the model is built."""
    standings = [
        Standing(stage=0, iteration=TARGET, voted=(5, 6), window=WINDOW, logged=LOGGED),
        Standing(stage=1, iteration=None, voted=LOGGED),
        Standing(stage=1, iteration=TARGET, voted=(7, 8, 9), window=WINDOW, logged=LOGGED),
    ]
    found = LocalizedPlan.of(standings, num_stages=2, is_ring=False)
    assert (
        isinstance(found, Declined) and "rank 2 has the most, but lacks the votes of iterations 5 to 6" in found.reason
    )


def test_the_first_rank_with_all_votes_sends_them() -> None:
    standings = [
        Standing(stage=0, iteration=TARGET, voted=(8, 9), window=WINDOW, logged=LOGGED),
        Standing(stage=1, iteration=None),
        Standing(stage=1, iteration=TARGET, voted=LOGGED, window=WINDOW, logged=LOGGED),
        Standing(stage=0, iteration=TARGET, voted=LOGGED, window=WINDOW, logged=LOGGED),
    ]
    plan = LocalizedPlan.of(standings, num_stages=2, is_ring=False)
    assert isinstance(plan, LocalizedPlan) and plan.voter(standings) == 2


def test_a_stage_that_is_the_whole_job_needs_votes_and_no_log() -> None:
    assert isinstance(decide({0}, 1, logged=()), LocalizedPlan)


def test_a_gap_elsewhere_does_not_matter() -> None:
    standings = [
        Standing(
            stage=stage,
            iteration=None if stage == 3 else TARGET,
            window=WINDOW,
            logged=() if stage < 2 else LOGGED,
            voted=LOGGED,
        )
        for stage in range(4)
    ]
    assert isinstance(LocalizedPlan.of(standings, num_stages=4, is_ring=False), LocalizedPlan)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.data(), st.booleans())
def test_regions_are_the_connected_parts(num_stages: int, data: st.DataObject, is_ring: bool) -> None:
    lost = data.draw(st.sets(st.integers(0, num_stages - 1)))
    plan = planned(lost, num_stages, is_ring=is_ring)
    assert {stage for region in plan.regions for stage in region} == lost
    edges = {(stage, to) for stage in range(num_stages) for to in plan.neighbours(stage).values()}
    for one, other in itertools.combinations(sorted(lost), 2):
        beside = (one, other) in edges or (other, one) in edges
        assert not beside or plan.region_of(one) == plan.region_of(other)
    served = {to for stage in range(num_stages) for _, to in plan.serves(stage)}
    assert served == {to for stage, to in edges if to in lost and stage not in lost}


def with_peers(
    lost: set[int], topology: Topology, *, is_sharded: bool = False, **changes: dict[int, object]
) -> LocalizedPlan | Declined:
    """Return the plan if living ranks may send their state. ``changes`` has fields of standings, by rank."""
    needs = [units_of(rank, topology, plan=None, is_sharded=is_sharded) for rank in range(topology.world_size)]
    standings = [
        Standing(
            **{  # type: ignore[arg-type]
                "stage": topology.coordinates(rank).pp,
                "iteration": None if rank in lost else TARGET,
                "holds": () if rank in lost else needs[rank],
                "window": WINDOW,
                "logged": () if rank in lost else LOGGED,
                "voted": () if rank in lost else LOGGED,
                **{name: values[rank] for name, values in changes.items() if rank in values},
            }
        )
        for rank in range(topology.world_size)
    ]
    return LocalizedPlan.of(standings, num_stages=topology.pipeline_model_parallel_size, is_ring=False, needs=needs)


def served(*arguments: object, **options: object) -> LocalizedPlan:
    found = with_peers(*arguments, **options)  # type: ignore[arg-type]
    assert isinstance(found, LocalizedPlan), found
    return found


LANES = Topology(world_size=4, pipeline_model_parallel_size=2)
"""Two stages of two ranks, which have the same state."""
STAGES = Topology(world_size=8, pipeline_model_parallel_size=4)


def test_a_data_parallel_peer_sends_the_state() -> None:
    plan = served({1}, LANES)
    assert (plan.strategy, plan.receiving, plan.regions, plan.reasons) == ("living_state", (0,), (), ())
    assert plan.summary() == "stage 0 of PP2 receive the state after iteration 9"


def test_stages_receive_without_a_window() -> None:
    assert served({1, 2}, LANES, window=dict.fromkeys(range(4))).receiving == (0, 1)


def test_a_stage_without_a_living_rank_replays_beside_one_that_receives() -> None:
    plan = served({0, 1, 7}, STAGES)
    assert (plan.strategy, plan.receiving, plan.regions) == ("localized_replay", (3,), ((0,),))
    assert plan.reasons == (
        "living_state: stage 0: no living rank has the non-expert state of pipeline stage 0, tensor part 0 and 1 more",
    )


def test_a_stage_that_would_receive_replays_if_its_neighbour_needs_the_lost_log() -> None:
    plan = served({0, 1, 3}, STAGES)
    assert (plan.receiving, plan.regions) == ((), ((0, 1),))
    assert plan.reasons[1].startswith("stage 1: the upstream log of rank 3 lacks iterations 5 to 9")


def test_tensor_and_expert_parts_have_holders_of_their_own() -> None:
    parts = Topology(world_size=4, tensor_model_parallel_size=2)
    assert served({1}, parts).receiving == (0,)
    assert "tensor part 1" in served({1, 3}, parts).reasons[0]
    experts = Topology(world_size=4, expert_model_parallel_size=2)
    assert served({0, 1}, experts).receiving == (0,)
    assert "the experts of expert-parallel rank 1" in served({1, 3}, experts).reasons[0]


def test_a_shard_lives_on_its_rank_alone() -> None:
    assert served({1}, LANES, is_sharded=True).reasons == (
        "living_state: stage 0: no living rank has the optimizer shard of rank 1",
    )


def test_random_numbers_that_were_drawn_are_lost_with_a_rank() -> None:
    plan = served({1}, LANES, has_first_generators={0: False})
    assert plan.strategy == "localized_replay" and "rank 0 has drawn random numbers" in plan.reasons[0]
    assert served({1}, LANES, has_first_generators={2: False}).strategy == "living_state"


def test_overwritten_state_is_not_sent() -> None:
    assert served({1}, LANES, is_overwritten={0: True}).regions == ((0,),)


def test_why_neither_strategy_serves() -> None:
    found = with_peers({0, 1}, LANES, window=dict.fromkeys(range(4)))
    assert isinstance(found, Declined)
    assert found.reason.startswith("no window has been committed yet; living_state: stage 0: no living rank has")


def test_a_window_with_another_placement_is_not_replayed() -> None:
    moved = dict.fromkeys(range(4), WINDOW.start_iteration + 1)
    found = with_peers({0, 1}, LANES, placed_from=moved)
    why = f"experts moved after the newest committed window started (iteration {WINDOW.start_iteration}) and before"
    assert isinstance(found, Declined) and f"{why} iteration 5" in found.reason
    assert served({1}, LANES, placed_from=moved).placed_from == 5
    assert served({0, 1}, LANES, placed_from={2: WINDOW.start_iteration}).regions == ((0,),)


def test_replicas_are_units_of_their_own() -> None:
    plan = PlacementPlan(
        num_experts=3,
        num_slots_per_rank=2,
        ranks=(0, 1),
        domains=("a", "b"),
        layer_numbers=(1,),
        slots=(((0, 1), (1, 2)),),
        algorithm="",
    )
    pair = Topology(world_size=2)
    first, second = (units_of(rank, pair, plan=plan, is_sharded=True) for rank in (0, 1))
    assert set(first) & set(second) == {
        "the non-expert state of pipeline stage 0, tensor part 0",
        "expert 1 of layer 1",
    }
    assert set(second) - set(first) == {"expert 2 of layer 1", "the optimizer shard of rank 1"}


def test_ranks_that_replayed_or_joined_lack_copies() -> None:
    plan = served({0, 1, 7}, STAGES)
    plans = ["a", "a", "a", "a", "b", "b", "b", None]
    standings = [Standing(stage=rank // 2, iteration=TARGET, copy_plan=found) for rank, found in enumerate(plans)]
    assert [plan.lacks_copies(stage, standings) for stage in range(4)] == [True, False, False, True]


def test_ranks_whose_copies_follow_different_plans_make_them_again() -> None:
    """A recovery was interrupted after rank 3 had made copies by a new plan, and before rank 2 had."""
    plan = served({0, 1, 7}, STAGES)
    standings = [Standing(stage=rank // 2, iteration=TARGET, copy_plan="b" if rank == 3 else "a") for rank in range(8)]
    assert plan.lacks_copies(1, standings) and not plan.lacks_copies(2, standings)


@pytest.mark.parametrize("is_copied", [False, True])
def test_state_is_copied_before_a_replay_only_if_the_copies_contain_all_state(is_copied: bool) -> None:
    """The first replay is necessary for the generators of rank 1; in the second one, rank 0 is overwritten already."""

    def may_copy(*standings: Standing) -> bool:
        plan = LocalizedPlan.of(standings, num_stages=1, is_ring=False, needs=[("a",), ("a", "b"), ("b",)])
        assert isinstance(plan, LocalizedPlan) and plan.regions == ((0,),), plan
        return plan.may_copy

    def rank(*holds: str, **changes: object) -> Standing:
        known = {"iteration": TARGET, "window": WINDOW, "logged": LOGGED, "voted": LOGGED, "holds": holds}
        return Standing(**{"stage": 0, **known, **changes})  # type: ignore[arg-type]

    lost = Standing(stage=0, iteration=None)
    assert may_copy(rank("a"), lost, rank("b", has_first_generators=False))
    assert not may_copy(rank("a", has_first_generators=False), lost, rank("a"))
    assert may_copy(rank("a", is_overwritten=True, is_copied=is_copied), lost, rank("b")) is is_copied
