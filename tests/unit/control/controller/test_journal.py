"""Tests that the inputs of a controller outlive it, as complete lines."""

import os
from pathlib import Path

import pytest

from megatron_ft.control.controller.journal import Journal
from megatron_ft.errors import ControlError


def test_entries_are_there_for_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    assert first.entries == []
    first.append({"now": 1.5, "item": {"op": "reported"}})
    second = Journal(path)
    assert second.entries == [{"now": 1.5, "item": {"op": "reported"}}]
    second.append({"order": {}})
    second.sync()
    second.close()
    assert Journal(path).entries[1:] == [{"order": {}}]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("num_bytes", range(1, 9))
def test_a_line_that_was_cut_short_goes(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append({"a": 1})
    journal.append({"b": 2})
    os.truncate(path, path.stat().st_size - num_bytes)
    torn = Journal(path)
    assert torn.entries == [{"a": 1}]
    torn.append({"c": 3})
    assert Journal(path).entries == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize("line", ["{", "[1]", "\x00", "[" * 100_000])
def test_damage_elsewhere_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(f'{{"a":1}}\n{line}\n{{"b":2}}\n')
    with pytest.raises(ControlError, match="line 2"):
        Journal(path)


@pytest.mark.parametrize(("line", "found"), [('{"begin_seconds":1.5}', 1), ('{"format":3}', 3)])
def test_a_journal_of_another_version_is_refused_by_its_format(tmp_path: Path, line: str, found: int) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ControlError, match=f"format={found}: must be 2: another version"):
        Journal(path)
    assert path.read_text() == f"{line}\n", "it is left as it is"
