"""Tests the step after a launcher has ended."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_ft.errors import FINAL_EXIT_CODES
from megatron_ft.planning.recovery.job_attempts import (
    MEMORY,
    Asked,
    Attempt,
    AttemptPolicy,
    Next,
    _num_fruitless,
    in_order_of_trust,
    to_exclude,
)

HOSTS = ("a", "b", "c", "d")
POLICY = AttemptPolicy(num_nodes=3, max_fruitless=3)
FAILED = Attempt(job_id="7", hosts=HOSTS, exit_code=7, asked=None, iteration=5)


def test_a_run_at_its_end_ends_the_job() -> None:
    verdict = POLICY.decide([replace(FAILED, exit_code=0, is_complete=True)], HOSTS)
    assert (verdict.next, verdict.is_final) == (Next.END, True)


def test_a_planned_end_before_the_end_of_the_run_lets_the_next_job_continue() -> None:
    early = replace(FAILED, exit_code=0)
    verdict = POLICY.decide([early] * 4, HOSTS)
    assert (verdict.next, verdict.is_final) == (Next.END, False)
    assert POLICY.decide([replace(early, asked=Asked.TO_END)], HOSTS).is_final, "the user has ended the run"


def test_a_stop_after_the_configured_minutes_lets_the_next_job_continue() -> None:
    late = replace(FAILED, exit_code=130, has_timed_out=True)
    verdict = POLICY.decide([late] * 4, HOSTS)
    assert (verdict.next, verdict.is_final) == (Next.END, False)
    assert POLICY.decide([replace(late, asked=Asked.TO_END)], HOSTS).is_final, "the user has ended the run"
    assert POLICY.decide([replace(late, asked=Asked.TO_GO_ON_LATER)], HOSTS).next is Next.REQUEUE


@pytest.mark.parametrize("code", sorted(FINAL_EXIT_CODES))
def test_what_would_fail_alike_is_not_tried_again(code: int) -> None:
    assert POLICY.decide([replace(FAILED, exit_code=code)], HOSTS).next is Next.END


def test_a_warning_requeues_and_a_request_to_end_does_not() -> None:
    warned = replace(FAILED, exit_code=130, asked=Asked.TO_GO_ON_LATER)
    assert POLICY.decide([warned], HOSTS).next is Next.REQUEUE
    assert replace(POLICY, on_warning=Next.END).decide([warned], HOSTS).next is Next.END
    assert not replace(POLICY, on_warning=Next.END).decide([warned], HOSTS).is_final, "another job continues"
    for asked in (Asked.TO_END, None):  # Ctrl-C, sent to the console
        verdict = POLICY.decide([replace(FAILED, exit_code=130, asked=asked)], HOSTS)
        assert (verdict.next, verdict.is_final) == (Next.END, True)


def test_a_console_that_failed_is_started_again_where_enough_nodes_are_left() -> None:
    assert POLICY.decide([FAILED], HOSTS).next is Next.AGAIN
    assert POLICY.decide([replace(FAILED, exit_code=-9)], HOSTS[:3]).next is Next.AGAIN
    assert POLICY.decide([FAILED], HOSTS[:2]).next is Next.REQUEUE
    assert POLICY.decide([replace(FAILED, lost_hosts=("a", "b"))], HOSTS).next is Next.REQUEUE, "Slurm sees it later"


def test_hosts_that_failed_twice_are_not_counted_on() -> None:
    earlier = replace(FAILED, failed_hosts=("a", "b"), iteration=1)
    later = replace(FAILED, failed_hosts=("b", "a"))
    assert to_exclude([earlier, later]) == ["a", "b"]
    assert POLICY.decide([earlier, later], HOSTS).next is Next.REQUEUE
    assert to_exclude([earlier]) == []


def test_failures_are_forgotten() -> None:
    twice = [replace(FAILED, failed_hosts=("a",), iteration=number) for number in (1, 2)]
    later = [replace(FAILED, iteration=3 + number) for number in range(MEMORY)]
    assert to_exclude([*twice, *later[:-2]]) == ["a"]
    assert to_exclude([*twice, *later[:-1]]) == []


def test_without_progress_it_ends() -> None:
    attempts = [FAILED]
    verdicts = []
    for _ in range(3):
        attempts.append(FAILED)
        verdicts.append(POLICY.decide(attempts, HOSTS))
    assert [verdict.next for verdict in verdicts] == [Next.AGAIN, Next.AGAIN, Next.END]
    assert verdicts[-1].is_final and "beyond iteration 5" in verdicts[-1].reason
    further = POLICY.decide([*attempts[:-1], replace(FAILED, iteration=6)], HOSTS)
    assert further.next is Next.AGAIN, "progress resets the count"


def test_warnings_without_progress_end_too() -> None:
    warned = replace(FAILED, exit_code=130, asked=Asked.TO_GO_ON_LATER, iteration=0)
    assert POLICY.decide([warned] * 2, HOSTS).next is Next.REQUEUE
    assert POLICY.decide([warned] * 3, HOSTS).next is Next.END


def test_trust() -> None:
    earlier = replace(FAILED, failed_hosts=("a",))
    later = replace(FAILED, lost_hosts=("b",))
    assert in_order_of_trust(HOSTS, []) == list(HOSTS)
    assert in_order_of_trust(HOSTS, [earlier]) == ["b", "c", "d", "a"]
    assert in_order_of_trust(HOSTS, [earlier, later]) == ["c", "d", "a", "b"]


@given(
    iterations=some.lists(some.integers(0, 20), min_size=1, max_size=40),
    policy=some.builds(AttemptPolicy, num_nodes=some.integers(1, 5), max_fruitless=some.integers(1, 4)),
)
def test_no_job_is_tried_for_ever(iterations: list[int], policy: AttemptPolicy) -> None:
    """For any kinds of failures, the number of attempts without progress is limited, and so is the number between two
    attempts with progress."""
    attempts: list[Attempt] = []
    for iteration in iterations:
        attempts.append(replace(FAILED, iteration=iteration))
        assert _num_fruitless(attempts) <= policy.max_fruitless
        if policy.decide(attempts, HOSTS).next is Next.END:
            assert _num_fruitless(attempts) == policy.max_fruitless
            return
