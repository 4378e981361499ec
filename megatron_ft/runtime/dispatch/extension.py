"""Builds the kernels of ``csrc/`` at their first use and loads them: the only place that compiles anything.

The library has a plain C interface and is loaded with ctypes. So building needs a compiler and torch's headers for
16-bit numbers, but no Python headers, build tool or download. The result is in ``.cache/extensions/`` under a digest of
sources, command, torch and Python; concurrent ranks wait for the first one's build. The lock belongs to the operating
system, so a rank that dies during the build leaves no lock.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from megatron_ft.errors import SoftwareError
from megatron_ft.planning import compilers

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "csrc"
CACHE = ROOT / ".cache" / "extensions"
HEADERS = {".hpp", ".cuh"}
BUILD_SECONDS = 600
CXX_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra")
"""No contraction: a product is rounded before it is added, as in the reference."""
NVCC_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC")
_WITHOUT_KERNELS = "set placement.dispatch_backend=reference"


@cache
def load(kind: str) -> ctypes.CDLL:
    """Load the kernels ``cpp`` or ``cuda``, built if they are not in the cache.

    Raises ``SoftwareError`` when sources or compiler are missing or the build fails.
    """
    compiler = find_compiler(kind)
    sources = source_files(kind)
    flags = [*CXX_FLAGS] if kind == "cpp" else [*NVCC_FLAGS, f"-arch={device_architecture()}"]
    return ctypes.CDLL(str(build(kind, [*compiler, *flags, *include_flags(), "-shared"], sources, CACHE)))


def source_files(kind: str) -> list[Path]:
    """List the sources of one library. Raises ``SoftwareError`` outside a clone of the project."""
    suffix = {"cpp": ".cpp", "cuda": ".cu"}[kind]
    found = sorted(path for path in SOURCES.rglob(f"*{suffix}"))
    if not found:
        raise SoftwareError(
            f"placement.dispatch_backend={kind}: no {suffix} files in {SOURCES}: kernels can only be built from a "
            f"clone of the project; without one, {_WITHOUT_KERNELS}"
        )
    return found


def include_flags() -> list[str]:
    """Return flags for the project's headers, and torch's for 16-bit numbers."""
    # Not ``torch.utils.cpp_extension``: every rank would import a hundred modules for this path.
    return [f"-I{SOURCES}", f"-I{Path(torch.__file__).parent / 'include'}"]


def find_compiler(kind: str) -> list[str]:
    """Find the command of ``CXX`` or c++ for C++, nvcc of ``CUDA_HOME`` or of the path for CUDA. Raises
    ``SoftwareError``."""
    found = compilers.find_compiler(kind, os.environ, shutil.which)
    if found is None:
        raise SoftwareError(f"placement.dispatch_backend={kind}: {compilers.no_compiler(kind, os.environ)}")
    return found


def device_architecture() -> str:
    """Name the current CUDA device's architecture as nvcc writes it: ``sm_90``."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def build(kind: str, command: Sequence[str], sources: Sequence[Path], cache_folder: Path) -> Path:
    """Compile ``sources`` with ``command`` unless the cache has them; return the library.

    A rename puts it in place, so a reader always finds a complete file. Raises ``SoftwareError``.
    """
    library = cache_folder / f"{kind}-{digest(command, sources)}.so"
    if library.exists():
        return library
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile_to(library, [*command, *map(str, sources)])
    except OSError as error:
        raise SoftwareError(
            f"placement.dispatch_backend={kind}: cannot build in {cache_folder}: {error}; make it writable, or "
            f"{_WITHOUT_KERNELS}"
        ) from error
    return library


def digest(command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a digest of all inputs of a library: sources, headers beside them, command, torch, Python, machine."""
    versions = (torch.__version__, sys.version.split()[0], platform.machine())
    state = hashlib.sha256("\0".join((*command, *versions)).encode())
    headers = {path for source in sources for path in source.parent.rglob("*") if path.suffix in HEADERS}
    for path in sorted({*sources, *headers}):
        state.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return state.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile_to(library: Path, command: Sequence[str]) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    try:
        _compile([*command, "-o", str(unfinished)])
        os.replace(unfinished, library)
    finally:
        unfinished.unlink(missing_ok=True)


def _compile(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SoftwareError(f"building the dispatch kernels failed: {error}; {_WITHOUT_KERNELS}") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SoftwareError(
            f"building the dispatch kernels failed with exit code {done.returncode}: {' '.join(command)}\n{tail}\n"
            f"{_WITHOUT_KERNELS}"
        )
