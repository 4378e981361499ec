"""Stage ``abort`` of ``tools/gpu_day.py``, a series of tests on a GPU: kills or stops a rank inside an all-reduce.

The other ranks must abort their communicators, continue in the same process, and form groups again without the lost
rank. A stopped rank simulates a rank that was lost behind NVLink or InfiniBand: it does not answer, but no connection
is closed.
"""

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.planning.rank_environment import rank_environment
from tools.gpu import ranks
from tools.gpu.day import Day, describe
from tools.gpu.timing import synchronize
from tools.gpu.transports import Transport, find_transport, join

WORLD_SIZE, SHORT_WORLD_SIZE = 4, 3
NUM_ELEMENTS = 1 << 25
"""Number of elements of the all-reduce in which a rank is lost. This is far more than the buffers of sockets hold, so
the all-reduce cannot complete without the lost rank."""
UNTOUCHED_ELEMENTS, SHORT_UNTOUCHED_ELEMENTS = 1 << 28, 1 << 16
TRIAL_SECONDS = 60.0
BLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
_PAUSE_SECONDS = 0.005


def run(day: Day) -> None:
    """Run a trial with a rank that is killed, and a trial with a rank that is stopped."""
    transport, ours = find_transport(day), surviving()
    for how in SIGNALS:
        with day.part(how):
            day.record(**{how: run_trial(day, transport, how, ours)})
    if day.has_gpu:
        with day.part("stopped, blocking communicators"):
            found = run_trial(day, transport, "stopped", {**ours, **BLOCKING})
            day.record(**{"stopped, blocking communicators": found})
    _record_defaults(day, transport)


def surviving() -> dict[str, str]:
    """Return the environment variables of ranks in a CUDA job that must survive the loss of nodes. With torch's default
    settings, a rank ends when its communicators are aborted."""
    job = JobConfig()
    job.training.device = "cuda"
    job.launch.num_nodes, job.recovery.min_nodes, job.recovery.keep_processes = 2, 1, True
    return rank_environment(job)


def _record_defaults(day: Day, transport: Transport) -> None:
    """Record what a killed rank does to the other ranks with torch's default settings. The results are not checked.
    They show why jobs that must survive the loss of nodes use the settings of ``surviving``."""
    try:
        report: Any = run_trial(day, transport, "killed", {}, judged=False)
    except RuntimeError as error:
        report = describe(error)[-500:]
    day.record(**{"killed, torch's defaults": report})


def run_trial(
    day: Day, transport: Transport, how: str, variables: dict[str, str], *, judged: bool = True
) -> dict[str, Any]:
    """Kill or stop the last rank inside a collective. Return durations and memory sizes, of each the largest value of
    the remaining ranks, and the types of the exceptions that these ranks raised.

    Raises:
        RuntimeError: a remaining rank raised an exception, ended or did not answer.
    """
    world_size = WORLD_SIZE if day.has_gpu else SHORT_WORLD_SIZE
    untouched = UNTOUCHED_ELEMENTS if day.has_gpu else SHORT_UNTOUCHED_ELEMENTS
    deadline = time.monotonic() + min(TRIAL_SECONDS, day.remaining_seconds - 5)
    started = ranks.start_ranks(
        "tools.gpu.abort:be_rank",
        world_size=world_size,
        arguments={"backend": transport.backend, "device_type": day.device_type, "how": how, "untouched": untouched},
        environments=transport.environments(world_size, variables),
    )
    survivors, lost = started[:-1], started[-1]
    try:
        ranks.receive_all(started, deadline)  # all ranks are ready
        for rank in started:
            rank.pipe.send("begin")
        _wait_until_lost(lost, how, deadline)
        for rank in survivors:
            rank.pipe.send("abort")
        aborted = ranks.receive_all(survivors, deadline)
        for rank in survivors:
            rank.pipe.send("form")
        formed = ranks.receive_all(survivors, deadline)
    finally:
        for rank in started:
            rank.end()
    reports = [
        {**one, **other, "same_bits": one["same_bits"] and other["same_bits"]}
        for one, other in zip(aborted, formed, strict=True)
    ]
    if judged:
        _judge(day, how, reports)
    return _slowest(reports)


def _judge(day: Day, how: str, reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        where = f"{how}, rank {rank}"
        day.check(
            report["was_inside"],
            f"{where}: the all-reduce completed before the rank was lost, so the trial shows nothing",
        )
        day.check(report["device_works"], f"{where}: the device computes different results after the abort than before")
        day.check(report["same_bits"], f"{where}: the abort changed tensors that no collective used")
        day.check(report["sum_is_right"], f"{where}: an all-reduce in the new group gives a wrong sum")


def _slowest(reports: list[dict[str, Any]]) -> dict[str, Any]:
    found = {
        name: max(report[name] for report in reports)
        for name in ("abort_seconds", "return_seconds", "form_seconds", "bytes_before", "bytes_after")
    }
    found["abort_and_form_seconds"] = max(report["return_seconds"] + report["form_seconds"] for report in reports)
    return {**found, "survivors": len(reports), "raised": sorted({report["raised"] for report in reports})}


def _wait_until_lost(lost: ranks.RankProcess, how: str, deadline: float) -> None:
    """Wait until the process of rank ``lost`` has ended (``how`` is ``killed``) or is stopped (``stopped``).

    Raises:
        RuntimeError: the rank continued to run.
    """
    while time.monotonic() < deadline:
        if how == "killed" and not lost.process.is_alive():
            return
        if how == "stopped" and _state(lost.process.pid) == "T":
            return
        time.sleep(_PAUSE_SECONDS)
    raise RuntimeError(f"the rank was not {how}")


def _state(process_id: int | None) -> str:
    """Return the state of a process from ``/proc/<pid>/stat``."""
    return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def be_rank(
    place: ranks.Place, pipe: Connection, *, backend: str, device_type: str, how: str, untouched: int
) -> dict[str, Any]:
    """Run one rank of a trial. The last rank is lost in the trial and never returns."""
    import torch
    import torch.distributed as dist

    from megatron_ft.runtime.transport.abort import Transports, open_sockets

    device = torch.device(device_type)
    bystander = torch.arange(untouched, device=device, dtype=torch.int32)
    before = open_sockets()
    store = join(place, backend)
    votes = dist.new_group(backend="gloo")
    transports = Transports.among(open_sockets() - before, store_port=place.port)
    small = torch.ones(8, device=device)
    dist.all_reduce(small)  # communicators are created at their first use
    dist.barrier(group=votes)
    tensor = torch.full((NUM_ELEMENTS,), float(place.rank + 1), device=device)
    bytes_before = _used_bytes(device)
    pipe.send({"result": "ready"})
    pipe.recv()
    if place.rank == place.world_size - 1:
        work = dist.all_reduce(tensor, async_op=True)
        os.kill(os.getpid(), SIGNALS[how])
        work.wait()  # a killed rank does not reach this; a stopped rank does only if it is continued
        raise RuntimeError(f"the rank was not {how}")
    breaker = _Breaker(pipe, transports)
    breaker.start()
    raised = _wait_for(tensor, device)
    returned = time.perf_counter()
    breaker.join()
    expected = place.world_size * (place.world_size + 1) / 2
    del votes
    pipe.send(
        {
            "result": {
                "abort_seconds": breaker.ended - breaker.began,
                "return_seconds": max(returned, breaker.ended) - breaker.began,
                "raised": raised,
                "was_inside": bool(raised) or not bool((tensor == expected).all()),
                "device_works": _device_works(device),
                "same_bits": _is_untouched(bystander),
                "bytes_before": bytes_before,
            }
        }
    )
    pipe.recv()
    began = time.perf_counter()
    survivors = ranks.Place(rank=place.rank, world_size=place.world_size - 1, port=place.port)
    join(survivors, backend, prefix="again", store=store)
    small = torch.ones(8, device=device)
    dist.all_reduce(small)
    synchronize(device)
    return {
        "form_seconds": time.perf_counter() - began,
        "sum_is_right": bool((small == place.world_size - 1).all()),
        "same_bits": _is_untouched(bystander),
        "bytes_after": _used_bytes(device),
    }


class _Breaker(threading.Thread):
    """Thread that, on request, aborts all communicators of this process while the main thread waits in a collective."""

    def __init__(self, pipe: Connection, transports: Any) -> None:
        super().__init__(name="breaker", daemon=True)
        self._pipe, self._transports = pipe, transports
        self.began = self.ended = 0.0

    def run(self) -> None:
        """Wait for the request, then close the connections of gloo and abort the communicators of NCCL."""
        import torch.distributed as dist

        self._pipe.recv()
        self.began = time.perf_counter()
        self._transports.hang_up("a rank is lost")
        dist.distributed_c10d._abort_process_group(None)
        self.ended = time.perf_counter()


def _wait_for(tensor: Any, device: Any) -> str:
    """Run an all-reduce in which one rank is lost. Return the type of the exception that it raises; empty if none."""
    import torch.distributed as dist

    try:
        dist.all_reduce(tensor)
        synchronize(device)
    except Exception as error:  # noqa: BLE001 - a broken collective can raise any exception
        return type(error).__name__
    return ""


def _device_works(device: Any) -> bool:
    import torch

    ones = torch.ones(64, 64, device=device)
    return float((ones @ ones).sum()) == 64.0**3


def _is_untouched(bystander: Any) -> bool:
    import torch

    return bool(torch.equal(bystander, torch.arange(bystander.numel(), device=bystander.device, dtype=torch.int32)))


def _used_bytes(device: Any) -> int:
    """Return the device memory that all processes use. For a CPU, return the memory of this process."""
    import psutil
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return psutil.Process().memory_info().rss
