"""Jobs of forked ranks that can lose some of them, and a controller as small as it can be.

``python -m tests.helpers.elastic_ranks SPEC OUTCOME`` is the runner behind ``run_jobs``: it imports Megatron once,
forks the ranks of one job after the other and is their control plane: it sees deaths, breaks the membership, collects
positions, chooses the target and forms the next membership.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.job import JobConfig
from megatron_ft.control.launch import free_port
from megatron_ft.control.worker import RankContext
from megatron_ft.corpus.indexed import IndexedWriter
from megatron_ft.errors import ControlError
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Position, choose_target
from tests.helpers.engines import REPOSITORY, micro_config

NUM_TOKENS = 20_000
LIMIT_SECONDS = 60.0
BASE = {
    "model.make_vocab_size_divisible_by": 128,
    "training.train_iterations": 5,
    "training.eval_interval_iterations": 0,
    "training.digest_interval_iterations": 1,
    "training.distributed_timeout_seconds": 40.0,
    "checkpoint.save_at_end": False,
    "checkpoint.save_interval_iterations": 0,
    "parallel.use_distributed_optimizer": False,
    "placement.algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"},
    "placement.num_slots_per_rank": 3,
    "placement.min_replicas": 2,
}


def run_jobs(jobs: Mapping[str, Mapping[str, Any]], folder: Path, *, timeout_seconds: float) -> dict[str, Any]:
    """What each job did: ``ranks`` (records and error of each rank it started with) and ``targets`` of its losses.

    Args:
        jobs: by name: ``nodes`` and dotted ``overrides``; they run in order, each in a folder of its own name.
    """
    spec, outcome = folder / "spec.json", folder / "outcome.json"
    tokens = np.random.default_rng(7).integers(0, 200, size=NUM_TOKENS)
    with IndexedWriter(folder / "tokens", np.dtype("<u2")) as writer:
        writer.add_document(tokens)
    spec.write_text(json.dumps({"folder": str(folder), "jobs": jobs}))
    result = subprocess.run(
        [sys.executable, "-m", "tests.helpers.elastic_ranks", str(spec), str(outcome)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    outcomes: dict[str, Any] = json.loads(outcome.read_text())
    return outcomes


class PipeClient:
    """A rank's worker client over two pipes: one is read by a thread, for what cannot wait."""

    def __init__(self, calls: Connection, breaks: Connection) -> None:
        self._calls, self._breaks = calls, breaks
        self._hang_up: Callable[[str], None] | None = None
        self.records: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._calls.send({"op": "record", "record": record})

    def progress(self, iteration: int, phase: str) -> None:
        pass

    def stop_requested(self) -> bool:
        return False

    @property
    def can_survive(self) -> bool:
        return True

    def on_break(self, hang_up: Callable[[str], None]) -> None:
        self._hang_up = hang_up

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        self._calls.send({"op": "broken", "position": position.to_json(), "error": str(error).strip().splitlines()[-1]})
        answer = self._calls.recv()
        if "ends" in answer:
            raise ControlError(answer["ends"])
        return NextMembership.from_json(answer)

    def close(self) -> None:
        pass

    def _listen(self) -> None:
        while True:
            try:
                reason = self._breaks.recv()
            except EOFError:
                return
            if self._hang_up is not None:
                self._hang_up(reason)


class Job:
    """One job from its start to the end of its last rank."""

    def __init__(self, folder: Path, *, nodes: int, overrides: Mapping[str, Any]) -> None:
        wanted = {**BASE, "launch.num_nodes": nodes, "data.train": [str(folder.parent / "tokens")], **overrides}
        config = derive_placement(micro_config(wanted))
        folder.mkdir()
        fork = multiprocessing.get_context("fork")
        self.targets: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = [{"records": [], "error": None, "broken": []} for _ in range(nodes)]
        self.calls, self.breaks, self.processes = [], [], []
        port = free_port("127.0.0.1")
        for rank in range(nodes):
            (mine, theirs), (told, telling) = fork.Pipe(), fork.Pipe(duplex=False)
            process = fork.Process(target=_be, args=(config, _context(folder, rank, nodes, port), theirs, told))
            process.start()
            theirs.close()
            told.close()
            self.calls.append(mine)
            self.breaks.append(telling)
            self.processes.append(process)
        self.generation = 0
        self.num_records = 0
        self.members = list(range(nodes))
        """First rank number of each present rank."""

    def run(self) -> dict[str, Any]:
        """Be the control plane until all ranks are gone."""
        try:
            while self.members:
                self._one_membership()
        finally:
            for process in self.processes:
                process.kill()
                process.join()
        return {"ranks": self.outcomes, "targets": self.targets}

    def _one_membership(self) -> None:
        """Until all members have ended well, or some have died and the others have formed another membership."""
        positions: dict[int, Position] = {}
        dead: set[int] = set()
        gone: set[int] = set()
        while len(positions) + len(dead) + len(gone) < len(self.members) or not (dead or not positions):
            open_calls = {self.calls[rank]: rank for rank in self.members if rank not in dead | gone}
            ready = wait(list(open_calls), timeout=LIMIT_SECONDS)
            if not ready:
                raise RuntimeError(f"nothing heard for {LIMIT_SECONDS} s; positions of {sorted(positions)}")
            for call in ready:
                self._hear(open_calls[call], positions, dead, gone)
        if not positions:
            self.members = []
            return
        self._reform(positions)

    def _hear(self, rank: int, positions: dict[int, Position], dead: set[int], gone: set[int]) -> None:
        try:
            message = self.calls[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            if self.processes[rank].exitcode == 0:
                gone.add(rank)
                return
            dead.add(rank)
            positions.pop(rank, None)
            for other in self.members:
                if other not in dead | gone:
                    self._tell_break(other, f"rank {rank} was killed")
            return
        if message["op"] == "record":
            self.num_records += 1
            self.outcomes[rank]["records"].append({**message["record"], "number": self.num_records})
        elif message["op"] == "ended":
            self.outcomes[rank]["error"] = message["error"]
        else:
            positions[rank] = Position.from_json(message["position"])
            self.outcomes[rank]["broken"].append({"position": message["position"], "error": message["error"]})

    def _tell_break(self, rank: int, reason: str) -> None:
        try:
            self.breaks[rank].send(reason)
        except BrokenPipeError:
            return  # it is ending, which its calls will tell

    def _reform(self, positions: dict[int, Position]) -> None:
        target = choose_target(list(positions.values()))
        self.targets.append(target.to_json())
        self.generation += 1
        survivors = sorted(positions)
        following = NextMembership(
            generation=self.generation,
            previous_ranks=tuple(self.members.index(rank) for rank in survivors),
            nodes=tuple(survivors),
            target=target,
            master_addr="127.0.0.1",
            master_port=free_port("127.0.0.1"),
            reason="killed",
        )
        following.validate()
        self.members = survivors
        for rank in survivors:
            self.calls[rank].send(following.to_json())


def _context(folder: Path, rank: int, nodes: int, port: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": nodes,
        "local_rank": 0,
        "node": rank,
        "num_nodes": nodes,
        "generation": 0,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "run_dir": folder,
        "resume_from": None,
    }


def _be(config: JobConfig, context: dict[str, Any], calls: Connection, breaks: Connection) -> None:
    from megatron_ft.mcore.loop.main import run_rank

    error = None
    try:
        run_rank(config, RankContext(worker=PipeClient(calls, breaks), **context))
    except BaseException:  # noqa: BLE001 - handed to the test, whatever it is
        error = traceback.format_exc()
    calls.send({"op": "ended", "error": error})
    calls.close()
    os._exit(0)


def _main(spec: str, outcome: str) -> None:
    from megatron_ft.mcore.loop.main import warm

    warm()
    content = json.loads(Path(spec).read_text())
    outcomes = {}
    for name, job in content["jobs"].items():
        try:
            outcomes[name] = Job(Path(content["folder"], name), **job).run()
        except Exception:  # noqa: BLE001 - the test that needs this job says so
            outcomes[name] = {"error": traceback.format_exc()}
    Path(outcome).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    _main(*sys.argv[1:])
