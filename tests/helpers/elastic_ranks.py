"""Runs jobs of forked ranks that can lose ranks, with a minimal controller.

``python -m tests.helpers.elastic_ranks SPEC OUTCOME`` is the program behind ``run_jobs``. It imports Megatron once,
forks the ranks of one job after the other, and is their control plane: it observes deaths, ends memberships, collects
positions, chooses the target and forms the next membership.
"""

import copy
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import derive_placement
from megatron_ft.control.node.worker_client import MembershipOrder, RankContext
from megatron_ft.control.ports import free_port
from megatron_ft.control.rundir import RUN_ID_NAME
from megatron_ft.corpus.indexed import IndexedWriter
from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
from megatron_ft.planning.recovery.membership import NextMembership, Position, Target, choose_target
from megatron_ft.planning.state.declined import Declined
from megatron_ft.testing.engines import REPOSITORY, be_ready_to_fork, micro_config
from megatron_ft.testing.snapshot_servers import TOKEN, Cluster, cluster
from tests.helpers.state_watch import watch

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
    """Return the outcome of each job: ``ranks`` (records and error of each first rank) and ``targets`` of its losses.

    Args:
        jobs: arguments of ``Job`` by the job's name, and ``num_keepers``, the number of nodes with a snapshot server.
            Jobs run in this order, each in a folder with its name.
    """
    spec, outcome = folder / "spec.json", folder / "outcome.json"
    for name, seed in (("tokens", 7), ("others", 8)):
        tokens = np.random.default_rng(seed).integers(0, 200, size=NUM_TOKENS)
        with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
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
    """Worker client of a rank over two pipes. A thread reads one of them, for messages that must be handled at once.

    Args:
        orders: leaving nodes by the iteration after which the job's first rank receives the order to change.
    """

    def __init__(self, calls: Connection, breaks: Connection, orders: Mapping[int, Sequence[int]]) -> None:
        self._calls, self._breaks, self._orders = calls, breaks, orders
        self._hang_up: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._generation = 0
        self._iteration = 0
        self.is_first = False
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, record: dict[str, Any]) -> None:
        self._calls.send({"op": "record", "record": record})

    def progress(self, iteration: int, phase: str) -> None:
        self._iteration = iteration

    def stop_requested(self) -> bool:
        return False

    @property
    def can_survive(self) -> bool:
        return True

    def on_break(self, hang_up: Callable[[str], None]) -> None:
        with self._lock:
            self._hang_up = hang_up
            is_broken = self._generation in self._broken
        if is_broken:
            hang_up("broken already")

    def survive(self, position: Position, error: BaseException | str) -> NextMembership:
        last_line = str(error).strip().splitlines()[-1]
        self._calls.send({"op": "broken", "position": position.to_json(), "error": last_line})
        following = self.await_membership()
        assert following is not None, "who survives does not leave"
        return following

    def change_requested(self) -> bool:
        return self.is_first and self._iteration in self._orders

    def awaited_change(self) -> MembershipOrder:
        return MembershipOrder(tuple(self._orders[self._iteration]))

    def change(self, position: Position) -> NextMembership | None:
        self._calls.send({"op": "broken", "position": position.to_json(), "error": None})
        return self.await_membership()

    def stand_by(self) -> NextMembership | None:
        return self.await_membership()

    def await_membership(self) -> NextMembership | None:
        answer = self._calls.recv()
        if answer is None:
            return None
        following = NextMembership.from_json(answer)
        with self._lock:
            self._generation = following.generation
        return following

    def membership_is_due(self) -> bool:
        return self._calls.poll()

    def close(self) -> None:
        pass

    def _listen(self) -> None:
        while True:
            try:
                generation, reason = self._breaks.recv()
            except EOFError:
                return
            with self._lock:
                self._broken.add(generation)
                hang_up = self._hang_up if generation == self._generation else None
            if hang_up is not None:
                hang_up(reason)


class Job:
    """One job from its start to the end of its last rank.

    Args:
        changes: lists ``leave`` and ``join`` of nodes, by the iteration (as text) after which the membership changes.
        keepers: snapshot servers of the nodes, by node number; None without snapshots.
        spares: nodes with a snapshot server whose ranks take the places of lost ranks in a kept layout. If no spare is
            left, ranks are started again on their own nodes, whose snapshot servers are alive; without
            ``nodes.restart_lost_nodes`` the layout changes.
        returns: nodes that join with new ranks in the membership after a loss, by the iteration (as text) of the loss.
        num_prebuilt: number of parts that each spare builds in advance before the ranks of the job start. If it is 0,
            spares are started when they replace a lost rank.
        keepers_live: whether the snapshot servers of lost nodes also live if spares take their places, so that only
            ranks have died.
        other_data: nodes whose joining ranks read other data, with a run folder that other nodes do not see.
        present: nodes on which the job continues from the checkpoints of the job ``resumes``; None for all nodes.
        dies_committing: iteration whose checkpoint is written when the rank of a node dies, by node. The other ranks
            do not know yet that the checkpoint is written.
        is_watched: whether ranks also report what ``state_watch.watch`` records.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        overrides: Mapping[str, Any],
        changes: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
        keepers: Cluster | None = None,
        present: Sequence[int] | None = None,
        resumes: str | None = None,
        other_data: Sequence[int] = (),
        spares: Sequence[int] = (),
        num_prebuilt: int = 0,
        keepers_live: bool = False,
        returns: Mapping[str, Sequence[int]] | None = None,
        dies_committing: Mapping[str, int] | None = None,
        is_watched: bool = False,
    ) -> None:
        wanted = {**BASE, "launch.num_nodes": nodes, "data.train": [str(folder.parent / "tokens")], **overrides}
        self.config = derive_placement(micro_config(wanted))
        folder.mkdir()
        _name_run(folder)
        self.folder = folder
        self.changes = {int(iteration): change for iteration, change in (changes or {}).items()}
        self.returns = {int(iteration): nodes for iteration, nodes in (returns or {}).items()}
        self.targets: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.calls: list[Connection] = []
        self.breaks: list[Connection] = []
        self.processes: list[Any] = []
        self.nodes: list[int] = []
        """Node of each process."""
        self.numbers: list[int] = []
        """Number of each process in ``JobLayouts``."""
        self.ranks_per_node = self.config.launch.ranks_per_node
        self.dies_committing = {int(node): iteration for node, iteration in (dies_committing or {}).items()}
        self.is_watched = is_watched
        self.keepers = keepers
        self.spares = list(spares)
        self.waiting: dict[int, int] = {}
        """Process of each spare that has built parts in advance, by its node."""
        self.keepers_live = keepers_live
        self.port = free_port("127.0.0.1")
        self.generation = 0 if resumes is None else 1
        self.layouts = JobLayouts.of(self.config)
        layout = self.layouts.on(range(nodes) if present is None else present)
        assert isinstance(layout, MembershipLayout), layout
        self.layout = layout
        self.is_kept = self.config.recovery.keep_layout
        """Whether all memberships so far had the layout at the start."""
        self.base: MembershipLayout | None = None
        self.begun = 0
        about = {
            "world_size": len(layout.processes),
            "num_nodes": len(layout.nodes),
            "nodes": layout.rank_nodes,
            "local_ranks": layout.local_ranks,
            "members": layout.nodes,
            "generation": self.generation,
            "resume_from": None if resumes is None else folder.parent / resumes / "checkpoints",
        }
        self.num_records = 0
        for node in self.spares if num_prebuilt else ():
            self.waiting[node] = self._start(node, is_joining=True, generation=self.generation)
            while len(self.outcomes[self.waiting[node]]["records"]) < num_prebuilt:
                self._hear(self.waiting[node], {}, set(), set())
        self.num_waiting = len(self.waiting)
        for rank, (node, local) in enumerate(zip(layout.rank_nodes, layout.local_ranks, strict=True)):
            self._start(node, local_rank=local, rank=rank, **about)
        self.members = list(range(self.num_waiting, len(self.processes)))
        """Process of each present rank."""
        self.hot_spares = [self._start(*divmod(spare, self.ranks_per_node), is_joining=True) for spare in layout.spares]
        self.left: list[int] = []
        self.joining_ranks = {
            node: [
                self._start_with_other_data(node) if node in other_data else self._start(node, local, is_joining=True)
                for local in range(self.ranks_per_node)
            ]
            for joining in (*(change.get("join", ()) for change in self.changes.values()), *self.returns.values())
            for node in joining
        }

    def run(self) -> dict[str, Any]:
        """Act as the control plane until no rank is left."""
        try:
            while self.members:
                self._one_membership()
            for process in self.hot_spares:
                self.calls[process].send(None)  # the job has ended
            for process in (*self.left, *self.hot_spares):
                while self._hear(process, {}, set(), set()):
                    pass
        finally:
            for process in self.processes:
                process.kill()
                process.join()
        return {"ranks": self.outcomes, "targets": self.targets}

    def _start_with_other_data(self, node: int) -> int:
        own = self.folder.with_name(f"{self.folder.name}-{node}")
        own.mkdir()
        _name_run(own)
        config, self.config = self.config, copy.deepcopy(self.config)
        self.config.data.train = [str(self.folder.parent / "others")]
        number = self._start(node, is_joining=True, run_dir=own)
        self.config = config
        return number

    def _start(self, node: int, local_rank: int = 0, **about: Any) -> int:
        fork = multiprocessing.get_context("fork")
        (mine, theirs), (reported, telling) = fork.Pipe(), fork.Pipe(duplex=False)
        context = {**_context(self.folder, node, self.port), "local_rank": local_rank, **about}
        if self.keepers is not None:
            is_alone = about.get("is_joining") and not self.config.recovery.keep_layout
            known = {node: self.keepers.nodes[node]} if is_alone else self.keepers.nodes
            addresses = {str(number): keeper.address for number, keeper in known.items()}
            service = {"socket": self.keepers.nodes[node].socket_path, "token": TOKEN, "addresses": addresses}
            context["sidecars"] = {"keeper": service}
        orders = {iteration: change.get("leave", ()) for iteration, change in self.changes.items()}
        dies = self.dies_committing.get(node)
        process = fork.Process(target=_be, args=(self.config, context, theirs, reported, orders, dies, self.is_watched))
        process.start()
        theirs.close()
        reported.close()
        self.calls.append(mine)
        self.breaks.append(telling)
        self.processes.append(process)
        self.nodes.append(node)
        self.numbers.append(node * self.ranks_per_node + local_rank)
        self.outcomes.append({"records": [], "error": None, "broken": []})
        return len(self.processes) - 1

    def _one_membership(self) -> None:
        """Run until all members have ended normally, or until the remaining members have formed another membership."""
        positions: dict[int, Position] = {}
        dead: set[int] = set()
        gone: set[int] = set()
        while len(positions) + len(dead) + len(gone) < len(self.members) or not self._can_go_on(positions, dead):
            open_calls = {self.calls[process]: process for process in self.members if process not in dead | gone}
            ready = wait(list(open_calls), timeout=LIMIT_SECONDS)
            if not ready:
                errors = [self.outcomes[process]["broken"][-1]["error"] for process in sorted(positions)]
                raise RuntimeError(f"no message for {LIMIT_SECONDS} s; {sorted(positions)} reported: {errors}")
            for call in ready:
                self._hear(open_calls[call], positions, dead, gone)
        if not positions:
            self.members = []
            return
        self._reform(positions, is_planned=not dead)

    def _can_go_on(self, positions: dict[int, Position], dead: set[int]) -> bool:
        """Return whether a member has died, all members have ended, or all members wait at an ordered boundary."""
        planned = [self.outcomes[process]["broken"][-1]["error"] is None for process in positions]
        return bool(dead) or all(planned)

    def _hear(self, process: int, positions: dict[int, Position], dead: set[int], gone: set[int]) -> bool:
        """Receive one message. Return False if no further message can come."""
        try:
            message = self.calls[process].recv()
        except (EOFError, ConnectionResetError):
            self.processes[process].join()
            if self.processes[process].exitcode == 0:
                gone.add(process)
                return False
            dead.add(process)
            keeps = self.config.recovery.keep_layout and (self.keepers_live or not self.spares)
            if self.keepers is not None and not keeps:
                self.keepers.nodes[self.nodes[process]].kill()
            # The other ranks of a node are lost with it.
            alike = [other for other in (*self.members, *self.hot_spares) if self.nodes[other] == self.nodes[process]]
            for other in alike:
                self.processes[other].kill()
                self.processes[other].join()
                positions.pop(other, None)
            dead.update(other for other in alike if other in self.members)
            self.hot_spares = [other for other in self.hot_spares if other not in alike]
            for other in self.members:
                if other not in dead | gone:
                    self._tell_break(other, f"rank {process} was killed")
            return False
        if message["op"] == "record":
            self.num_records += 1
            self.outcomes[process]["records"].append({**message["record"], "number": self.num_records})
        elif message["op"] == "ended":
            self.outcomes[process].update(error=message["error"], imported=message["imported"])
        else:
            positions[process] = Position.from_json(message["position"])
            self.outcomes[process]["broken"].append({"position": message["position"], "error": message["error"]})
        return True

    def _substitute(self, process: int) -> int:
        """Start a process in the place of a dead one."""
        node = self.spares.pop(0) if self.spares else self.nodes[process]
        if node in self.waiting:
            return self.waiting.pop(node)
        return self._start(node, is_joining=True, generation=self.generation - 1)

    def _tell_break(self, process: int, reason: str) -> None:
        try:
            self.breaks[process].send((self.generation, reason))
        except BrokenPipeError:
            return  # the rank is ending, and its calls will show it

    def _reform(self, positions: dict[int, Position], *, is_planned: bool) -> None:
        target = choose_target(list(positions.values()))
        self.targets.append(target.to_json())
        self.generation += 1
        change = self.changes.pop(target.iteration) if is_planned else {}
        leaving = change.get("leave", ())
        coming = change.get("join", ()) if is_planned else self.returns.pop(target.iteration, ())
        num_lost = len(self.members) - len(positions)
        if self.is_kept and (self.config.nodes.restart_lost_nodes or num_lost <= len(self.spares)):
            members = [process if process in positions else self._substitute(process) for process in self.members]
            following, spares = self._following(members, positions, target, keeps_layout=True), []
            kept = self.layouts.on(dict.fromkeys(self.nodes[process] for process in members), in_place=True)
            assert isinstance(kept, MembershipLayout), kept
            self.layout = self.base = kept
        else:
            living = [
                *positions,
                *self.hot_spares,
                *(process for node in coming for process in self.joining_ranks[node]),
            ]
            staying = {self.numbers[process]: process for process in living if self.nodes[process] not in leaving}
            if target.iteration > self.begun or all(position.is_formed for position in positions.values()):
                self.base, self.begun = self.layout, target.iteration
            nodes = {self.nodes[process] for process in staying.values()}
            placed = [node for node in self.layout.nodes if node in nodes]
            layout = self.layouts.on([*placed, *sorted(nodes - set(placed))], self.base, in_place=False)
            self.is_kept = False
            if isinstance(layout, Declined):
                raise RuntimeError(layout.reason)
            self.layout = layout
            members = [staying[number] for number in layout.processes]
            spares = [staying[number] for number in layout.spares]
            following = self._following(
                members, positions, target, local_ranks=layout.local_ranks, members=layout.nodes
            )
            left = [process for process in living if process not in staying.values()]
            self.left += left
            for process in left:
                self.calls[process].send(None)
        self.members, self.hot_spares = members, spares
        for process in (*members, *spares):
            self.calls[process].send(following.to_json())

    def _following(
        self, processes: list[int], positions: Mapping[int, Position], target: Target, **about: Any
    ) -> NextMembership:
        is_planned = all(self.outcomes[process]["broken"][-1]["error"] is None for process in positions)
        following = NextMembership(
            generation=self.generation,
            previous_ranks=tuple(
                self.members.index(process) if process in self.members else None for process in processes
            ),
            nodes=tuple(self.nodes[process] for process in processes),
            target=target,
            master_addr="127.0.0.1",
            master_port=free_port("127.0.0.1"),
            reason="asked for" if is_planned else "killed",
            **about,
        )
        following.validate()
        return following


def _name_run(folder: Path) -> None:
    """Give all jobs the same run name, so that one job can continue what another one has saved."""
    (folder / RUN_ID_NAME).write_text(json.dumps({"run_id": "ab" * 16, "is_older": False}))


def _context(folder: Path, node: int, port: int) -> dict[str, Any]:
    """Return the fields of the context that are equal for all ranks. Joining ranks receive the other fields later."""
    return {
        "rank": node,
        "world_size": 0,
        "local_rank": 0,
        "node": node,
        "num_nodes": 0,
        "generation": 0,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "run_dir": folder,
        "resume_from": None,
    }


def _be(
    config: JobConfig,
    context: dict[str, Any],
    calls: Connection,
    breaks: Connection,
    orders: Mapping[int, Sequence[int]],
    dies_committing: int | None,
    is_watched: bool,
) -> None:
    from megatron_ft.mcore import rank_main
    from megatron_ft.testing import scheduled_ranks

    error, forked_with = None, set(sys.modules)
    if dies_committing is not None:
        _die_committing(dies_committing)
    try:
        client = PipeClient(calls, breaks, orders)
        client.is_first = context["rank"] == 0
        if is_watched:
            watch(client.report)
        main = scheduled_ranks if config.testing.membership_schedule else rank_main
        main.run_rank(config, RankContext(worker=client, **context))
    except BaseException:  # noqa: BLE001 - handed to the test, whatever it is
        error = traceback.format_exc()
    calls.send({"op": "ended", "error": error, "imported": sorted(set(sys.modules) - forked_with)})
    calls.close()
    os._exit(0)


def _die_committing(iteration: int) -> None:
    """Kill this process at the moment at which ranks agree that the checkpoint of ``iteration`` is written."""
    from megatron_ft.mcore.checkpoint.manager import CheckpointManager

    complete: Callable[..., None] = CheckpointManager._complete

    def die(manager: CheckpointManager, pending: Any, began: float) -> None:
        if pending.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        complete(manager, pending, began)

    CheckpointManager._complete = die  # type: ignore[method-assign]


def _run(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    num_keepers = job.pop("num_keepers", 0)
    if not num_keepers:
        return Job(folder, **job).run()
    with cluster(num_keepers) as keepers:
        return Job(folder, keepers=keepers, **job).run()


def schedule_of(outcome: dict[str, Any]) -> list[str]:
    """Return the schedule of the memberships that a job's ranks reported, using the last report of each iteration."""
    records = [record for rank in outcome["ranks"] for record in rank["records"]]
    changed = [record for record in records if record["kind"] == "membership_changed"]
    entries = {record["iteration"]: record["schedule"] for record in sorted(changed, key=lambda found: found["number"])}
    return [entry for iteration in sorted(entries) for entry in entries[iteration]]


def _main(spec: str, outcome: str) -> None:
    from megatron_ft.mcore.rank_main import warm

    warm()
    importlib.import_module("megatron_ft.testing.scheduled_trainer")
    be_ready_to_fork()
    content = json.loads(Path(spec).read_text())
    outcomes: dict[str, Any] = {}
    for name, job in content["jobs"].items():
        try:
            if repeated := job["overrides"].pop("repeats", None):
                job["overrides"]["testing.membership_schedule"] = schedule_of(outcomes[repeated])
            outcomes[name] = _run(Path(content["folder"], name), job)
        except Exception:  # noqa: BLE001 - the test that needs this job says so
            outcomes[name] = {"error": traceback.format_exc()}
    Path(outcome).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    _main(*sys.argv[1:])
