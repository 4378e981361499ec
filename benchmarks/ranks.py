"""Runs a function as every rank of a small gloo job, forked from this process."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.ports import free_port
from megatron_ft.control.run_id import make_run_id
from megatron_ft.mcore.rank_main import warm


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Inputs of a rank."""

    rank: int
    world_size: int
    master_port: int
    run_dir: Path


RankFunction = Callable[[JobConfig, Rank], Any]


def run_ranks(
    function: RankFunction, config: JobConfig, *, world_size: int, run_dir: Path, timeout_seconds: float = 300.0
) -> list[Any]:
    """Call ``function`` in ``world_size`` processes at once; their JSON-able results, in rank order.

    Raises:
        RuntimeError: a rank raised; the message is its traceback.
    """
    warm()
    run_dir.mkdir(parents=True, exist_ok=True)
    make_run_id(run_dir, is_older=False)
    port = free_port("127.0.0.1")
    fork = multiprocessing.get_context("fork")
    ranks = [Rank(rank=rank, world_size=world_size, master_port=port, run_dir=run_dir) for rank in range(world_size)]
    pipes = [fork.Pipe(duplex=False) for _ in ranks]
    processes = [
        fork.Process(target=_be, args=(function, config, rank, pipe[1]))
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


def _be(function: RankFunction, config: JobConfig, rank: Rank, pipe: Connection) -> None:
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
