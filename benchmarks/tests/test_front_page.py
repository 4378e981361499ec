"""Tests that the figures in README.md are short, current, and equal to those of the results."""

import dataclasses

import pytest

from benchmarks.claims import RESULTS_DIR, load_claims, newest_results
from benchmarks.front_page import ROWS, front_page_table
from benchmarks.source import ROOT
from megatron_ft.errors import ConfigError

MAX_CELL_CHARACTERS = 65
"""Largest number of characters of a cell that can be read in two seconds. The longest cell compares two
alternatives."""


def test_the_page_has_six_rows_of_three_short_cells() -> None:
    lines = front_page_table(load_claims(), newest_results(RESULTS_DIR)).splitlines()
    assert len(lines) == 2 + 6 and lines[0] == "| what | megatron-ft | others |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert all(len(row) == 3 for row in cells)
    assert [cell for row in cells for cell in row[1:] if len(cell) > MAX_CELL_CHARACTERS] == []


def test_a_cell_is_made_from_the_result() -> None:
    results = newest_results(RESULTS_DIR)
    faults = [{"seconds": seconds, "iterations_lost": int(seconds)} for seconds in (0.5, 1.25, 2.75)]
    kills = results["kill-to-commit", "cpu"]
    changed = {**kills, "passed": True, "details": {**kills["details"], "ours": {"faults": faults, "problems": []}}}
    table = front_page_table(load_claims(), {**results, ("kill-to-commit", "cpu"): changed})
    assert "| 1.25 / 2.75 s, 2 lost | torchft " in table


@pytest.mark.parametrize("claim", sorted({claim for row in ROWS for claim in row.claims}))
def test_a_row_is_marked_if_a_claim_of_it_has_failed(claim: str) -> None:
    results = newest_results(RESULTS_DIR)
    passed = {key: {**result, "passed": True} for key, result in results.items()}
    assert "FAIL" not in front_page_table(load_claims(), passed)
    failed = {**passed, (claim, "cpu"): {**passed[claim, "cpu"], "passed": False}}
    marked = [line for line in front_page_table(load_claims(), failed).splitlines() if " (**FAIL**) |" in line]
    assert len(marked) == 1


@pytest.mark.parametrize("claim", sorted({claim for row in ROWS for claim in row.claims}))
def test_a_row_without_a_result_is_refused(claim: str) -> None:
    results = newest_results(RESULTS_DIR)
    del results[claim, "cpu"]
    with pytest.raises(ConfigError, match=f"README.md={claim}: has no result"):
        front_page_table(load_claims(), results)


@pytest.mark.parametrize("short", ["", "x" * 41])
def test_a_name_for_tables_has_at_most_40_characters(short: str) -> None:
    claim = load_claims()["quickstart"]
    with pytest.raises(ConfigError, match=r"quickstart\.short=.*must have 1 to 40 characters"):
        dataclasses.replace(claim, short=short).validate()
    dataclasses.replace(claim, short="x" * 40).validate()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110
