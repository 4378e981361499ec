"""Tests predicted times of recoveries: against measured ones, term by term, and without inputs."""

from dataclasses import replace

import pytest

from megatron_ft.planning.cost.recovery_time import Prediction, RecoveryTimes, RecoveryWork

SMALL = RecoveryWork(num_ranks=3, state_bytes=3_000_000, restarts_processes=False, sent_bytes=0, again_iterations=0)


def seconds(work: RecoveryWork, *, link: float | None = 1e9, iteration: float | None = 2.0) -> float:
    found = RecoveryTimes().predict(work, link_bytes_per_second=link, iteration_seconds=iteration)
    found.validate()
    assert found.seconds is not None, found.summary()
    return found.seconds


@pytest.mark.parametrize(
    ("work", "measured"),
    [
        (SMALL, 0.76 - 0.33),
        (replace(SMALL, num_ranks=7, state_bytes=475_000_000), 0.14 + 1.23),
        (replace(SMALL, num_replaced_nodes=1), 0.14 + 0.70),
    ],
    ids=["kill-to-commit", "large payload", "replaced node"],
)
def test_measured_recoveries_are_predicted_within_a_factor(work: RecoveryWork, measured: float) -> None:
    assert measured / 1.5 < seconds(work) < measured * 1.5


def test_each_part_of_the_work_adds_its_time() -> None:
    base = seconds(SMALL)
    assert seconds(replace(SMALL, sent_bytes=3_000_000_000)) - base == pytest.approx(3.0)
    assert seconds(replace(SMALL, again_iterations=5)) - base == pytest.approx(10.0)
    localized = seconds(replace(SMALL, again_iterations=5, again_share=0.5)) - base
    assert localized == pytest.approx(5.0)
    replaced = seconds(replace(SMALL, num_replaced_nodes=2)) - base
    assert replaced == pytest.approx(2 * RecoveryTimes().replacement_seconds)
    assert seconds(replace(SMALL, num_ranks=1024)) > base
    restart = replace(SMALL, restarts_processes=True)
    abandoned = seconds(replace(restart, tries_processes=True)) - seconds(restart)
    assert abandoned == pytest.approx(RecoveryTimes().abandon_seconds)
    started = seconds(replace(SMALL, starts_ranks=True)) - base
    assert started == pytest.approx(RecoveryTimes().rank_start_seconds)


def test_stages_that_replay_alone_take_their_share_of_an_iteration() -> None:
    times = RecoveryTimes()
    for shares_machine in (False, True):
        assert times.share_of(0, 4, shares_machine=shares_machine) == 1.0
        assert times.share_of(4, 4, shares_machine=shares_machine) == 1.0
    assert times.share_of(1, 4, shares_machine=True) == 0.25  # the cores of the stages that wait are free
    assert times.share_of(1, 4, shares_machine=False) == times.localized_share


def test_inputs_without_work_are_not_needed() -> None:
    assert seconds(SMALL, link=None, iteration=None) == seconds(SMALL)


def test_missing_inputs_are_named() -> None:
    def unknown(**changes: object) -> tuple[str, ...]:
        found = RecoveryTimes().predict(
            replace(SMALL, **changes),  # type: ignore[arg-type]
            link_bytes_per_second=None,
            iteration_seconds=None,
        )
        found.validate()
        assert found.seconds is None and found.summary().startswith("not known: ")
        return found.unknown

    assert unknown(sent_bytes=1) == ("topology.link_bytes_per_second=null",)
    assert unknown(sent_bytes=None) == ("the transfers are not planned",)
    assert unknown(again_iterations=1) == ("snapshot.iteration_seconds=null",)
    assert unknown(again_iterations=None, again_unknown=("x=null",)) == ("x=null",)
    assert unknown(sent_bytes=1, again_iterations=1) == (
        "topology.link_bytes_per_second=null",
        "snapshot.iteration_seconds=null",
    )


def test_a_prediction_without_seconds_has_a_reason() -> None:
    with pytest.raises(AssertionError):
        Prediction(seconds=None).validate()
    assert Prediction(seconds=0.4321).summary() == "0.43 s"
