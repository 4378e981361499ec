"""Describes the machine on which a result was measured, without names or paths."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import psutil


def describe() -> dict[str, object]:
    """Return the hardware class of this machine, and the facts that determine it.

    ``class`` is the short name of the NVIDIA GPU, e.g. ``h200``, or ``cpu`` if there is none.
    """
    gpus = _gpus()
    return {
        "class": hardware_class(gpus),
        "gpus": gpus,
        "cpu_model": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "megatron_core": _version("megatron-core"),
    }


def hardware_class(gpus: list[str]) -> str:
    """Return the short name of a machine with these GPUs: the last word of the model's name that contains a digit."""
    if not gpus:
        return "cpu"
    words = [word for word in re.split(r"[^a-z0-9]+", gpus[0].lower()) if re.fullmatch(r"[a-z]+\d+[a-z]*", word)]
    return words[0] if words else "gpu"


def _gpus() -> list[str]:
    """Return the model name of every NVIDIA GPU; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def _cpu_model() -> str:
    """Return the processor's model name from ``/proc/cpuinfo``; the architecture if the file contains none."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
