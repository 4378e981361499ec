"""Tests the list of rejected windows in the run's folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage import files
from megatron_ft.snapshot.storage.window_folder import REJECTED_NAME, RejectedWindow, window_digest


def window(start: int) -> RejectedWindow:
    return RejectedWindow(
        start_iteration=start, generation=1, digest=window_digest([f"manifest of {start}"]), reason="loss=1.0, not 2.0"
    )


def test_refusals_are_added_and_read_back_in_order(tmp_path: Path) -> None:
    assert RejectedWindow.read_all(tmp_path) == []
    window(12).add_to(tmp_path)
    window(9).add_to(tmp_path)
    assert RejectedWindow.read_all(tmp_path) == [window(12), window(9)]


def test_a_digest_is_of_all_ranks_in_their_order() -> None:
    digests = {window_digest(manifests) for manifests in (["a", "b"], ["b", "a"], ["a"], ["a", "c"], ["ab"])}
    assert len(digests) == 5
    assert window_digest(["a", "b"]) == window_digest(["a", "b"])


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window(12).add_to(tmp_path)

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write", full)
    with pytest.raises(CheckpointError, match=r"refused_windows.json: cannot be written: .*No space left"):
        window(9).add_to(tmp_path)
    assert RejectedWindow.read_all(tmp_path) == [window(12)]
    assert os.listdir(tmp_path) == [REJECTED_NAME]


ENTRY: dict[str, Any] = {"start_iteration": 1, "generation": 0, "digest": "0" * 32, "reason": "loss"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "{}",
        "[1]",
        json.dumps([{**ENTRY, "more": 1}]),
        json.dumps([{**ENTRY, "start_iteration": "1"}]),
        json.dumps([{**ENTRY, "start_iteration": True}]),
        json.dumps([{**ENTRY, "digest": "0" * 31}]),
        json.dumps([{name: ENTRY[name] for name in ("start_iteration", "digest")}]),
    ],
)
def test_anything_else_is_refused_by_name_and_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / REJECTED_NAME
    path.write_text(content)
    with pytest.raises(CheckpointError, match=REJECTED_NAME):
        RejectedWindow.read_all(tmp_path)
    with pytest.raises(CheckpointError, match=REJECTED_NAME):
        window(9).add_to(tmp_path)
    assert path.read_text() == content


def test_a_file_nested_too_deep_is_named(tmp_path: Path) -> None:
    (tmp_path / REJECTED_NAME).write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{REJECTED_NAME}: the JSON text is nested too deeply"):
        RejectedWindow.read_all(tmp_path)
