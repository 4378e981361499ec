"""Tests the command that makes datasets, on real text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ft.corpus.indexed import IndexInfo, bin_path
from megatron_ft.corpus.tokenizers import ByteTokenizer
from tools import preprocess_data

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is missing")


def tokens_of(prefix: Path) -> np.ndarray:
    return np.fromfile(bin_path(prefix), dtype=IndexInfo.read(prefix).dtype)


@needs_shared
def test_real_text_as_bytes_through_the_command(tmp_path: Path) -> None:
    path = SHARED / "text" / "tinyshakespeare.txt"
    prefix = tmp_path / "deep" / "set"
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(path), "--output-prefix", str(prefix)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    content = path.read_bytes()
    assert tokens_of(prefix).tolist() == [*content, ByteTokenizer.eod]
    assert f"{len(content) + 1:,} tokens (uint16) in 1 documents" in done.stdout


@needs_shared
def test_real_text_through_gpt2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    gpt2, text = SHARED / "tokenizer" / "gpt2", tmp_path / "part.txt"
    text.write_bytes((SHARED / "text" / "wikitext2_valid.txt").read_bytes()[:60_000].rsplit(b"\n", 1)[0])
    arguments = ["--input", str(text), "--output-prefix", str(tmp_path / "set"), "--workers", "1"]
    arguments += ["--tokenizer", "gpt2", "--vocab-file", str(gpt2 / "vocab.json")]
    arguments += ["--merges-file", str(gpt2 / "merges.txt"), "--split-on-blank-lines"]
    assert preprocess_data.main(arguments) == 0
    tokens = tokens_of(tmp_path / "set")
    assert np.count_nonzero(tokens == 50256) == IndexInfo.read(tmp_path / "set").num_documents > 50
    assert "vocabulary 50,257" in capsys.readouterr().out


def test_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prefix = tmp_path / "rows.jsonl", tmp_path / "set"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in ("ab", "", "c")), encoding="utf-8")
    arguments = ["--input", str(path), "--output-prefix", str(prefix), "--json-key", "body"]
    assert preprocess_data.main(arguments) == 0
    assert tokens_of(prefix).tolist() == [97, 98, 256, 99, 256]
    assert "2 documents, 1 empty documents skipped" in capsys.readouterr().out
    assert preprocess_data.main(arguments) == 3
    assert "already exists" in capsys.readouterr().err
    assert preprocess_data.main([*arguments, "--overwrite", "--no-append-eod"]) == 0
    assert tokens_of(prefix).tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    ("content", "message"), [(b'{"text": ""}\n', "without tokens"), (b"", "is empty"), (b"{\n", "line 1: damaged JSON")]
)
def test_refusals_leave_nothing_behind(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert preprocess_data.main(["--input", str(path), "--output-prefix", str(tmp_path / "set")]) == 3
    assert message in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("num_documents", [1, 2000])
@pytest.mark.parametrize("name", ["set.bin", "set.idx", "set.tokenizer.json"])
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, name: str, num_documents: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "rows.jsonl", tmp_path / "data"
    path.write_text(f"{json.dumps({'text': 'a' * 1000})}\n" * num_documents, encoding="utf-8")
    folder.mkdir()
    (folder / f"{name}.tmp-{os.getpid()}").symlink_to("/dev/full")
    assert preprocess_data.main(["--input", str(path), "--output-prefix", str(folder / "set")]) == 3
    assert capsys.readouterr().err == f"preprocess_data: {folder / name}: cannot be written: No space left on device\n"
    assert list(folder.iterdir()) == []


def test_no_torch_is_imported() -> None:
    code = "import sys, tools.preprocess_data; print({'torch', 'megatron', 'hydra'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
