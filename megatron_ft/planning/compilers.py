"""Compilers that a node needs for the kernels of the token dispatch, which are built at their first use."""

from collections.abc import Callable, Mapping

from megatron_ft.config.job import JobConfig

Which = Callable[[str], str | None]
"""``shutil.which``."""
_FIXES = {"cpp": "install a C++17 compiler or name it in CXX", "cuda": "install CUDA or name it in CUDA_HOME"}


def kernels_of(config: JobConfig) -> str:
    """Name the kernels that ranks of ``config``, whose device is resolved, build: ``cpp``, ``cuda`` or none (empty)."""
    if config.placement.algorithm is None:
        return ""
    backend = config.placement.backend_on(config.training.device)
    return backend if backend in _FIXES else ""


def find_compiler(kernels: str, variables: Mapping[str, str], which: Which) -> str | None:
    """Find the compiler that builds ``cpp`` or ``cuda`` on this machine; None if there is none."""
    return next((path for name in _names(kernels, variables) if (path := which(name))), None)


def no_compiler(kernels: str, variables: Mapping[str, str]) -> str:
    """Describe the missing compiler for a machine on which ``find_compiler`` finds none."""
    tried = ", ".join(_names(kernels, variables))
    return f"no compiler found for {kernels} (tried {tried}); {_FIXES[kernels]}, or take the backend reference"


def _names(kernels: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    if kernels == "cpp":
        return (variables["CXX"],) if "CXX" in variables else ("c++", "g++", "clang++")
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    return (*([f"{home}/bin/nvcc"] if home else []), "nvcc", "/usr/local/cuda/bin/nvcc")
