"""Tests the built-in corpus."""

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_ft.corpus import stdlib
from megatron_ft.corpus.indexed import IndexInfo, bin_path
from megatron_ft.corpus.tokenizers import ByteTokenizer
from megatron_ft.errors import DataError


def test_corpus_is_python_text_and_quick(tmp_path: Path) -> None:
    started = time.process_time()
    prefix = stdlib.ensure_corpus(str(tmp_path), ByteTokenizer())
    assert time.process_time() - started < 3
    info = IndexInfo.read(prefix)
    files = stdlib.list_files(stdlib.library_folder())
    assert info.num_documents == len(files) > 50
    assert 0.9 * stdlib.MAX_BYTES < info.num_tokens < stdlib.MAX_BYTES + len(files) + 1
    tokens = np.fromfile(bin_path(prefix), dtype=info.dtype)
    text = (stdlib.library_folder() / files[0].name).read_text(encoding="utf-8")
    assert ByteTokenizer().decode(tokens[: len(text.encode())]) == text
    assert np.count_nonzero(tokens == ByteTokenizer.eod) == len(files)


def test_leavings_of_a_killed_writer_go(tmp_path: Path) -> None:
    prefix = stdlib.corpus_prefix(str(tmp_path), ByteTokenizer())
    Path(f"{prefix}.bin.tmp-1").write_bytes(b"x")
    Path(f"{prefix}.bin").write_bytes(b"x")
    assert IndexInfo.read(stdlib.ensure_corpus(str(tmp_path), ByteTokenizer())).num_tokens > 1000
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx", ".lock"}


def test_second_call_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = stdlib.ensure_corpus(str(tmp_path), ByteTokenizer())
    monkeypatch.setattr(stdlib, "_write", lambda *_: pytest.fail("written twice"))
    assert stdlib.ensure_corpus(str(tmp_path), ByteTokenizer()) == prefix


def test_files_are_chosen_without_tests_and_independent_of_folder_order(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "pkg/c.py", "test/t.py", "site-packages/s.py", "pkg/tests/u.py", "empty.py", "x.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else "pass\n", encoding="utf-8")
    found = stdlib.list_files(tmp_path)
    assert {file.name for file in found} == {"a.py", "b.py", "pkg/c.py"}
    assert len(stdlib.list_files(tmp_path, 10)) == 2
    assert stdlib.list_files(tmp_path, 10) == found[:2]


def test_a_python_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs .py files"):
        stdlib.list_files(tmp_path)


def _build(cache: str, gate: "multiprocessing.synchronize.Barrier", times: "multiprocessing.Queue[int]") -> None:
    write, count = stdlib._write, [0]

    def counted(*arguments: object) -> None:
        count[0] += 1
        write(*arguments)

    stdlib._write = counted
    gate.wait(30)
    IndexInfo.read(stdlib.ensure_corpus(cache, ByteTokenizer()))
    times.put(count[0])


def test_processes_that_meet_write_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    gate, times = context.Barrier(3), context.Queue()
    builders = [context.Process(target=_build, args=(str(tmp_path), gate, times)) for _ in range(3)]
    for builder in builders:
        builder.start()
    written = [times.get(timeout=30) for _ in builders]
    for builder in builders:
        builder.join(10)
    assert sorted(written) == [0, 0, 1]


def test_a_lock_held_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib, "LOCK_TIMEOUT_SECONDS", 0.05)
    path = tmp_path / "set.lock"
    with (
        stdlib._locked(path),
        pytest.raises(DataError, match="another process still holds this lock"),
        stdlib._locked(path),
    ):
        pass
    with stdlib._locked(path):
        pass


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"data.cache_dir=.*must be writable"):
        stdlib.ensure_corpus(str(tmp_path / "file" / "cache"), ByteTokenizer())
