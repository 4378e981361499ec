"""The comparison of a job that keeps its layout."""

from collections.abc import Mapping, Sequence

from benchmarks.elastic_jobs import untold
from benchmarks.faults_from_outside import Comparison
from benchmarks.localized_jobs import Followed

STATE = ("a", "b")


def followed(losses: Mapping[int, float], digests: Mapping[int, Sequence[str]], *changed_at: int) -> Followed:
    changes = [{"iteration": iteration} for iteration in changed_at]
    return Followed(
        0, losses, digests, changes, shares=[], recoveries=[], hits=[], committed=[], planned=[], problems=[]
    )


REFERENCE = followed({i: i / 2 for i in range(1, 6)}, dict.fromkeys(range(1, 6), STATE))


def without(iteration: int, *changed_at: int, name: str = "digests") -> Followed:
    records = {"losses": dict(REFERENCE.losses), "digests": dict(REFERENCE.digests)}
    del records[name][iteration]  # type: ignore[attr-defined]
    return followed(records["losses"], records["digests"], *changed_at)  # type: ignore[arg-type]


def test_what_a_dead_reporter_did_not_report_is_no_difference() -> None:
    assert REFERENCE.differences(REFERENCE) == []
    for name, what in (("losses", "loss"), ("digests", "state")):
        assert without(3, 3, name=name).differences(REFERENCE) == []
        assert without(3, 2, 4, name=name).differences(REFERENCE) == [f"{what} of iteration 3 is missing"]
        assert without(3, 3, name=name).num_compared(REFERENCE) == REFERENCE.num_compared(REFERENCE) - 1


def test_what_was_reported_has_to_be_equal_where_a_membership_begins_too() -> None:
    wrong = followed({**REFERENCE.losses, 2: 7.0}, {**REFERENCE.digests, 4: ("a", "c")}, 2, 4)
    assert wrong.differences(REFERENCE) == ["loss of iteration 2 is another", "state of iteration 4 is another"]
    compared = Comparison.of(wrong, REFERENCE, 5)
    assert (compared.until, compared.last, compared.difference) == (1, 5, "loss of iteration 2 is another")
    assert compared.num_compared == {1: 2}
    assert Comparison.of(REFERENCE, REFERENCE, 5).until == 5


def test_several_iterations_go_unreported_where_the_agent_that_reports_was_stopped() -> None:
    losses = {i: i / 2 for i in (1, 2, 5)}
    found = followed(losses, dict.fromkeys((1, 5), STATE), 4)
    assert found.differences(REFERENCE) == [], "the digest of iteration 2 would have come after its loss"
    assert found.num_compared(REFERENCE) == 5
    earlier = followed(losses, dict.fromkeys((1, 2, 5), STATE), 3)
    assert earlier.differences(REFERENCE) == ["state of iteration 4 is missing", "loss of iteration 4 is missing"]
    changes = [{"iteration": 4, "nodes": [1, 2]}, {"iteration": 9, "nodes": [1, 2]}]
    assert untold(changes, losses) == {2, 3, 4}
    assert untold([{"iteration": 4, "nodes": [0, 1], "joining": [0]}], {4}) == {4}
