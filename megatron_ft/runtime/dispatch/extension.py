"""Builds the kernels of ``csrc/`` at their first use, and loads them. No other module compiles anything.

The library has a plain C interface and is loaded with ctypes. The build therefore needs only a compiler and torch's
headers for 16-bit numbers. The library is stored in ``.cache/extensions/``; its name contains a digest of the sources,
the command, and the versions of torch and Python. One rank builds the library while the other ranks wait for a file
lock. The operating system frees the lock of a rank that dies during the build.
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
"""Flags of the C++ compiler. A product is rounded before it is added (no FMA), as in the reference backend."""
NVCC_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC")


@cache
def load(kind: str, key: str = "placement.dispatch_backend") -> ctypes.CDLL:
    """Load the kernel library of ``kind``, which is ``cpp`` or ``cuda``. Build it first if it is not in the cache. If
    sources or compiler are missing, or the build fails, raise a ``SoftwareError`` that names the configuration key
    ``key``."""
    try:
        return ctypes.CDLL(str(_built(kind)))
    except SoftwareError as error:
        raise SoftwareError(f"{key}={kind}: {error}{compilers.or_without(key)}") from error


def _built(kind: str) -> Path:
    compiler = _find_compiler(kind)
    sources = _source_files(kind)
    flags = [*CXX_FLAGS] if kind == "cpp" else [*NVCC_FLAGS, f"-arch={_device_architecture()}"]
    return _build(kind, [*compiler, *flags, *_include_flags(), "-shared"], sources, CACHE)


def _source_files(kind: str) -> list[Path]:
    """List the source files of the library ``cpp`` or ``cuda``. Raises ``SoftwareError`` if there are none."""
    suffix = {"cpp": ".cpp", "cuda": ".cu"}[kind]
    found = sorted(path for path in SOURCES.rglob(f"*{suffix}"))
    if not found:
        raise SoftwareError(f"no {suffix} files in {SOURCES}; run from a clone of the project")
    return found


def _include_flags() -> list[str]:
    """Return the compiler flags for the folders of the project's headers and of torch's headers."""
    # ``torch.utils.cpp_extension`` also knows this path, but every rank would import a hundred modules for it.
    return [f"-I{SOURCES}", f"-I{Path(torch.__file__).parent / 'include'}"]


def _find_compiler(kind: str) -> list[str]:
    """Return the command of the compiler for ``cpp`` or ``cuda``. The C++ compiler is found by ``CXX`` or ``PATH``, and
    nvcc by ``CUDA_HOME`` or ``PATH``. Raises ``SoftwareError`` when there is no compiler."""
    found = compilers.find_compiler(kind, os.environ, shutil.which)
    if found is None:
        raise SoftwareError(compilers.no_compiler(kind, os.environ))
    return found


def _device_architecture() -> str:
    """Return the architecture of the current CUDA device in the form of nvcc's ``-arch``, for example ``sm_90``."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _build(kind: str, command: Sequence[str], sources: Sequence[Path], cache_folder: Path) -> Path:
    """Compile ``sources`` with ``command`` if the library is not in the cache, and return the library's path. The
    library gets this path only when it is complete. Raises ``SoftwareError`` if the build fails."""
    library = cache_folder / f"{kind}-{digest(command, sources)}.so"
    if library.exists():
        return library
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile_to(library, [*command, *map(str, sources)])
    except OSError as error:
        raise SoftwareError(f"kernels cannot be built in {cache_folder}: {error}; make the folder writable") from error
    return library


def digest(command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a digest of everything on which a compiled library depends: the sources, the headers in their folders, the
    compiler command, the versions of torch and Python, and the machine type."""
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
        raise SoftwareError(f"kernels cannot be built: {error}; use another compiler") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SoftwareError(
            f"kernels cannot be built: exit code {done.returncode} of {' '.join(command)}\n{tail}\nuse another compiler"
        )
