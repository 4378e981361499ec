"""Tests how kernels are built: cached by everything they depend on, built once, and refused with the reason."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ft.errors import ConfigError, SoftwareError
from megatron_ft.planning.compilers import WITHOUT_KERNELS
from megatron_ft.runtime.dispatch import extension
from megatron_ft.runtime.dispatch.backend import open_backend

GOOD = 'extern "C" int answer() { return 42; }\n'
COMMAND = ["c++", "-shared", "-fPIC"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "sources" / "answer.cpp"
    path.parent.mkdir()
    path.write_text(GOOD)
    return path


def test_a_library_is_built_once_and_found_again(source: Path, tmp_path: Path) -> None:
    built = extension._build("cpp", COMMAND, [source], tmp_path / "cache")
    stamp = built.stat().st_mtime_ns
    assert extension._build("cpp", COMMAND, [source], tmp_path / "cache") == built
    assert built.stat().st_mtime_ns == stamp
    assert sorted(path.suffix for path in built.parent.iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize("suffix", [".hpp", ".cuh"])
def test_a_change_of_source_header_or_command_is_another_library(source: Path, suffix: str) -> None:
    digests = {extension.digest(COMMAND, [source]), extension.digest([*COMMAND, "-O1"], [source])}
    header = source.parent / f"answer{suffix}"
    header.write_text("int other();\n")
    digests.add(extension.digest(COMMAND, [source]))
    source.write_text(GOOD.replace("42", "43"))
    digests.add(extension.digest(COMMAND, [source]))
    assert len(digests) == 4


def test_a_failed_build_says_what_the_compiler_said(source: Path, tmp_path: Path) -> None:
    source.write_text("int broken( {\n")
    with pytest.raises(SoftwareError, match=r"(?s)exit code 1.*answer\.cpp.*error"):
        extension._build("cpp", COMMAND, [source], tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    message = r"^kernels cannot be built in .*answer\.cpp.*; make the folder writable$"
    with pytest.raises(SoftwareError, match=message):
        extension._build("cpp", COMMAND, [source], source / "cache")


def test_a_failed_build_is_tried_again(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SoftwareError):
        extension._build("cpp", ["false"], [source], tmp_path / "cache")
    assert extension._build("cpp", COMMAND, [source], tmp_path / "cache").exists()


def _counting_compiler(folder: Path) -> Path:
    """Return a compiler that writes one line for each call."""
    path = folder / "counting-c++"
    path.write_text(f'#!/bin/sh\necho built >> {folder}/calls\nexec {shutil.which("c++")} "$@"\n')
    path.chmod(0o755)
    return path


def _build_in_child(command: list[str], source: Path, cache: Path) -> None:
    extension._build("cpp", command, [source], cache)


def test_ranks_that_come_together_build_once(source: Path, tmp_path: Path) -> None:
    command = [str(_counting_compiler(tmp_path)), "-shared", "-fPIC"]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_build_in_child, args=(command, source, tmp_path / "cache")) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert (tmp_path / "calls").read_text().splitlines() == ["built"]


def test_a_rank_killed_while_building_blocks_nobody(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    lock = cache / f"cpp-{extension.digest(COMMAND, [source])}.lock"
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", hold, str(lock)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.kill()
    holder.communicate()
    assert extension._build("cpp", COMMAND, [source], cache).exists()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    extension.load.cache_clear()
    for key, without in WITHOUT_KERNELS.items():
        with pytest.raises(SoftwareError, match=f"^{key}=cpp: .*no-such-compiler.*, or set {key}={without}$"):
            extension.load("cpp", key)


def test_missing_sources_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extension, "SOURCES", tmp_path)
    with pytest.raises(SoftwareError, match=r"no \.cpp files in .*clone of the project"):
        extension._source_files("cpp")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement\.dispatch_backend=rust: must be one of reference, cpp, cuda"):
        open_backend("rust")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(SoftwareError, match=r"placement\.dispatch_backend=cuda.*is_available\(\) is False"):
        open_backend("cuda")


def test_kernels_compile_without_warnings(tmp_path: Path) -> None:
    flags = ["-Werror", *extension._include_flags(), "-shared"]
    command = [*extension._find_compiler("cpp"), *extension.CXX_FLAGS, *flags]
    extension._build("cpp", command, extension._source_files("cpp"), tmp_path)


@pytest.mark.parametrize("source", extension._source_files("cuda"), ids=lambda path: path.name)
def test_cuda_kernels_compile_for_sm_90(source: Path, tmp_path: Path) -> None:
    try:
        nvcc = extension._find_compiler("cuda")
    except SoftwareError as missing:
        pytest.skip(f"needs nvcc: {missing}")
    command = [*nvcc, *extension.NVCC_FLAGS, "-arch=sm_90", "-Werror=all-warnings", *extension._include_flags(), "-c"]
    compiled = extension._build("cuda", command, [source], tmp_path)
    assert compiled.stat().st_size > 0
    assert os.access(compiled, os.R_OK)
