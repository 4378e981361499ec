"""The main function of a rank process that ``torchrun`` or ``srun`` started, without agent and controller.

Rank 0 chooses the run folder and a port, and publishes them in a key-value store, which torchrun or rank 0 serves.
Rank 0 also sends its reports to the sinks. Every other rank writes its reports to a file, for example
``logs/rank-00003.records.jsonl``.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import record as record_error

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.launchers.torchrun import RankEnvironment
from megatron_ft.control.node.worker_client import InProcessClient, RankContext, StopFlag
from megatron_ft.control.ports import free_port
from megatron_ft.control.rundir import RunDir
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ControlError, MegatronFtError
from megatron_ft.planning.rank_environment import rank_environment
from megatron_ft.telemetry import SinkSet, open_sinks

RunRank = Callable[[JobConfig, RankContext], bool]
_READERS_POLL_SECONDS = 0.05


def main(config: JobConfig, environment: RankEnvironment, run_rank: RunRank | None = None) -> int:
    """Run this rank, and return its exit code.

    After SIGTERM, SIGINT or SIGUSR1, the rank stops at the end of the iteration. ``srun`` forwards these signals.

    Args:
        run_rank: function that runs the rank, and returns whether the run is complete; None for the training loop.
            Tests pass another function.

    Raises:
        MegatronFtError: the run folder cannot be claimed, or the rank failed.
    """
    if run_rank is None:
        from megatron_ft.mcore.rank_main import run_rank
    faulthandler.enable()
    # CUDA and NCCL read these variables at their first call. Values that the user has set are not changed.
    for name, value in rank_environment(config, environment.rank).items():
        os.environ.setdefault(name, value)
    stop = StopFlag()
    stop.install(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    with _open_store(config, environment, stop) as store:
        claimed = _claim(config, environment, store) if environment.rank == 0 else None
        agreed = _agreed(config, environment, store)
        sinks = None
        if claimed is not None:
            sinks = open_sinks(config, claimed.path, world_size=environment.world_size)
        run = _Rank(config, environment, agreed, stop, sinks, run_rank)
        try:
            return record_error(run)() if environment.launcher == "torchrun" else run()
        finally:
            if claimed is not None:
                claimed.release()


@dataclass
class _Rank:
    """Runs one rank of the job in this process when called, and returns the exit code of the process."""

    config: JobConfig
    environment: RankEnvironment
    agreed: dict[str, Any]
    stop: StopFlag
    sinks: SinkSet | None
    run_rank: RunRank
    __qualname__ = "rank"

    def __call__(self) -> int:
        exit_code, reason, is_complete = 1, "the rank failed", False
        worker = InProcessClient(self._write, stop=self.stop)
        try:
            is_complete = self.run_rank(self.config, self._context(worker))
            interrupted = bool(self.stop) and not is_complete
            exit_code = EXIT_INTERRUPTED if interrupted else EXIT_OK
            reason = "the rank stopped after a signal" if interrupted else "finished"
        except MegatronFtError as error:
            exit_code, reason = error.exit_code, str(error)
            raise
        finally:
            worker.close()
            if self.sinks is not None:
                self.sinks.close(exit_code, reason, is_complete=is_complete)
        return exit_code

    def _context(self, worker: InProcessClient) -> RankContext:
        environment, resume_from = self.environment, self.agreed["resume_from"]
        return RankContext(
            rank=environment.rank,
            world_size=environment.world_size,
            local_rank=environment.local_rank,
            node=environment.node,
            num_nodes=environment.num_nodes,
            generation=0,
            master_addr=environment.master_addr,
            master_port=self.agreed["master_port"],
            run_dir=Path(self.agreed["run_dir"]),
            resume_from=None if resume_from is None else Path(resume_from),
            worker=worker,
        )

    def _write(self, record: dict[str, Any]) -> None:
        if self.sinks is not None:
            self.sinks.write(record)
            return
        path = Path(self.agreed["run_dir"]) / "logs" / f"rank-{self.environment.rank:05d}.records.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def _open_store(config: JobConfig, environment: RankEnvironment, stop: StopFlag) -> Iterator[TCPStore]:
    """Open the store in which rank 0 publishes its decisions. If rank 0 serves the store, it waits at the end of the
    ``with`` block until all other ranks have read them. Raise ControlError if the store does not answer in time."""
    serve = environment.rank == 0 and not environment.store_is_served
    try:
        store = TCPStore(
            environment.master_addr,
            environment.master_port,
            is_master=serve,
            # Rank 0 claims the run folder while other ranks may still be starting.
            wait_for_workers=False,
            timeout=timedelta(seconds=config.launch.start_timeout_seconds),
        )
    except RuntimeError as error:
        where = f"{environment.master_addr}:{environment.master_port}"
        raise ControlError(f"rank {environment.rank} cannot reach the store at {where}: {error}") from error
    try:
        yield store
    finally:
        if serve:
            _outlive_readers(config, environment, store, stop)


def _outlive_readers(config: JobConfig, environment: RankEnvironment, store: TCPStore, stop: StopFlag) -> None:
    """Wait on rank 0, which serves the store, until all other ranks have read its decisions. If rank 0 ended earlier,
    for example because it could not start the run, the others would try to connect to the store until their timeout."""
    deadline = time.monotonic() + config.launch.start_timeout_seconds
    num_others = environment.world_size - 1
    # Adding 0 reads the counter. ``get`` would block until the first rank has increased it.
    while (num_readers := store.add(_readers(environment), 0)) < num_others and not stop:
        if time.monotonic() > deadline:
            print(
                f"rank 0: {num_others - num_readers} of {num_others} other ranks did not start within "
                f"launch.start_timeout_seconds={config.launch.start_timeout_seconds:g}",
                file=sys.stderr,
            )
            return
        threading.Event().wait(_READERS_POLL_SECONDS)


def _claim(config: JobConfig, environment: RankEnvironment, store: TCPStore) -> RunDir:
    try:
        run = config.run
        # torchrun restarts workers with the same store. They continue in the run folder of the first attempt.
        if environment.attempt > 0 and store.check(["megatron_ft/name"]):
            run = replace(run, name=store.get("megatron_ft/name").decode(), resume="auto")
        config_yaml = yaml.safe_dump(to_dict(config), sort_keys=False)
        keeps = config.training.evaluate_only
        claimed = RunDir.claim(run, model_name=config.model.name, config_yaml=config_yaml, keeps_config=keeps)
        store.set("megatron_ft/name", claimed.name)
        agreed = {
            "run_dir": str(claimed.path),
            "resume_from": None if claimed.resume_from is None else str(claimed.resume_from),
            "master_port": free_port(environment.master_addr),
        }
    except MegatronFtError as error:
        # The error is published, too. Otherwise all other ranks would wait for the key until their timeout.
        store.set(_key(environment), json.dumps({"error": str(error)}))
        raise
    store.set(_key(environment), json.dumps(agreed))
    return claimed


def _agreed(config: JobConfig, environment: RankEnvironment, store: TCPStore) -> dict[str, Any]:
    """Read the decisions of rank 0 from the store: ``run_dir``, ``resume_from`` and ``master_port``. Raise ControlError
    if rank 0 could not start the run, or did not publish its decisions in time."""
    try:
        store.wait([_key(environment)], timedelta(seconds=config.launch.start_timeout_seconds))
    except RuntimeError as error:
        raise ControlError(
            f"rank {environment.rank}: rank 0 did not choose a run folder within "
            f"launch.start_timeout_seconds={config.launch.start_timeout_seconds:g}: {error}"
        ) from error
    agreed: dict[str, Any] = json.loads(store.get(_key(environment)))
    # Count this rank before an error is raised: rank 0 serves the store until all other ranks are counted.
    if environment.rank != 0:
        store.add(_readers(environment), 1)
    if "error" in agreed:
        raise ControlError(f"rank 0 could not start the run: {agreed['error']}")
    return agreed


def _key(environment: RankEnvironment) -> str:
    # The store of torchrun survives a restart of the ranks, so each attempt needs its own key. A store that rank 0
    # serves is new in each attempt, so one key is enough. There the key must not contain the attempt, because nodes
    # count attempts differently: a spare node that joined later has counted fewer.
    return f"megatron_ft/attempt-{environment.attempt}" if environment.store_is_served else "megatron_ft/start"


def _readers(environment: RankEnvironment) -> str:
    return f"{_key(environment)}/readers"
