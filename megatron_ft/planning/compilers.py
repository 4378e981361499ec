"""Finds the compiler for kernels in C++ and CUDA, which are built at their first use."""

import shlex
from collections.abc import Callable, Mapping
from itertools import takewhile

from megatron_ft.config.job import JobConfig

Which = Callable[[str], str | None]
"""Function that returns the path of a command, or None if the command is not installed, like ``shutil.which``."""
_FIXES = {"cpp": "install a C++17 compiler or name it in CXX", "cuda": "install CUDA or name it in CUDA_HOME"}
WITHOUT_KERNELS = {"placement.dispatch_backend": "reference", "optimizer.update_backend": "torch"}
"""Configuration keys that select kernels, and for each key the value with which no kernels are built."""


def kernels_of(config: JobConfig, device: str) -> dict[str, str]:
    """Return the configuration keys for which ranks on ``device`` (``cpu`` or ``cuda``) build kernels, and for each key
    the kind of its kernels (``cpp`` or ``cuda``)."""
    found = {
        "placement.dispatch_backend": config.placement.kernels_on(device),
        "optimizer.update_backend": config.optimizer.update_backend,
    }
    return {key: kernels for key, kernels in found.items() if kernels not in ("", WITHOUT_KERNELS[key])}


def find_compiler(kernels: str, variables: Mapping[str, str], which: Which) -> list[str] | None:
    """Return the command of the compiler for ``kernels`` (``cpp`` or ``cuda``); None if no compiler is found.

    The command may have arguments, as in ``CXX="ccache g++ -m64"``. Each word before the first option or assignment
    must be an installed command, because ``ccache`` without ``g++`` builds nothing.
    """
    for command in _commands(kernels, variables):
        paths = [which(word) for word in takewhile(_may_be_command, command)]
        if paths and paths[0] and all(paths):
            return [paths[0], *command[1:]]
    return None


def no_compiler(kernels: str, variables: Mapping[str, str]) -> str:
    """Return the first part of the error message for a missing compiler. ``or_without`` returns the second part."""
    tried = ", ".join(" ".join(command) for command in _commands(kernels, variables))
    return f"no compiler found for {kernels} (tried {tried}); {_FIXES[kernels]}"


def or_without(key: str) -> str:
    """Return the second part of the ``no_compiler`` message: the value of ``key`` with which no kernels are built."""
    return f", or set {key}={WITHOUT_KERNELS[key]}"


def _commands(kernels: str, variables: Mapping[str, str]) -> tuple[list[str], ...]:
    if kernels == "cpp":
        # An empty variable counts as unset, as in make.
        chosen = _words(variables.get("CXX", ""))
        return (chosen,) if chosen else (["c++"], ["g++"], ["clang++"])
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    return (*([[f"{home}/bin/nvcc"]] if home else []), ["nvcc"], ["/usr/local/cuda/bin/nvcc"])


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # unclosed quotation mark: the text counts as a command, which will not be found
        return [text]


def _may_be_command(word: str) -> bool:
    return not word.startswith("-") and "=" not in word
