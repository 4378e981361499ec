"""Measures the memory and threads of a job's processes from outside, through ``/proc``."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

RANK, KEEPER, AGENT = "rank", "keeper", "agent"
_MODULES = {"megatron_ft.snapshot.server": KEEPER, "megatron_ft.control.node.agent": AGENT}
_FORKSERVER = "megatron_ft.control.node.fork_server"
_MEMFD = "/memfd:"
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Figures of one process at one moment."""

    rss_bytes: int
    num_threads: int
    num_descriptors: int
    memfd_bytes: int
    """Bytes of the memory files (memfd) that the process has open, each file counted once."""

    def to_json(self) -> dict[str, int]:
        """Return the figures as JSON values."""
        return asdict(self)


def processes_of(console: int) -> dict[str, list[psutil.Process]]:
    """Return the living processes of the job of launcher ``console``, by role and in the order of their start.

    Ranks are forked from a fork server that the launcher has started.
    """
    found: dict[str, list[psutil.Process]] = {RANK: [], KEEPER: [], AGENT: []}
    for process in psutil.Process(console).children(recursive=True):
        try:
            words, parent = process.cmdline(), process.parent()
            role = next((_MODULES[word] for word in words if word in _MODULES), None)
            if role is None and _FORKSERVER in words and parent is not None and _FORKSERVER in parent.cmdline():
                role = RANK
        except psutil.NoSuchProcess:
            continue
        if role is not None:
            found[role].append(process)
    return {role: sorted(all_of, key=lambda process: process.pid) for role, all_of in found.items()}


def footprint(process_id: int) -> Footprint | None:
    """Measure a process; None if it has ended."""
    try:
        process = psutil.Process(process_id)
        return Footprint(
            rss_bytes=process.memory_info().rss,
            num_threads=process.num_threads(),
            num_descriptors=process.num_fds(),
            memfd_bytes=sum(memory_files(process_id).values()),
        )
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None


def memory_files(process_id: int) -> dict[int, int]:
    """Return the allocated bytes, by inode, of the memory files that a process has open."""
    found = {}
    folder = Path(f"/proc/{process_id}/fd")
    for name in os.listdir(folder):
        try:
            if os.readlink(folder / name).startswith(_MEMFD):
                status = os.stat(folder / name)
                found[status.st_ino] = status.st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue
    return found


def mapped_bytes(process_id: int, column: str) -> int:
    """Return ``Rss`` or ``Pss`` in bytes of all memory files that a process has mapped (proc_pid_smaps(5))."""
    total, counted = 0, False
    for line in Path(f"/proc/{process_id}/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            counted = _MEMFD in line
        elif counted and first == f"{column}:":
            total += int(rest[0]) * 1024
    return total


def growth_per_sample(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through equally spaced samples."""
    num, mean = len(values), sum(values) / len(values)
    places = [index - (num - 1) / 2 for index in range(num)]
    return sum(place * (value - mean) for place, value in zip(places, values, strict=True)) / sum(p * p for p in places)


def growth(samples: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return the growth of each figure over the second half of ``samples``, estimated by a line."""
    half = samples[len(samples) // 2 :]
    return {name: growth_per_sample([sample[name] for sample in half]) * (len(half) - 1) for name in half[0]}
