"""Checks of the run folder's file system: writing, locking and syncing files, sync time, and the free space."""

import fcntl
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.doctor.findings import Finding
from megatron_ft.doctor.needs import JobNeeds
from megatron_ft.formatting import memory_size

NUM_FLUSHES = 9
"""Number of syncs (write and fsync) that are measured. The median of their durations is reported."""
_BLOCK = b"x" * 4096
SMALLEST_FLUSH_SECONDS = 10e-6
"""Shortest plausible duration of a sync to storage. Fast NVMe drives (power-protected cache) need about 20 us."""
VOLATILE = ("tmpfs", "ramfs", "devtmpfs")
"""Types of file systems that keep files only in memory."""
UNSAFE_OPTIONS = ("nobarrier", "barrier=0", "volatile")
"""Mount options with which fsync returns before the bytes are on storage. Sources: earlier versions of ext4(5) and
xfs(5); overlayfs in the kernel documentation, section "Volatile mount"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """Observed properties of the file system of ``run.dir``."""

    folder: str
    """Folder in which the checks wrote files: ``run.dir``, or its nearest parent that exists."""
    file_system: str
    options: tuple[str, ...]
    free_bytes: int
    flush_seconds: tuple[float, ...]
    """Duration of each write of 4096 bytes with its fsync, in seconds."""
    failure: str | None = None
    """Operation that failed (create, write, fsync, lock, rename or fsync of the folder), with its error. None if none
    failed. The operations after a failed operation were not tried."""
    preloaded: str = ""
    """Value of the environment variable ``LD_PRELOAD``."""

    def check(self, needs: JobNeeds) -> list[Finding]:
        """Check whether the file system is writable, durable and fast, and has enough free space."""
        if self.failure is not None:
            what = f"run.dir={needs.run_dir}: {self.folder} ({self.file_system}): {self.failure}"
            return [
                Finding.error("fsync", what, "set run.dir to a folder in which files can be written, locked and synced")
            ]
        return [*_check_flushes(self, needs), *_check_room(self, needs)]

    @classmethod
    def observe(cls, needs: JobNeeds) -> "StorageFacts":
        """Observe the file system of ``run.dir``: write, sync and delete one small file."""
        folder = Path(needs.run_dir).absolute()
        # The check must not create ``run.dir``, because it may run on a machine that only prepares the job.
        while not folder.is_dir():
            folder = folder.parent
        file_system, options = _mount_of(folder.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
        room, seconds, failure = os.statvfs(folder), list[float](), None
        try:
            for elapsed in _try(folder):
                seconds.append(elapsed)
        except OSError as reason:
            failure = str(reason)
        return cls(
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


def _mount_of(path: Path, mountinfo: str) -> tuple[str, tuple[str, ...]]:
    """Return the type and the mount options of the file system of ``path``. Source: proc_pid_mountinfo(5)."""
    best = -1
    found: tuple[str, tuple[str, ...]] = ("unknown", ())
    for line in mountinfo.splitlines():
        fields, _, after = line.partition(" - ")
        words, (kind, _, superblock) = fields.split(), after.split(maxsplit=2)
        point = Path(words[4].replace("\\040", " "))
        # If two lines have the same mount point, the file system of the later line is mounted over the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), (kind, (*words[5].split(","), *superblock.split(",")))
    return found


def _check_flushes(facts: StorageFacts, needs: JobNeeds) -> list[Finding]:
    median = statistics.median(facts.flush_seconds)
    took = f"{1e3 * median:.3f} ms, the median of {len(facts.flush_seconds)} syncs on {facts.file_system}"
    where = f"run.dir={needs.run_dir}"
    found = [Finding.info("fsync", f"{where}: {took}")]
    elsewhere = "put run.dir on storage that outlives the machine"
    unsafe = [option for option in facts.options if option in UNSAFE_OPTIONS]
    if facts.file_system in VOLATILE:
        what = f"{where}: is in memory ({facts.file_system}): checkpoints and the journal are lost with the machine"
        found.append(Finding.warning("fsync", what, elsewhere))
    elif unsafe or "eatmydata" in facts.preloaded:
        cause = f"mounted with {', '.join(unsafe)}" if unsafe else f"LD_PRELOAD={facts.preloaded}"
        what = f"{where}: fsync returns before bytes are safe ({cause})"
        fix = f"mount the file system without {', '.join(unsafe)}, or {elsewhere}" if unsafe else "unset LD_PRELOAD"
        found.append(Finding.warning("fsync", what, fix))
    # The median is used, because single syncs may be slow for other reasons.
    elif median < SMALLEST_FLUSH_SECONDS:
        what = f"{where}: fsync seems to have no effect: no storage is so fast ({took})"
        found.append(
            Finding.warning("fsync", what, f"ask the administrator whether fsync has an effect; if not, {elsewhere}")
        )
    return found


def _check_room(facts: StorageFacts, needs: JobNeeds) -> list[Finding]:
    kept = needs.num_checkpoints * needs.checkpoint_bytes + needs.persisted_bytes
    what = f"run.dir={needs.run_dir}: {memory_size(facts.free_bytes)} free; "
    more = "free space, choose another run.dir, or lower checkpoint.keep_last and snapshot.keep_persisted"
    if needs.num_checkpoints and facts.free_bytes < needs.checkpoint_bytes:
        return [Finding.error("disk", f"{what}one checkpoint needs {memory_size(needs.checkpoint_bytes)}", more)]
    if facts.free_bytes < kept:
        return [Finding.warning("disk", f"{what}checkpoints and snapshot windows may need {memory_size(kept)}", more)]
    return [Finding.info("disk", f"{what}checkpoints and snapshot windows may need {memory_size(kept)}")]
