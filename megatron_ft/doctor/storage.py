"""File system checks of the run's folder: can it be written, locked and flushed, how fast, and is space left?"""

import fcntl
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.doctor.findings import Finding, amount, error, info, warning
from megatron_ft.doctor.needs import JobNeeds

NUM_FLUSHES = 9
"""Number of flushes; their median is reported."""
_BLOCK = b"x" * 4096
SMALLEST_FLUSH_SECONDS = 10e-6
"""Lower bound of a real flush: a faster one has not reached the storage. NVMe drives with protected caches take about
20 us."""
VOLATILE = ("tmpfs", "ramfs", "devtmpfs")
"""File systems in memory."""
UNSAFE_OPTIONS = ("nobarrier", "barrier=0", "volatile")
"""Mount options that let fsync return before the bytes are safe: ext4(5) and xfs(5) of their time; overlayfs, kernel
documentation, section "Volatile mount"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """Observations of the file system of ``run.dir``."""

    folder: str
    """Tested folder: ``run.dir``, or its nearest existing parent."""
    file_system: str
    options: tuple[str, ...]
    free_bytes: int
    flush_seconds: tuple[float, ...]
    """Seconds of each write of 4096 bytes with its fsync."""
    failure: str | None = None
    """First operation that failed (create, write, fsync, lock, rename, fsync of the folder); the rest was not tried."""
    preloaded: str = ""
    """Value of ``LD_PRELOAD``."""


def observe_storage(needs: JobNeeds) -> StorageFacts:
    """Observe the file system: write and remove one small file next to the run's folder."""
    folder = Path(needs.run_dir).absolute()
    # The check must not make ``run.dir``: it may be run where the job is only prepared.
    while not folder.is_dir():
        folder = folder.parent
    file_system, options = mount_of(folder.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    room, seconds, failure = os.statvfs(folder), list[float](), None
    try:
        for elapsed in _try(folder):
            seconds.append(elapsed)
    except OSError as reason:
        failure = str(reason)
    return StorageFacts(
        folder=str(folder),
        file_system=file_system,
        options=options,
        free_bytes=room.f_bavail * room.f_frsize,
        flush_seconds=tuple(seconds),
        failure=failure,
        preloaded=os.environ.get("LD_PRELOAD", ""),
    )


def _try(folder: Path) -> Iterable[float]:
    # Perform a run's operations on files in a temporary folder; yield the seconds of each flush.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
        path = Path(scratch) / "flushed"
        with path.open("wb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for _ in range(NUM_FLUSHES):
                begin = time.perf_counter()
                file.write(_BLOCK)
                os.fsync(file.fileno())
                yield time.perf_counter() - begin
        path.replace(path.with_name("renamed"))
        descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def mount_of(path: Path, mountinfo: str) -> tuple[str, tuple[str, ...]]:
    """(type, options) of the file system that ``path`` is on. Source: proc_pid_mountinfo(5)."""
    best = -1
    found: tuple[str, tuple[str, ...]] = ("unknown", ())
    for line in mountinfo.splitlines():
        fields, _, after = line.partition(" - ")
        words, (kind, _, superblock) = fields.split(), after.split(maxsplit=2)
        point = Path(words[4].replace("\\040", " "))
        # A later line of equal length is mounted over the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), (kind, (*words[5].split(","), *superblock.split(",")))
    return found


def check_storage(facts: StorageFacts, needs: JobNeeds) -> list[Finding]:
    """Run all checks of storage."""
    if facts.failure is not None:
        what = f"run.dir={needs.run_dir}: {facts.folder} ({facts.file_system}): {facts.failure}"
        return [error("fsync", what, "choose a folder that can be written, locked and flushed (run.dir)")]
    return [*_check_flushes(facts, needs), *_check_room(facts, needs)]


def _check_flushes(facts: StorageFacts, needs: JobNeeds) -> list[Finding]:
    median = statistics.median(facts.flush_seconds)
    took = f"median {1e3 * median:.3f} ms of {len(facts.flush_seconds)} on {facts.file_system}"
    where = f"run.dir={needs.run_dir}"
    found = [info("fsync", f"{where}: {took}")]
    elsewhere = "put run.dir on storage that outlives the machine"
    unsafe = [option for option in facts.options if option in UNSAFE_OPTIONS]
    if facts.file_system in VOLATILE:
        what = f"{where}: is in memory ({facts.file_system}): checkpoints and decisions are lost with the machine"
        found.append(warning("fsync", what, elsewhere))
    elif unsafe or "eatmydata" in facts.preloaded:
        cause = f"mounted with {', '.join(unsafe)}" if unsafe else f"LD_PRELOAD={facts.preloaded}"
        what = f"{where}: fsync returns before bytes are safe ({cause})"
        found.append(warning("fsync", what, f"mount it without, or unset LD_PRELOAD; else {elsewhere}"))
    # The median: one flush in nine may be slow for other reasons.
    elif median < SMALLEST_FLUSH_SECONDS:
        what = f"{where}: fsync seems to do nothing ({took}): no storage is so fast"
        found.append(warning("fsync", what, f"ask its administrator whether fsync is honoured; else {elsewhere}"))
    return found


def _check_room(facts: StorageFacts, needs: JobNeeds) -> list[Finding]:
    kept = needs.num_checkpoints * needs.checkpoint_bytes + needs.persisted_bytes
    what = f"run.dir={needs.run_dir}: {amount(facts.free_bytes)} free; "
    more = "free some, choose another, or lower checkpoint.keep_last and snapshot.keep_persisted"
    if needs.num_checkpoints and facts.free_bytes < needs.checkpoint_bytes:
        return [error("disk", f"{what}one checkpoint takes {amount(needs.checkpoint_bytes)}", more)]
    if facts.free_bytes < kept:
        return [warning("disk", f"{what}checkpoints and windows of this run take up to {amount(kept)}", more)]
    return [info("disk", f"{what}checkpoints and windows of this run take up to {amount(kept)}")]
