"""A rank that ``torchrun`` or ``srun`` started, without agent and controller.

Ranks agree on the run folder and on a port through a small store: torchrun's own, or one that rank 0 serves. Sinks run
in rank 0; reports of other ranks are kept in ``logs/rank-00003.records.jsonl``.
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
from megatron_ft.control.rundir import RunDir, claim
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ControlError, MegatronFtError
from megatron_ft.planning.rank_environment import rank_environment
from megatron_ft.telemetry import SinkSet, open_sinks

RunRank = Callable[[JobConfig, RankContext], None]
_READERS_POLL_SECONDS = 0.05


def main(config: JobConfig, environment: RankEnvironment, run_rank: RunRank | None = None) -> int:
    """Run this rank; return its exit code.

    SIGTERM, SIGINT and SIGUSR1 (which ``srun`` forwards) ask it to stop after the iteration.

    Args:
        run_rank: the work of the rank; the training loop unless a test replaces it.

    Raises:
        MegatronFtError: the run folder cannot be claimed, or the rank failed with such an error.
    """
    if run_rank is None:
        from megatron_ft.mcore.rank_main import run_rank
    faulthandler.enable()
    # CUDA and NCCL read these at their first call; what the user has set takes precedence.
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
    """One rank from start to exit code."""

    config: JobConfig
    environment: RankEnvironment
    agreed: dict[str, Any]
    stop: StopFlag
    sinks: SinkSet | None
    run_rank: RunRank
    finished: bool = False
    __qualname__ = "rank"

    def __call__(self) -> int:
        exit_code, reason = 1, "the rank failed"
        worker = InProcessClient(self._write, stop=self.stop)
        try:
            self.run_rank(self.config, self._context(worker))
            interrupted = bool(self.stop) and not self.finished
            exit_code = EXIT_INTERRUPTED if interrupted else EXIT_OK
            reason = "asked to stop" if interrupted else "finished"
        except MegatronFtError as error:
            exit_code, reason = error.exit_code, str(error)
            raise
        finally:
            worker.close()
            if self.sinks is not None:
                self.sinks.close(exit_code, reason)
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
        self.finished = self.finished or record.get("kind") == "run_finished"
        if self.sinks is not None:
            self.sinks.write(record)
            return
        path = Path(self.agreed["run_dir"]) / "logs" / f"rank-{self.environment.rank:05d}.records.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def _open_store(config: JobConfig, environment: RankEnvironment, stop: StopFlag) -> Iterator[TCPStore]:
    """Open the store through which ranks agree. If rank 0 serves it, it exists until the others have read from it.

    Raises:
        ControlError: it does not answer within ``launch.start_timeout_seconds``.
    """
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
    """Wait for the others: if rank 0 left before another rank has read, that rank would try to connect until its
    timeout. Rank 0 leaves this early if the run is refused, or if nothing makes it wait for the other ranks."""
    deadline = time.monotonic() + config.launch.start_timeout_seconds
    num_others = environment.world_size - 1
    # Adding 0 reads the count; ``get`` would block until the first reader has come.
    while (num_readers := store.add(_readers(environment), 0)) < num_others and not stop:
        if time.monotonic() > deadline:
            print(f"rank 0: {num_others - num_readers} of {num_others} other ranks did not start", file=sys.stderr)
            return
        threading.Event().wait(_READERS_POLL_SECONDS)


def _claim(config: JobConfig, environment: RankEnvironment, store: TCPStore) -> RunDir:
    try:
        run = config.run
        # torchrun starts workers again with the same store: they continue in the folder of the first attempt.
        if environment.attempt > 0 and store.check(["megatron_ft/name"]):
            run = replace(run, name=store.get("megatron_ft/name").decode(), resume="auto")
        config_yaml = yaml.safe_dump(to_dict(config), sort_keys=False)
        claimed = claim(run, model_name=config.model.name, config_yaml=config_yaml)
        store.set("megatron_ft/name", claimed.name)
        agreed = {
            "run_dir": str(claimed.path),
            "resume_from": None if claimed.resume_from is None else str(claimed.resume_from),
            "master_port": free_port(environment.master_addr),
        }
    except MegatronFtError as error:
        # The others wait for this key: without an answer each would wait until its timeout.
        store.set(_key(environment), json.dumps({"error": str(error)}))
        raise
    store.set(_key(environment), json.dumps(agreed))
    return claimed


def _agreed(config: JobConfig, environment: RankEnvironment, store: TCPStore) -> dict[str, Any]:
    """Receive rank 0's decisions: ``run_dir``, ``resume_from``, ``master_port``.

    Raises:
        ControlError: rank 0 refused, or did not answer in time.
    """
    try:
        store.wait([_key(environment)], timedelta(seconds=config.launch.start_timeout_seconds))
    except RuntimeError as error:
        raise ControlError(f"rank {environment.rank} received no start message from rank 0: {error}") from error
    agreed: dict[str, Any] = json.loads(store.get(_key(environment)))
    # Counted before an error is raised: rank 0 serves the store until all have read from it.
    if environment.rank != 0:
        store.add(_readers(environment), 1)
    if "error" in agreed:
        raise ControlError(f"rank 0 could not start: {agreed['error']}")
    return agreed


def _key(environment: RankEnvironment) -> str:
    # Return the key of this start, because a launcher's store outlives a start. A store that rank 0 serves is new in
    # each start, and nodes may count starts differently: a spare that came later has counted fewer.
    return f"megatron_ft/attempt-{environment.attempt}" if environment.store_is_served else "megatron_ft/start"


def _readers(environment: RankEnvironment) -> str:
    return f"{_key(environment)}/readers"
