"""Tests the reports of a rank that ends."""

from typing import Any

import pytest

from megatron_ft.control.node import rank_process as rank_main
from megatron_ft.errors import RankLost, RecoveryError


class Heard:
    """Worker client that stores reported exceptions."""

    def __init__(self) -> None:
        self.raised_codes: list[int | None] = []

    def raised(self, text: str, *, error: str, exit_code: int | None) -> None:
        self.raised_codes.append(exit_code)


@pytest.mark.parametrize(
    ("error", "exit_code", "output"),
    [(RecoveryError("gone"), 9, [9]), (ValueError("x"), 1, [None]), (RankLost("no memory"), 7, [])],
    ids=["an error of the job", "any error", "a rank that is lost alone"],
)
def test_an_error_is_reported_unless_the_others_can_outlive_it(
    error: Exception, exit_code: int, output: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Heard()
    assert rank_main._report_failure(worker, error) == exit_code  # type: ignore[arg-type]
    assert worker.raised_codes == output
    assert str(error) in capsys.readouterr().err
