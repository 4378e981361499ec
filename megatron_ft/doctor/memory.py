"""Checks whether the machine's memory and process limits are sufficient for the job.

Windows of snapshots are in memory files (memfd_create(2)). Memory files count as memory of the snapshot server's
cgroup, and the limit on file sizes applies to them. Only NCCL needs ``/dev/shm`` and locked memory.
"""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.control.node.kept import held_bytes
from megatron_ft.control.rundir import RUN_ID_NAME, RunId
from megatron_ft.doctor.findings import Finding
from megatron_ft.doctor.needs import JobNeeds
from megatron_ft.formatting import counted, memory_size

USABLE_SHARE = 0.9
"""Largest share of the node's available memory that a snapshot server allocates (``snapshot/server/memory.py``)."""
NCCL_SHARED_BYTES = 1 << 30
"""Size of ``/dev/shm`` that NVIDIA recommends for containers with several GPUs: ``--shm-size=1g --ulimit memlock=-1``.
Source: NCCL user guide, "Troubleshooting", "Shared memory"."""
SPARE_DESCRIPTORS = 256
"""Estimated number of file descriptors of a rank, without those of its connections to other ranks."""
GLOO_GROUPS = 25
"""Largest number of process groups of a rank on CPU. In each group, gloo connects a rank to every other member.
Megatron-Core creates about this many groups, most of them with few ranks."""
_UNLIMITED = resource.RLIM_INFINITY
_CGROUP_UNLIMITED = 1 << 62
"""Smallest limit of cgroup version 1 that means "no limit". Kernels use values near 2**63 for "no limit"."""
_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "file_size": resource.RLIMIT_FSIZE,
    "address_space": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
    "locked": resource.RLIMIT_MEMLOCK,
}
_FLAGS = {"file_size": "-f", "address_space": "-v", "data": "-d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Observed memory and limits, in bytes. A limit of None means that there is no limit."""

    total_bytes: int
    available_bytes: int
    """Memory that can be allocated without swapping, as the kernel estimates it."""
    cgroup_limit_bytes: int | None
    cgroup_used_bytes: int
    """Memory use of the cgroup whose limit is ``cgroup_limit_bytes``, except reclaimable memory; 0 without a limit."""
    limits: Mapping[str, tuple[int | None, int | None]]
    """Soft and hard limit of each resource: ``open_files``, ``file_size``, ``address_space``, ``data``, ``locked``."""
    shared_total_bytes: int | None
    """Size of ``/dev/shm``; None if it does not exist."""
    shared_free_bytes: int | None
    has_infiniband: bool
    kept_bytes: int = 0
    """Memory of snapshot servers that still run after earlier jobs of this run. The next job reuses or ends them."""

    def check(self, needs: JobNeeds) -> list[Finding]:
        """Check memory, and limits on file sizes, address space, open files and locked memory."""
        return [
            *_check_fits(self, needs),
            *_check_sizes(self, needs),
            *_check_open_files(self, needs),
            *_check_nccl(self, needs),
        ]

    @classmethod
    def observe(cls, root: Path = Path("/"), *, run: Path | None = None) -> "MemoryFacts":
        """Observe memory and limits.

        Args:
            root: parent of ``proc``, ``sys`` and ``dev``.
            run: folder of the run; None for a new run.
        """
        import psutil

        memory, limit = psutil.virtual_memory(), _cgroup_limit(root)
        shared = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
        fabric = root / "sys/class/infiniband"
        return cls(
            total_bytes=memory.total,
            available_bytes=memory.available,
            cgroup_limit_bytes=None if limit is None else limit[0],
            cgroup_used_bytes=0 if limit is None else limit[1],
            limits={name: _limit(number) for name, number in _LIMITS.items()},
            shared_total_bytes=None if shared is None else shared.f_blocks * shared.f_frsize,
            shared_free_bytes=None if shared is None else shared.f_bavail * shared.f_frsize,
            has_infiniband=fabric.is_dir() and any(fabric.iterdir()),
            kept_bytes=0 if run is None or not (run / RUN_ID_NAME).exists() else held_bytes(RunId.read(run).run_id),
        )


def _limit(number: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(number)
    return None if soft == _UNLIMITED else soft, None if hard == _UNLIMITED else hard


def _cgroup_limit(root: Path) -> tuple[int, int] | None:
    """Return memory limit and memory use of one cgroup of this process: the cgroup in which the least memory is left.
    Return None if no cgroup of this process has a limit.

    Source: cgroups(7); kernel documentation, "Control Group v2", ``memory.max`` and ``memory.stat``, and "Memory
    Resource Controller" of version 1. In a container, the container's own cgroup is mounted at the top folder, whatever
    path ``/proc/self/cgroup`` gives. So the top folder is always read, too.
    """
    found: list[tuple[int, int]] = []
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used, given_back = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            # Version 1 counts subgroups only in the fields with this prefix.
            given_back = "total_inactive_file"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (root / top / each for each in (group, *group.parents)):
            if (folder / limit).exists() and (text := (folder / limit).read_text().strip()) != "max":
                # The kernel drops inactive file pages before it refuses memory.
                kept = int((folder / used).read_text()) - _statistic(folder / "memory.stat", given_back)
                found.append((int(text), max(0, kept)))
    limited = [each for each in found if each[0] < _CGROUP_UNLIMITED]
    # The cgroup with the least memory left stops the process first, not the one with the lowest limit.
    return min(limited, default=None, key=lambda each: each[0] - each[1])


def _statistic(path: Path, name: str) -> int:
    words = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return next((int(value) for key, value in words if key == name), 0)


def _check_fits(facts: MemoryFacts, needs: JobNeeds) -> list[Finding]:
    needed, for_servers = needs.host_bytes * needs.nodes_here, needs.snapshot_server_bytes * needs.nodes_here
    limit, free, whose = facts.total_bytes, facts.available_bytes, "the machine"
    if facts.cgroup_limit_bytes is not None and facts.cgroup_limit_bytes < limit:
        limit, whose = facts.cgroup_limit_bytes, "the control group (container, Slurm step) of this shell"
        free = min(free, limit - facts.cgroup_used_bytes)
    free += facts.kept_bytes
    nodes = f"{needs.nodes_here} nodes on this machine need" if needs.nodes_here > 1 else "1 node on this machine needs"
    of_it = f", {memory_size(for_servers)} of it for snapshot windows and their copies" if for_servers else ""
    has = f"{whose} has {memory_size(limit)}, of which {memory_size(free)} are free"
    if facts.kept_bytes:
        has += f" (including {memory_size(facts.kept_bytes)} in snapshot servers of earlier jobs of this run)"
    what = f"{nodes} {memory_size(needed)}{of_it} (estimated); {has}"
    less = "lower launch.ranks_per_node or the model's size, or spread the job over more machines"
    if for_servers:
        less += "; to save memory for windows, first lower snapshot.num_peer_copies"
    if needed > limit:
        return [Finding.error("memory", what, less)]
    if for_servers > free * USABLE_SHARE:
        what += ", too little for snapshot servers"
        return [Finding.error("memory", what, f"end processes that use memory, or {less}")]
    if needed > free:
        return [Finding.warning("memory", what, f"end processes that use memory, or {less}")]
    return [Finding.info("memory", what)]


def _check_sizes(facts: MemoryFacts, needs: JobNeeds) -> list[Finding]:
    rank_bytes = needs.host_bytes // needs.ranks_per_node
    file_bytes = max(needs.largest_file_bytes, needs.checkpoint_bytes // needs.world_size)
    found = []
    for name, needed, of_what in (
        ("file_size", file_bytes, "a file of a snapshot window or checkpoint may need"),
        ("address_space", rank_bytes, "a rank needs at least"),
        ("data", rank_bytes, "a rank needs at least"),
    ):
        soft, hard = facts.limits[name]
        if soft is None or soft >= needed:
            continue
        what = f"ulimit {_FLAGS[name]} allows {memory_size(soft)}; {of_what} {memory_size(needed)}"
        found.append(Finding.error("limits", what, _raise(f"ulimit {_FLAGS[name]} unlimited", hard, None)))
    return found


def _raise(command: str, hard: int | None, needed: int | None) -> str:
    """Return advice on raising a limit: run ``command``. If the hard limit forbids it, ask the administrator first."""
    if hard is None or (needed is not None and needed <= hard):
        return f"run {command} in the shell or script that starts the job"
    return f"ask the administrator to raise the hard limit (/etc/security/limits.conf, slurmd), then run {command}"


def _check_open_files(facts: MemoryFacts, needs: JobNeeds) -> list[Finding]:
    # Check the limit on open files. On CUDA, only the process group of the vote is certain to use gloo.
    soft, hard = facts.limits["open_files"]
    peers = needs.world_size - 1
    rank = f"a rank with {counted(peers, 'peer')}"
    least = SPARE_DESCRIPTORS + 2 * peers
    most = SPARE_DESCRIPTORS + (GLOO_GROUPS if needs.device == "cpu" else 4) * peers
    if soft is None or soft >= most:
        shown = "unlimited" if soft is None else f"{soft}"
        return [Finding.info("limits", f"limit of open files: {shown}, which is enough; {rank} needs at most {most}")]
    fix = _raise(f"ulimit -n {most}", hard, most)
    if soft < least:
        return [Finding.error("limits", f"limit of open files: {soft}; {rank} needs at least {least}", fix)]
    return [Finding.warning("limits", f"limit of open files: {soft}; {rank} may need {most}", fix)]


def _check_nccl(facts: MemoryFacts, needs: JobNeeds) -> list[Finding]:
    # Check the requirements of NCCL between GPUs; for a job on CPU they are only reported.
    soft, hard = facts.limits["locked"]
    locked = f"limit of locked memory: {'none' if soft is None else memory_size(soft)}"
    free, total = facts.shared_free_bytes, facts.shared_total_bytes
    shared = (
        "/dev/shm missing"
        if free is None or total is None
        else f"/dev/shm {memory_size(free)} of {memory_size(total)} free"
    )
    if needs.device == "cpu":
        return [Finding.info("limits", f"{locked}, {shared}; a job on CPU needs neither locked memory nor /dev/shm")]
    found = []
    if facts.has_infiniband and soft is not None:
        what = f"{locked}; memory that NCCL registers with InfiniBand counts as locked"
        found.append(Finding.warning("limits", what, _raise("ulimit -l unlimited", hard, None)))
    if needs.ranks_per_node > 1 and (free or 0) < NCCL_SHARED_BYTES:
        what = f"{shared}; NCCL transfers data between GPUs of a machine through /dev/shm"
        fix = "start the container with --shm-size=1g or more, or run mount -o remount,size=1g /dev/shm"
        found.append(Finding.warning("limits", what, fix))
    return found or [Finding.info("limits", f"{locked}, {shared}")]
