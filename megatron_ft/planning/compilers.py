"""Finds the compiler for the kernels of the token dispatch, which are built at their first use."""

import shlex
from collections.abc import Callable, Mapping
from itertools import takewhile

Which = Callable[[str], str | None]
"""Function that returns the path of a command, or None if it is not installed, like ``shutil.which``."""
_FIXES = {"cpp": "install a C++17 compiler or name it in CXX", "cuda": "install CUDA or name it in CUDA_HOME"}


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
    """Return a message for a machine on which ``find_compiler`` finds no compiler."""
    tried = ", ".join(" ".join(command) for command in _commands(kernels, variables))
    fixes = f"{_FIXES[kernels]}, or set placement.dispatch_backend=reference"
    return f"no compiler found for {kernels} (tried {tried}); {fixes}"


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
    except ValueError:  # a quotation mark is not closed: no command has this name, and the message shows it
        return [text]


def _may_be_command(word: str) -> bool:
    return not word.startswith("-") and "=" not in word
