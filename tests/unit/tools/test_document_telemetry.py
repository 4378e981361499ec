"""Tests that the tables in ``docs/telemetry.md`` equal the code."""

import pytest

from megatron_ft.telemetry.metrics import METRICS, check_metrics
from tools.document_telemetry import PAGE, main, render


def test_the_page_is_up_to_date() -> None:
    assert main(["--check"]) == 0, "run python -m tools.document_telemetry"
    assert render(PAGE.read_text(encoding="utf-8")).count("**`recovery_started`**") == 1


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="marker lines of the table 'metrics'"):
        render("# nothing")


def test_every_metric_is_described() -> None:
    for name, metric in METRICS.items():
        assert metric.unit and metric.meaning.endswith("."), name
    check_metrics(dict.fromkeys(METRICS, 1.0))


def test_unlisted_and_missing_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match=r"metrics\.mood"):
        check_metrics({"loss": 1.0, "mood": 1.0})
    with pytest.raises(ValueError, match=r"metrics\.loss"):
        check_metrics({})
