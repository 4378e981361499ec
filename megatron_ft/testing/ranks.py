"""Runs a function in every rank of a small gloo job for tests, and makes the trainers of ranks. The ranks are forked
from this process."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.control.ports import free_port
from megatron_ft.control.rundir import RunId
from megatron_ft.mcore.device.install import install
from megatron_ft.mcore.rank_main import warm
from megatron_ft.testing.jobs import REPOSITORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Number of a rank, with the values that it needs to connect to the other ranks."""

    rank: int
    world_size: int
    master_port: int
    run_dir: Path


RankFunction = Callable[[JobConfig, Rank], Any]


def run_ranks(
    function: RankFunction, config: JobConfig, *, world_size: int, run_dir: Path, timeout_seconds: float = 300.0
) -> list[Any]:
    """Call ``function`` in ``world_size`` forked processes at the same time. Return the results in rank order. A result
    must be a JSON value.

    Raises:
        RuntimeError: a rank raised an exception (the message is its traceback), or gave no result in time.
    """
    warm()
    run_dir.mkdir(parents=True, exist_ok=True)
    RunId.make(run_dir, is_older=False)
    port = free_port("127.0.0.1")
    fork = multiprocessing.get_context("fork")
    ranks = [Rank(rank=rank, world_size=world_size, master_port=port, run_dir=run_dir) for rank in range(world_size)]
    pipes = [fork.Pipe(duplex=False) for _ in ranks]
    processes = [
        fork.Process(target=_run_rank, args=(function, config, rank, pipe[1]))
        for rank, pipe in zip(ranks, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        return [_result(pipe[0], process, timeout_seconds) for pipe, process in zip(pipes, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_rank(function: RankFunction, config: JobConfig, rank: Rank, pipe: Connection) -> None:
    try:
        answer = {"result": function(config, rank)}
    except BaseException:  # noqa: BLE001 - handed to the parent, which raises it
        answer = {"error": traceback.format_exc()}
    pipe.send_bytes(json.dumps(answer).encode())
    os._exit(0)


def _result(pipe: Connection, process: Any, timeout_seconds: float) -> Any:
    if not pipe.poll(timeout_seconds):
        raise RuntimeError(f"{process.name} gave no result within {timeout_seconds} s")
    answer = json.loads(pipe.recv_bytes())
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def compose(*overrides: str) -> JobConfig:
    """Return the configuration that ``pretrain_moe.py`` composes from ``overrides``."""
    from pretrain_moe import compose as compose_job

    config, _ = compose_job([f"data.cache_dir={REPOSITORY / '.cache' / 'data'}", *overrides])
    return config


def with_parallel(config: JobConfig, **sizes: Any) -> JobConfig:
    """Return a copy of ``config`` in which ``sizes`` (values by key) replace values of ``config.parallel``."""
    return replace(config, parallel=replace(config.parallel, **sizes))


class RecordFile:
    """Replaces a rank's connection to its agent. Writes records to a file. Never requests a stop or new membership."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def report(self, record: dict[str, Any]) -> None:
        """Write ``record`` to the file as a JSON line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def progress(self, iteration: int, phase: str) -> None:
        """Write a record with the current iteration and phase of the rank."""
        self.report({"iteration": iteration, "phase": phase})

    def stop_requested(self) -> bool:
        """Return False: no stop of the job is ever requested."""
        return False

    def change_requested(self) -> bool:
        """Return False: the membership of the job never changes."""
        return False

    @property
    def can_survive(self) -> bool:
        """Return False: if a rank is lost, the other ranks end."""
        return False

    def close(self) -> None:
        """Close the file of records."""
        self._file.close()


def join(config: JobConfig, rank: Rank) -> tuple[Any, Any]:
    """Make this process the rank ``rank`` of the job. Return the rank's built trainer and process groups."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    groups, transformer_impl = join_groups(config, rank)
    from megatron_ft.mcore.training.trainer import Trainer

    trainer = Trainer(config, _context(rank), device=torch.device("cpu"), transformer_impl=transformer_impl)
    trainer.build(groups)
    return trainer, groups


def join_groups(config: JobConfig, rank: Rank) -> tuple[Any, str]:
    """Form the process groups of ``rank``, and let torch use one thread in this process. Return the process groups and
    the implementation of transformer layers (``transformer_impl``)."""
    torch.set_num_threads(1)
    _, transformer_impl = install(config)
    from megatron_ft.mcore.groups import Groups

    groups = Groups.form(
        config.parallel,
        store=dist.TCPStore("127.0.0.1", rank.master_port, rank.world_size, is_master=rank.rank == 0),
        rank=rank.rank,
        world_size=rank.world_size,
        generation=0,
        device="cpu",
        timeout_seconds=120.0,
    )
    return groups, transformer_impl


def _context(rank: Rank) -> RankContext:
    return RankContext(
        rank=rank.rank,
        world_size=rank.world_size,
        local_rank=rank.rank,
        node=0,
        num_nodes=1,
        generation=0,
        master_addr="127.0.0.1",
        master_port=rank.master_port,
        run_dir=rank.run_dir,
        resume_from=None,
        worker=RecordFile(rank.run_dir / f"records-{rank.rank}.jsonl"),
    )


def resident_growth(function: Callable[[], object]) -> int:
    """Call ``function``. Return by how many bytes this process's resident memory grew at most during the call."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the maximum of VmRSS
    before = _memory("VmRSS")
    function()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    """Return the field ``name`` of ``/proc/self/status`` in bytes, e.g. ``VmRSS``."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
