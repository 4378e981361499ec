"""Runs a function on every rank of a small job on one device. Most stages of ``tools/gpu_day.py`` run ``train``.

``python -m tools.gpu.ranks SPEC OUT`` runs jobs in another interpreter. On a machine with a GPU, the reference job on
the CPU needs its own interpreter, because one process cannot train on the CPU and on the GPU.
"""

import dataclasses
import importlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict, to_dict
from megatron_ft.control.ports import free_port

if TYPE_CHECKING:
    from megatron_ft.mcore.training.engine import TrainingEngine

ROOT = Path(__file__).resolve().parents[2]
NUM_ITERATIONS = 5
JOB_SECONDS = 120.0
"""Time limit, in seconds, of a job that runs in another interpreter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rank of a process in a job, with the number of ranks and the port that the process needs to join the job."""

    rank: int
    world_size: int
    port: int
    """Port of the rendezvous store, which runs in the process of rank 0."""


class RankProcess:
    """One rank of a job: a process forked from this process, and a pipe to it."""

    def __init__(self, entry: str, place: Place, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.rank = place.rank
        self.process = fork.Process(target=_be_rank, args=(entry, place, dict(arguments), dict(environment), theirs))
        self.process.start()
        theirs.close()

    def receive(self, deadline: float) -> Any:
        """Receive the next report of the rank.

        Raises:
            RuntimeError: the rank raised an exception (the message contains its traceback), ended, or reported nothing
                until the deadline.
        """
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            raise RuntimeError(f"rank {self.rank} did not report in time")
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join(5.0)
            raise RuntimeError(f"rank {self.rank} ended with exit code {self.process.exitcode}") from None
        if "error" in answer:
            raise RuntimeError(f"rank {self.rank}: {answer['error']}")
        return answer["result"]

    def end(self) -> None:
        """Kill the rank's process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def start_ranks(
    entry: str, *, world_size: int, arguments: Mapping[str, Any], environments: Sequence[Mapping[str, str]] = ()
) -> list[RankProcess]:
    """Fork a process for each rank. Each process calls the function ``entry`` (``module:function``) with its ``Place``
    (rank and port), its pipe to this process, and ``arguments``."""
    port = free_port("127.0.0.1")
    places = [Place(rank=rank, world_size=world_size, port=port) for rank in range(world_size)]
    sets = environments or [{}] * world_size
    return [RankProcess(entry, place, arguments, sets[place.rank]) for place in places]


def run_ranks(
    entry: str,
    *,
    world_size: int,
    arguments: Mapping[str, Any],
    seconds: float,
    environments: Sequence[Mapping[str, str]] = (),
) -> list[Any]:
    """Run all ranks until they end. Return their results in rank order.

    Raises:
        RuntimeError: a rank raised an exception, ended or took longer than ``seconds``. The message names the rank that
            failed first.
    """
    deadline = time.monotonic() + seconds
    ranks = start_ranks(entry, world_size=world_size, arguments=arguments, environments=environments)
    try:
        return receive_all(ranks, deadline)
    finally:
        for rank in ranks:
            rank.end()


def receive_all(ranks: Sequence[RankProcess], deadline: float) -> list[Any]:
    """Receive the next report of each rank, in rank order.

    Raises:
        RuntimeError: a rank raised an exception, ended, or reported nothing until the deadline. The message names the
            rank that failed first, because other ranks may only be waiting for that rank.
    """
    waiting, results = {rank.pipe: rank for rank in ranks}, {}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(str(rank.rank) for rank in waiting.values())
            raise RuntimeError(f"{names} did not report in time (the job has {len(ranks)} ranks)")
        for pipe in ready:
            rank = waiting.pop(pipe)
            results[rank.rank] = rank.receive(deadline)
    return [results[rank.rank] for rank in ranks]


def run_apart(
    jobs: Mapping[str, Mapping[str, Any]], *, folder: Path, seconds: float, sees_gpu: bool = False
) -> dict[str, list[Any]]:
    """Train jobs in another interpreter. Map the name of each job to the results of its ranks.

    Args:
        jobs: Maps the name of each job to ``config``, ``world_size`` and optionally ``environments``, a list with the
            environment variables of each rank.
        sees_gpu: If False, the jobs run on the CPU even on a machine with a GPU.

    Raises:
        RuntimeError: a job failed. The message contains the end of the job's output.
    """
    spec, out = folder / "jobs.json", folder / "jobs-done.json"
    spec.write_text(json.dumps(jobs), encoding="utf-8")
    command = [sys.executable, "-m", "tools.gpu.ranks", str(spec), str(out)]
    environment = {**os.environ, **({} if sees_gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"training in a separate interpreter failed: {done.stderr[-2000:]}")
    results: dict[str, list[Any]] = json.loads(out.read_text(encoding="utf-8"))
    return results


def _be_rank(
    entry: str, place: Place, arguments: dict[str, Any], environment: dict[str, str], pipe: Connection
) -> None:
    os.environ.update(environment)
    module, _, function = entry.partition(":")
    try:
        answer = {"result": getattr(importlib.import_module(module), function)(place, pipe, **arguments)}
    except BaseException:  # noqa: BLE001 - the stage gets the traceback and raises an error
        answer = {"error": traceback.format_exc()[-3000:]}
    pipe.send(answer)
    sys.stdout.flush()
    os._exit(0)  # process groups with lost ranks would block an orderly exit


def config_for(device_type: str, overrides: Mapping[str, Any], *, world_size: int = 1) -> dict[str, Any]:
    """Return the configuration of a small job on a device, as the argument ``config`` of ``train``."""
    from megatron_ft.testing.engines import micro_config

    device = {"training.device": device_type, "launch.ranks_per_gpu": world_size}
    return to_dict(micro_config({**overrides, **device}, world_size=world_size))


def open_engine(place: Place, job: JobConfig) -> "TrainingEngine":
    """Make this process the rank ``place.rank`` of ``job``. Return the rank's ``TrainingEngine``, which trains on
    generated samples."""
    import torch.distributed as dist

    from megatron_ft.mcore.device.install import install, take_device
    from megatron_ft.mcore.rank_main import _prepare_process
    from megatron_ft.planning.rank_environment import rank_environment
    from megatron_ft.testing.engines import VOCAB_SIZE, MadeUpSamples

    for name, value in rank_environment(job, place.rank).items():
        os.environ.setdefault(name, value)
    device = take_device(job, node=0, local_rank=place.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device_type, transformer_impl = install(job)
    _prepare_process(job)
    from megatron_ft.mcore.groups import Groups
    from megatron_ft.mcore.training.engine import TrainingEngine

    groups = Groups.form(
        job.parallel,
        store=dist.TCPStore("127.0.0.1", place.port, place.world_size, is_master=place.rank == 0),
        rank=place.rank,
        world_size=place.world_size,
        generation=0,
        device=device_type,
        timeout_seconds=60,
    )
    samples = MadeUpSamples(job.model.seq_length)
    engine = TrainingEngine(
        job,
        device=device,
        transformer_impl=transformer_impl,
        vocab_size=VOCAB_SIZE,
        samples={"train": samples, "valid": samples},
    )
    engine.build(groups)
    return engine


def train(place: Place, pipe: Connection, *, config: dict[str, Any]) -> dict[str, Any]:
    """Train ``NUM_ITERATIONS`` iterations on the configured device. Return losses, gradient norms, expert load, a
    digest of the state, durations of the iterations, and further results."""
    import torch

    engine = open_engine(place, from_dict(config))
    from megatron_ft.mcore.state.tensors import state_digest

    votes, seconds = [], []
    for number in range(1, NUM_ITERATIONS + 1):
        began = time.perf_counter()
        votes.append(engine.run_iteration(number).vote)
        seconds.append(round(time.perf_counter() - began, 4))
    return {
        "device": engine.device.type,
        "transformer_impl": engine.transformer_impl,
        "losses": [vote.loss for vote in votes],
        "grad_norms": [vote.grad_norm for vote in votes],
        "aux_losses": [vote.aux_loss for vote in votes],
        "load": engine.expert_load().tolist(),
        "evaluation": engine.evaluate(),
        "digest": state_digest(engine.model_chunks, engine.optimizer),
        "peak_bytes": torch.cuda.max_memory_allocated() if engine.device.type == "cuda" else 0,
        "seconds": seconds,
    }


def bits(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a rank's training result that must be bit-identical if the same job runs twice."""
    return {name: result[name] for name in ("losses", "grad_norms", "aux_losses", "load", "evaluation", "digest")}


def difference(result: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest relative difference of all losses and gradient norms of two results; infinity for a NaN."""
    pairs = [
        pair
        for name in ("losses", "grad_norms", "aux_losses")
        for pair in zip(result[name], expected[name], strict=True)
    ]
    distances = [abs(mine - other) / max(abs(other), 1e-12) for mine, other in pairs]
    return math.inf if any(map(math.isnan, distances)) else max(distances)


def main(arguments: Sequence[str]) -> int:
    """Train the jobs that a JSON file describes, and write the results of their ranks to another file."""
    from megatron_ft.mcore.rank_main import warm, warm_cuda
    from tools.gpu.day import find_device_type

    spec, out = map(Path, arguments)
    (warm_cuda if find_device_type() == "cuda" else warm)()
    results = {
        name: run_ranks(
            "tools.gpu.ranks:train",
            world_size=job["world_size"],
            arguments={"config": job["config"]},
            environments=job.get("environments", ()),
            seconds=JOB_SECONDS,
        )
        for name, job in json.loads(spec.read_text(encoding="utf-8")).items()
    }
    out.write_text(json.dumps(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
