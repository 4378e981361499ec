"""Tests the text of findings, and the exit code."""

import pytest

from megatron_ft.doctor.findings import Finding, exit_code, render

FACT, DOUBT, FAULT = (
    Finding.info("disk", "9 GiB free"),
    Finding.warning("clocks", "jumps", "find out"),
    Finding.error("ports", "taken", "wait"),
)


def test_exit_codes() -> None:
    assert exit_code([FACT], strict=True) == 0
    assert [exit_code([FACT, DOUBT], strict=strict) for strict in (False, True)] == [0, 1]
    assert [exit_code([FACT, DOUBT, FAULT], strict=strict) for strict in (False, True)] == [2, 2]


def test_the_worst_comes_first_with_its_fix() -> None:
    assert render([FACT, DOUBT, FAULT]).splitlines() == [
        "error    ports          taken",
        "                        fix: wait",
        "warning  clocks         jumps",
        "                        fix: find out",
        "info     disk           9 GiB free",
        "1 error, 1 warning, 1 fact",
    ]


def test_what_needs_action_names_a_fix() -> None:
    with pytest.raises(AssertionError, match="must have a fix"):
        Finding(check="x", level="error", what="broken")
