"""Stage ``facts`` of ``tools/gpu_day.py``, a series of tests on a GPU: reports software versions and import times, and
measures the speed of copies and matrix products, which limits the results of other stages."""

import mmap
import os
import resource
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import hardware
from megatron_ft.mcore.device.common import num_visible_gpus
from megatron_ft.snapshot.capture import capture
from tools.gpu import warm
from tools.gpu.day import Day
from tools.gpu.timing import seconds_of, synchronize

GIB = 1 << 30
COPY_BYTES, SHORT_COPY_BYTES = GIB, 8 << 20
PRODUCT_SIZE, SHORT_PRODUCT_SIZE = 8192, 256
_TICK_SECONDS = 0.001


def run(day: Day) -> None:
    """Report versions and the duration of imports, and measure speeds of copies and matrix products."""
    day.record(hardware=hardware.describe(), software=_software(), limits=_limits())
    with day.part("imports"):
        _imports(day)
    with day.part("the devices"):
        found = num_visible_gpus()
        day.record(visible_gpus=found)
        day.check(
            (found > 0) == day.has_gpu,
            f"the driver's files show {found} GPUs, but torch reports the device {day.device_type}",
        )
    device = torch.device(day.device_type)
    with day.part("the device's context"):
        began = time.perf_counter()
        synchronize(torch.ones(1, device=device).device)
        day.record(context_seconds=time.perf_counter() - began)
    num_bytes = COPY_BYTES if day.has_gpu else SHORT_COPY_BYTES
    with day.part("copies to the host"):
        day.record(to_host=_copies_to_host(device, num_bytes))
    with day.part("memory of a file"):
        day.record(mapped_file=_mapped_file(device, num_bytes))
    with day.part("ceilings"):
        day.record(ceilings=_ceilings(device, num_bytes, PRODUCT_SIZE if day.has_gpu else SHORT_PRODUCT_SIZE))


def _software() -> dict[str, Any]:
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": _last_line("nvcc", "--version"),
        "has_mps": shutil.which("nvidia-cuda-mps-control") is not None,
        "has_sanitizer": shutil.which("compute-sanitizer") is not None,
    }


def _first_line(*command: str) -> str | None:
    lines = _output(command)
    return lines[0] if lines else None


def _last_line(*command: str) -> str | None:
    lines = _output(command)
    return lines[-1] if lines else None


def _output(command: tuple[str, ...]) -> list[str]:
    """Return the lines that a command prints. Return an empty list if its program is not installed or fails."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def _limits() -> dict[str, Any]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "locked_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "shared_memory_huge_pages": huge.read_text(encoding="utf-8").strip() if huge.exists() else None,
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    }


def _imports(day: Day) -> None:
    """Report how long imports take, and check that they leave the process in a state that can be forked."""
    day.record(import_seconds=warm.seconds)
    day.check(not warm.problem, f"imports failed: {warm.problem}")
    day.check(not torch.cuda.is_initialized(), "imports have initialised CUDA, so ranks cannot be forked")
    # The parent process is the fork server, unless the fork server could not run (``runner._start``).
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    day.record(fork_server_threads=threads)
    day.check(threads == 1, f"{threads} threads run after the imports, so the process must not be forked")


def _copies_to_host(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Measure the bytes per second of copies from the device to the host: into pageable memory, into pinned memory, and
    as ``capture.capture_bandwidth`` measures them in jobs."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    targets = {"pageable": torch.ones(num_bytes, dtype=torch.uint8)}
    if device.type == "cuda":
        targets["pinned"] = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    rates = {}
    for name, target in targets.items():
        rates[name] = num_bytes / seconds_of(lambda target=target: target.copy_(source, non_blocking=True), device)
    opened = capture.open_copier(device)
    rates["capture_bandwidth"] = capture.capture_bandwidth(device, opened)
    opened.close()
    return rates


def _mapped_file(device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Measure seconds per GiB to allocate a memory file, and bytes per second of copies from the device into it. On a
    GPU, also measure seconds per GiB to pin the file, and whether other threads run meanwhile."""
    descriptor = os.memfd_create("facts")
    try:
        os.ftruncate(descriptor, num_bytes)
        began = time.perf_counter()
        mapped = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        populated = time.perf_counter() - began
    finally:
        os.close(descriptor)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    figures: dict[str, Any] = {"populate_seconds_per_gib": populated * GIB / num_bytes}
    if device.type == "cuda":
        with _Ticks() as ticks:
            began = time.perf_counter()
            capture.pin(memory)
            pinned = time.perf_counter() - began
        figures["pin_seconds_per_gib"] = pinned * GIB / num_bytes
        figures["other_threads_ran_while_pinning"] = ticks.longest_seconds < 0.5 * pinned
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    seconds = seconds_of(partial(memory.copy_, source, non_blocking=True), device)
    figures["bytes_per_second"] = num_bytes / seconds
    figures["content_is_right"] = bool((memory == 1).all())
    if device.type == "cuda":
        capture.unpin(memory)
    del memory
    mapped.close()
    return figures


class _Ticks:
    """Measures the longest pause of a second thread during a ``with`` block, in ``longest_seconds``."""

    def __enter__(self) -> "_Ticks":
        self.longest_seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _count(self) -> None:
        last, is_over = time.perf_counter(), False
        while not is_over:
            is_over = self._ended.wait(_TICK_SECONDS)
            now = time.perf_counter()
            self.longest_seconds, last = max(self.longest_seconds, now - last), now


def _ceilings(device: torch.device, num_bytes: int, size: int) -> dict[str, float]:
    """Measure the memory bandwidth of the device in bytes per second, and the rate of a bf16 matrix product in
    operations per second."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return {
        "copy_bytes_per_second": 2 * num_bytes / seconds_of(lambda: target.copy_(source), device),
        "bf16_operations_per_second": 2 * size**3 / seconds_of(lambda: left @ right, device),
    }
