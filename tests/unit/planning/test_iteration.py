"""Tests the arithmetic of the vote, and the decision about the iteration."""

import dataclasses
import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import TrainingStopped
from megatron_ft.planning.iteration import BALLOT_FIELDS, Ballot, CommitPolicy, Decision, History, MemoryUse, Vote

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
EXACT = st.integers(0, 2**53)
BALLOTS = st.builds(
    Ballot,
    generation=EXACT,
    iteration=EXACT,
    found_inf=st.integers(0, 1),
    grad_norm=FLOATS,
    loss_scale=FLOATS,
    loss_sum=FLOATS,
    num_tokens=EXACT,
    aux_loss_sum=FLOATS,
    z_loss_sum=FLOATS,
    stop_requested=st.integers(0, 1),
    change_requested=st.integers(0, 1),
    replicated_windows=st.integers(0, 7),
    given_up_windows=st.integers(0, 7),
    has_free_buffer=st.integers(0, 1),
)
VOTES = st.builds(
    Vote,
    generation=EXACT,
    iteration=EXACT,
    found_inf=st.booleans(),
    grad_norm=FLOATS,
    clip_coefficient=FLOATS,
    loss_scale=FLOATS,
    loss=FLOATS,
    num_tokens=EXACT,
    aux_loss=FLOATS,
    z_loss=FLOATS,
    stop_requested=st.booleans(),
    change_requested=st.booleans(),
)


def bits(value: object) -> object:
    """Return the bits of a value. All NaN values count as equal."""
    if not isinstance(value, float):
        return (type(value), value)
    return "nan" if math.isnan(value) else struct.pack("<d", value)


def all_bits(plan: Any) -> list[object]:
    return [bits(value) for value in dataclasses.astuple(plan)]


def ballot(**values: Any) -> Ballot:
    known: dict[str, Any] = {
        "generation": 3,
        "iteration": 7,
        "found_inf": 0,
        "grad_norm": 2.0,
        "loss_scale": 1.0,
        "loss_sum": 30.0,
        "num_tokens": 10,
        "aux_loss_sum": 4.0,
        "z_loss_sum": 8.0,
    }
    return Ballot(**{**known, **values})


def settled(*ballots: Ballot, clip_grad: float = 1.0, num_moe_losses: int = 4) -> Vote:
    return Vote.of(ballots, clip_grad=clip_grad, num_moe_losses=num_moe_losses)


@given(mine=BALLOTS)
def test_a_ballots_row_holds_it_exactly(mine: Ballot) -> None:
    row = mine.to_row()
    assert len(row) == BALLOT_FIELDS
    assert all_bits(Ballot.from_row(struct.unpack(f"<{len(row)}d", struct.pack(f"<{len(row)}d", *row)))) == all_bits(
        mine
    )


@given(vote=VOTES)
def test_a_vote_survives_json(vote: Vote) -> None:
    assert all_bits(Vote.from_record(json.loads(json.dumps(vote.to_record())))) == all_bits(vote)


def test_tally_by_hand() -> None:
    """Ten tokens with loss 3, thirty with loss 5 and a rank without tokens give 4.5. Clipping halves the norm."""
    vote = settled(
        ballot(),
        ballot(loss_sum=150.0, num_tokens=30, aux_loss_sum=6.0, z_loss_sum=0.0),
        ballot(loss_sum=0.0, num_tokens=0, aux_loss_sum=0.0, z_loss_sum=0.0, stop_requested=1),
    )
    assert (vote.generation, vote.iteration) == (3, 7)
    assert (vote.loss, vote.num_tokens, vote.aux_loss, vote.z_loss) == (4.5, 40, 2.5, 2.0)
    assert vote.clip_coefficient == 1.0 / (2.0 + 1e-6)
    assert vote.stop_requested and not vote.found_inf


def test_a_vote_logged_by_an_earlier_version_is_read() -> None:
    vote = settled(ballot())
    assert Vote.from_record({**vote.to_record(), "committed_window": 5}) == vote
    with pytest.raises(TypeError, match="unheard_of"):
        Vote.from_record({**vote.to_record(), "unheard_of": 5})


def test_windows_in_the_vote() -> None:
    """A window is replicated if every rank has replicated it, and given up if any rank has given it up. A buffer must
    be free on all ranks."""
    vote = settled(
        ballot(replicated_windows=0b110, given_up_windows=0b001),
        ballot(replicated_windows=0b011, has_free_buffer=0),
        ballot(replicated_windows=0b111, given_up_windows=0b100),
    )
    assert (vote.replicated_windows, vote.given_up_windows, vote.has_free_buffer) == (0b010, 0b101, 0)
    idle = settled(ballot(), ballot())
    assert (idle.replicated_windows, idle.given_up_windows, idle.has_free_buffer) == (0, 0, 1)


def test_an_overflow_or_request_of_one_rank_counts_for_all() -> None:
    assert settled(ballot(), ballot(found_inf=1)).found_inf
    assert not settled(ballot(), ballot()).stop_requested
    assert settled(ballot(stop_requested=1), ballot()).stop_requested
    assert not settled(ballot(stop_requested=1), ballot()).change_requested
    assert settled(ballot(), ballot(change_requested=1)).change_requested


def test_votes_of_before_memberships_could_change_are_read() -> None:
    vote = settled(ballot(), ballot())
    record = {name: value for name, value in vote.to_record().items() if name != "change_requested"}
    assert Vote.from_record(record) == vote


def test_tally_without_mixtures_or_tokens() -> None:
    vote = settled(ballot(num_tokens=0), clip_grad=0.0, num_moe_losses=0)
    assert (vote.aux_loss, vote.z_loss, vote.clip_coefficient) == (0.0, 0.0, 1.0)
    assert math.isnan(vote.loss)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation", 4),
        ("iteration", 8),
        ("grad_norm", math.nextafter(2.0, 3.0)),
        ("grad_norm", math.nan),
        ("loss_scale", 2.0),
    ],
)
def test_ranks_that_disagree_are_named(name: str, value: float) -> None:
    with pytest.raises(
        TrainingStopped, match=rf"{name} must be the same on every rank, but is .* on rank 0 and .* on rank 2"
    ):
        settled(ballot(), ballot(), ballot(**{name: value}))


def test_what_may_differ_between_ranks() -> None:
    settled(ballot(), ballot(loss_sum=1.0, num_tokens=3, aux_loss_sum=0.0, z_loss_sum=1.0, found_inf=1))


def test_nan_norms_agree_and_zeros_of_other_sign_do_not() -> None:
    other_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    assert math.isnan(settled(ballot(grad_norm=math.nan), ballot(grad_norm=other_nan)).grad_norm)
    with pytest.raises(TrainingStopped, match="grad_norm"):
        settled(ballot(grad_norm=0.0), ballot(grad_norm=-0.0))


# -- decisions --------------------------------------------------------------------------------------------


def policy(**knobs: Any) -> CommitPolicy:
    known: dict[str, Any] = {
        "non_finite_policy": "stop",
        "max_consecutive_skips": 2,
        "loss_spike_factor": None,
        "loss_spike_window": 4,
        "loss_spike_policy": "warn",
        "loss_scaling": False,
    }
    return CommitPolicy(**{**known, **knobs})


def vote_of(**values: Any) -> Vote:
    return dataclasses.replace(settled(ballot()), **values)


def test_a_good_iteration_is_committed() -> None:
    assert policy().decide(vote_of(), History()) == Decision(action="commit")


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.nan}, {"found_inf": True}])
@pytest.mark.parametrize("chosen", ["stop", "skip"])
def test_values_that_are_not_finite(bad: dict[str, Any], chosen: str) -> None:
    decision = policy(non_finite_policy=chosen).decide(vote_of(**bad), History())
    assert decision.action == chosen
    assert "not finite" in decision.reason and not decision.spike


def test_a_scaled_runs_overflow_is_skipped_whatever_the_policy() -> None:
    """With a loss scale, an overflow only shows that the scale is too large. A NaN loss without a scale is an error."""
    scaling = policy(loss_scaling=True)
    overflow = scaling.decide(vote_of(found_inf=True, grad_norm=math.inf, loss_scale=512.0), History())
    assert (overflow.action, overflow.reason) == ("skip", "gradient overflow at loss scale 512")
    assert scaling.decide(vote_of(loss=math.nan), History()).action == "stop"


def test_skips_in_a_row_stop_the_run_and_a_commit_forgives() -> None:
    skipping, bad, history = policy(non_finite_policy="skip"), vote_of(loss=math.nan), History()
    actions = []
    for vote in (bad, bad, vote_of(), bad, bad, bad):
        decision = skipping.decide(vote, history)
        actions.append(decision.action)
        history = history.after(vote, decision, 4)
    assert actions == ["skip", "skip", "commit", "skip", "skip", "stop"]
    assert "training.max_consecutive_skips=2" in decision.reason


@pytest.mark.parametrize(("chosen", "action"), [("warn", "commit"), ("skip", "skip"), ("stop", "stop")])
def test_a_spike_is_called_against_the_median(chosen: str, action: str) -> None:
    spiky = policy(loss_spike_factor=2.0, loss_spike_policy=chosen)
    history = History(losses=(1.0, 9.0, 2.0))
    assert spiky.decide(vote_of(loss=4.0), history) == Decision(action="commit")
    decision = spiky.decide(vote_of(loss=4.001), history)
    assert (decision.action, decision.spike) == (action, True)
    assert "2 times the median of recent losses, 2" in decision.reason


def test_no_spike_before_half_a_window_or_without_a_factor() -> None:
    spiky = policy(loss_spike_factor=2.0, loss_spike_policy="stop")
    assert spiky.decide(vote_of(loss=50.0), History(losses=(1.0,))).action == "commit"
    assert spiky.decide(vote_of(loss=50.0), History(losses=(1.0, 1.0))).action == "stop"
    assert policy(loss_spike_policy="stop").decide(vote_of(loss=50.0), History(losses=(1.0,) * 4)).action == "commit"


@given(losses=st.lists(st.floats(0, 100), max_size=12), window=st.integers(2, 5))
def test_history_keeps_the_newest_committed_losses(losses: list[float], window: int) -> None:
    history = History()
    for loss in losses:
        history = history.after(vote_of(loss=loss), Decision(action="commit"), window)
        history = history.after(vote_of(loss=999.0), Decision(action="skip"), window)
    assert list(history.losses) == losses[-window:]
    assert history.num_consecutive_skips == (1 if losses else 0)


def test_memory_is_the_largest_of_any_rank() -> None:
    ballots = [
        ballot(allocated_bytes=5, reserved_bytes=9, peak_bytes=7),
        ballot(allocated_bytes=4, reserved_bytes=10, peak_bytes=2**45 + 1),
    ]
    read = [Ballot.from_row(each.to_row()) for each in ballots]
    assert read == ballots
    found = MemoryUse.largest(read)
    assert found == MemoryUse(allocated_bytes=5, reserved_bytes=10, peak_bytes=2**45 + 1, peak_rank=1)
