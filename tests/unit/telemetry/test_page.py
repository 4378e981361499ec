"""``docs/telemetry.md`` says what the code says."""

import pytest

from megatron_ft.telemetry.metrics import METRICS, check_metrics
from megatron_ft.telemetry.page import PAGE, render


def test_the_page_matches_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "run: python -m megatron_ft.telemetry.page"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers of 'metrics'"):
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
