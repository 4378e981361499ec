"""Jobs of ``fallback-order``, and the driver that causes losses of growing size in one of them.

Before each loss, the driver stops all ranks, so that no window or checkpoint is completed meanwhile, and asks
``can_recover`` for the strategy that will be used. Then it kills the processes from outside, all at one instant,
continues the other ranks, and waits until the job trains again. If the job ends as predicted, the driver starts it
again with the same command. ``<run>/fallback.jsonl`` gets a line before each loss, and one after it.
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from benchmarks.elastic_jobs import MOST_ITERATIONS
from benchmarks.localized_jobs import Layout
from benchmarks.outside_driver import NotWhole, Tail
from megatron_ft.control.node.kept import KeptServers, end_unused
from megatron_ft.control.rundir import RunId
from megatron_ft.errors import MegatronFtError
from megatron_ft.failpoints import append_to
from megatron_ft.failures.processes import HeldProcess, controllers_of, processes_of
from megatron_ft.planning.recovery.costs import STRATEGIES
from megatron_ft.planning.recovery.strategy import Cost
from megatron_ft.testing.jobs import REPOSITORY, start, wait
from tools.can_recover import NUM_MEASURED, ask_run

Event = Mapping[str, Any]
FALLBACK_FILE = "fallback.jsonl"
WHOLE_SECONDS = 120.0
"""Longest time to wait until a job is ready for a loss, or trains again after it."""
STOP_SECONDS = 60.0
PAUSED_SECONDS = 10.0
"""Longest time to wait for an answer while all ranks are stopped. After a longer time, the job would treat the stopped
ranks as lost."""
SETTLED = 4
"""Number of iterations of a membership before its next loss."""
COMPARED_AFTER = 5
"""Number of iterations after the last loss of a job."""
_PAUSE_SECONDS = 0.02
_PROOF_SECONDS = 5.0
_KEEPER = "-keeper.log"
"""End of the name of a snapshot server's log."""
LINK_BYTES_PER_SECOND = 1e9
_COMMON = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    f"training.train_iterations={MOST_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "checkpoint.save_at_end=false",
    "checkpoint.save_interval_iterations=10",
    "checkpoint.keep_last=100",
    "telemetry.wandb=disabled",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "launch.ranks_per_node=1",
    "recovery.max_restarts=1000",
    "nodes.restart_lost_nodes=true",
    "nodes.max_node_restarts=1000",
    f"topology.link_bytes_per_second={LINK_BYTES_PER_SECOND:g}",
)
_KEPT = ("recovery.keep_layout=true", "snapshot.outlive_job_seconds=300", "training.global_batch_size=8")
_REPLICAS = (
    "nodes.join_window_seconds=0.2",
    "parallel.use_distributed_optimizer=true",
    "placement=overlap_search",
    "placement.min_replicas=2",
    "placement.num_slots_per_rank=4",
    "placement.state_copies=2",
    "snapshot.bandwidth_bytes_per_second=3e5",
)
STAGED = Layout(pp=2, dp=2, ep=2, sharded=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackJob:
    """Job and its losses, in order."""

    number: int
    num_nodes: int
    words: Sequence[str]
    """Overrides without those about the run's folder."""
    losses: Sequence[str]
    stages: Sequence[Sequence[int]] = ()
    """Nodes of each pipeline stage, for a job that keeps its layout; empty for a job with expert replicas."""

    @property
    def keeps_layout(self) -> bool:
        """Return whether lost nodes are replaced in the same layout. Otherwise the job continues without them."""
        return bool(self.stages)

    @classmethod
    def staged(cls, number: int, losses: Sequence[str], layout: Layout = STAGED) -> "FallbackJob":
        """Return a job that keeps its layout of pipeline stages."""
        stages = [tuple(layout.ranks_of(stage)) for stage in range(layout.pp)]
        words = [*_COMMON, *layout.overrides, *_KEPT]
        return cls(number=number, num_nodes=layout.num_ranks, words=words, losses=losses, stages=stages)

    @classmethod
    def replicated(cls, number: int, losses: Sequence[str], num_nodes: int = 5) -> "FallbackJob":
        """Return a job with expert replicas and copies of shards, which continues on fewer nodes."""
        words = [*_COMMON, *_REPLICAS, f"recovery.min_nodes={num_nodes - 2}", f"launch.num_nodes={num_nodes}"]
        words.append(f"training.global_batch_size={2 * num_nodes}")
        return cls(number=number, num_nodes=num_nodes, words=words, losses=losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The next loss: its kind, its nodes, and the answer of ``can_recover`` about it."""

    kind: str
    nodes: tuple[int, ...]
    is_gone: bool
    """Whether the nodes are lost with their agents and snapshot servers; otherwise only their ranks die."""
    cost: Cost
    is_wanted: Callable[[Cost], bool] = lambda _: True
    """Returns whether a loss with this cost has the effect that the kind of the loss requires."""

    @property
    def asked(self) -> tuple[int, ...] | None:
        """Return the nodes about which ``can_recover`` is asked; None for all processes of the job."""
        return None if self.ends_job else self.nodes

    @property
    def ends_job(self) -> bool:
        """Return whether all processes of the job die, except snapshot servers."""
        return self.cost.ends_job


@dataclass(slots=True)
class Driver:
    """Starts a job, and causes its losses one after another."""

    job: FallbackJob
    folder: Path
    socket: str
    rng: random.Random
    console: "subprocess.Popen[str]" = field(init=False)
    events: Tail = field(init=False)
    metrics: Tail = field(init=False)

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
        return self.folder / f"fallback-{self.job.number:03d}"

    def run(self) -> tuple[list[dict[str, Any]], int, str]:
        """Run the job with all its losses. Return a record of each loss, up to the first one that the job did not
        survive, and the exit code and output of the last launcher."""
        self.events, self.metrics = Tail(self.run_dir / "events.jsonl"), Tail(self.run_dir / "metrics.jsonl")
        self._start()
        records: list[dict[str, Any]] = []
        try:
            for number, kind in enumerate(self.job.losses):
                try:
                    records.append(self._lose(number, kind))
                except (NotWhole, MegatronFtError) as error:
                    records.append({"fault": number, "kind": kind, "problem": f"{type(error).__name__}: {error}"})
                append_to(self.run_dir / FALLBACK_FILE)(records[-1])
                if "problem" in records[-1]:
                    break
            newest = self._newest()
            with contextlib.suppress(NotWhole):  # the comparison then reports that the last loss has nothing to compare
                self._wait(lambda: self._newest() >= newest + COMPARED_AFTER, "iterations at the end")
        finally:
            output = self._stop()
        return records, self.console.returncode, output

    # --- processes -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        words = [*self.job.words, f"run.dir={self.folder}", f"run.name={self.run_dir.name}", "run.resume=auto"]
        words += [f"data.cache_dir={self.folder / 'cache'}", f"launch.forkserver_socket={self.socket}"]
        self.console = start([sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words])

    def _stop(self) -> str:
        """Stop the job and its snapshot servers, and return the output of the launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.console.pid, signal.SIGINT)
        try:
            output = wait(self.console, STOP_SECONDS)
        except AssertionError as error:
            output = str(error)
        servers = KeptServers(seconds=0, run_id=RunId.read(self.run_dir).run_id, fingerprint="", first_generation=0)
        end_unused(servers, token="")
        return output

    @contextlib.contextmanager
    def _held(self, choice: Choice) -> Iterator[list[HeldProcess]]:
        """Yield the processes that the loss hits, the agents first."""
        with processes_of(self.run_dir, choice.nodes, 1) as by_node, controllers_of(self.run_dir) as controllers:
            found = [process for node in choice.nodes for process in by_node[node]]
            if choice.ends_job:
                found = [*controllers, *(process for process in found if not process.log.endswith(_KEEPER))]
            elif not choice.is_gone:
                found = [process for process in found if process.log.startswith("rank-")]
            # Without a process of each node, the loss would be smaller than planned.
            missing = [node for node in choice.nodes if not any(_is_of(process, node) for process in found)]
            if missing:
                raise NotWhole(f"nodes {missing} have no such processes")
            yield found

    # --- one loss ------------------------------------------------------------------------------------------------

    def _lose(self, number: int, kind: str) -> dict[str, Any]:
        """Wait until the job is whole, ask for the strategy, cause the loss, and wait until the job trains again.

        Raises:
            NotWhole: the job does not get into the expected state.
            MegatronFtError: ``can_recover`` gives no answer.
        """
        self._wait(self._is_ready, f"a whole job before the loss of {kind}")
        deadline = time.monotonic() + WHOLE_SECONDS
        while (record := self._lose_paused(number, self._choose(kind))) is None:
            if time.monotonic() > deadline:
                raise NotWhole(f"{kind}: the nodes were no such loss any more when they were to be killed")
        if not record["is_automatic"]:
            self._wait_for_end()
            self._start()
        return record | self._wait_until_trained(record["killed_at"], record["committed"])

    def _lose_paused(self, number: int, choice: "Choice") -> dict[str, Any] | None:
        """Stop all ranks, ask once more, and cause the loss. Return a record of the loss; None if the job has trained
        since the choice, so that the loss would no longer have the required effect."""
        with self._paused():
            # Without the pause, a window or checkpoint could be completed between the answer and the loss.
            cost = self._ask(choice.asked, is_gone=choice.is_gone, seconds=PAUSED_SECONDS)
            if not choice.is_wanted(cost):
                return None
            return self._lose_now(number, replace(choice, cost=cost))

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop all ranks, and continue those that live at the end."""
        with processes_of(self.run_dir, range(self.job.num_nodes), 1) as by_node:
            ranks = [found for of_node in by_node.values() for found in of_node if found.log.startswith("rank-")]
            try:
                for rank in ranks:
                    rank.send(signal.SIGSTOP)
                yield
            finally:
                for rank in ranks:
                    rank.send(signal.SIGCONT)

    def _lose_now(self, number: int, choice: "Choice") -> dict[str, Any]:
        cost, committed = choice.cost, self._newest()
        record: dict[str, Any] = {
            "fault": number,
            "kind": choice.kind,
            "nodes": list(choice.nodes),
            "is_gone": choice.is_gone,
            "named": [cost.strategy, cost.medium],
            "is_automatic": cost.is_automatic,
            "predicted_seconds": cost.seconds,
            "no_prediction": list(cost.why_no_seconds),
            "work": None if cost.work is None else asdict(cost.work),
            "iteration_seconds": self._pace(),
            "summary": cost.summary(),
            "committed": committed,
            "load": os.getloadavg()[0],
        }
        append_to(self.run_dir / FALLBACK_FILE)({"before": True, **record})
        with self._held(choice) as processes:
            return record | self._kill(choice, processes)

    def _choose(self, kind: str) -> Choice:
        """Choose the nodes of a loss. If the kind demands an effect, e.g. the loss of all copies of an expert, choose
        nodes for which ``can_recover`` predicts this effect."""
        nodes = self.rng.sample(range(self.job.num_nodes), self.job.num_nodes)
        pairs = list(combinations(nodes, 2))
        groups = list(chain(pairs, combinations(nodes, 3)))
        one = [(nodes[0],)]
        by_kind: dict[str, tuple[Sequence[Sequence[int]], bool, Callable[[Cost], bool]]] = {
            "rank": (one, False, lambda _: True),
            "node": (one, True, lambda _: True),
            "two nodes": (pairs, True, lambda cost: cost.keeps_processes),
            "all copies of an expert": (groups, True, lambda cost: _loses(cost, experts=True)),
            "all copies of a shard": (groups, True, lambda cost: _loses(cost, experts=False)),
            "a stage": ([self.rng.choice(list(self.job.stages or [()]))], True, lambda _: True),
            "all ranks": ([tuple(nodes)], False, lambda _: True),
        }
        if kind == "all processes":
            cost = self._ask(None, is_gone=False)
            return Choice(kind=kind, nodes=tuple(range(self.job.num_nodes)), is_gone=False, cost=cost)
        candidates, is_gone, is_wanted = by_kind[kind]
        for candidate in candidates:
            lost = tuple(sorted(candidate))
            cost = self._ask(lost, is_gone=is_gone)
            if is_wanted(cost):
                return Choice(kind=kind, nodes=lost, is_gone=is_gone, cost=cost, is_wanted=is_wanted)
        raise NotWhole(f"{kind}: no choice of nodes is such a loss")

    def _ask(self, lost: Sequence[int] | None, *, is_gone: bool, seconds: float = WHOLE_SECONDS) -> Cost:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return ask_run(self.run_dir, lost, is_gone=is_gone, as_if_running=False).cost
            except MegatronFtError:  # e.g. files of the run that are being written
                if time.monotonic() > deadline or self.console.poll() is not None:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _kill(self, choice: Choice, processes: Sequence[HeldProcess]) -> dict[str, Any]:
        """Kill all processes at one instant: none of them sees the end of another one."""
        if choice.ends_job:
            os.kill(self.console.pid, signal.SIGSTOP)
        for process in processes:
            process.send(signal.SIGSTOP)
        killed_at = time.time()
        if choice.ends_job:
            self.console.kill()
        hit = [process for process in processes if process.send(signal.SIGKILL)]
        proven = len(hit) == len(processes) and all(process.has_ended(_PROOF_SECONDS) for process in hit)
        return {"killed_at": killed_at, "processes": [process.log for process in processes], "proven": proven}

    # --- conditions ----------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], Any], what: str, *, may_end: bool = False) -> Any:
        deadline = time.monotonic() + WHOLE_SECONDS
        while not (found := condition()):
            if self.console.poll() is not None and not may_end:
                output = self.console.communicate()[0]
                raise NotWhole(f"{what}: the job has ended with exit code {self.console.returncode}: {output[-3000:]}")
            if time.monotonic() > deadline:
                raise NotWhole(f"{what}: did not happen within {WHOLE_SECONDS:g} s")
            time.sleep(_PAUSE_SECONDS)
        return found

    def _wait_for_end(self) -> None:
        """Wait until the launcher has ended, as predicted."""
        self._wait(lambda: self.console.poll() is not None, "the end of the job", may_end=True)
        self.console.communicate()

    def _newest(self) -> int:
        return max((record["iteration"] for record in self.metrics.read() if "loss" in record), default=0)

    def _pace(self) -> float:
        """Return the median duration of the newest iterations, which ``can_recover`` uses for its prediction."""
        newest = [m["iteration_seconds"] for m in self.metrics.read() if "iteration_seconds" in m][-NUM_MEASURED:]
        return statistics.median(newest)

    def _is_ready(self) -> bool:
        """Return whether all nodes are members, and the membership has trained and committed a window."""
        began, nodes = self._membership()
        if began is None or len(nodes) < self.job.num_nodes:
            return False
        since = [event for event in self.events.lines if event["time_unix_seconds"] > began]
        is_committed = any(event["kind"] == "window_committed" for event in since)
        trained = [m for m in self.metrics.read() if "loss" in m and m["time_unix_seconds"] > began]
        if not is_committed or len(trained) < SETTLED:
            return False
        return any((self.run_dir / "checkpoints").glob("iter_*/manifest.json"))

    def _membership(self) -> tuple[float | None, set[int]]:
        """Return (time at which the current membership began, its nodes). The time is None before the first one."""
        for event in reversed(self.events.read()):
            if event["kind"] == "membership_changed":
                return event["time_unix_seconds"], set(event["nodes"])
            if event["kind"] == "ranks_ready":
                return event["time_unix_seconds"], set(range(event["world_size"]))
        return None, set()

    def _wait_until_trained(self, killed_at: float, committed: int) -> dict[str, Any]:
        """Wait until the job has trained an iteration after ``committed``. Return the strategy that was used, and the
        seconds from the loss until this iteration began."""

        def first() -> dict[str, Any] | None:
            later = [m for m in self.metrics.read() if "loss" in m and m["time_unix_seconds"] > killed_at]
            chosen = self._recoveries(killed_at)
            return next(
                (m for m in later if m["iteration"] > committed and chosen and m["time_unix_seconds"] > chosen[0][0]),
                None,
            )

        trained = self._wait(first, "an iteration after the loss")
        recoveries = [found for found in self._recoveries(killed_at) if found[0] < trained["time_unix_seconds"]]
        # Interrupted memberships and later joins report the cheaper ``living_state``, which must not count.
        order = [strategy.name for strategy in STRATEGIES]
        _, strategy, source, declined = max(recoveries, key=lambda found: order.index(found[1]))
        seconds = trained["time_unix_seconds"] - trained["iteration_seconds"] - killed_at
        served = {"served": [strategy, source], "declined": declined}
        return {**served, "seconds": seconds, "trained": trained["iteration"]}

    def _recoveries(self, since: float) -> list[tuple[float, str, str | None, list[str]]]:
        return [
            (event["time_unix_seconds"], event["strategy"], event.get("source"), list(event["declined"]))
            for event in self.events.read()
            if event["kind"] == "recovery_started" and event["time_unix_seconds"] > since
        ]


def _loses(cost: Cost, *, experts: bool) -> bool:
    return any((operator.expert is not None) == experts for operator in cost.lost_operators)


def _is_of(process: HeldProcess, node: int) -> bool:
    return process.log.startswith((f"node-{node:03d}", f"rank-{node:05d}"))
