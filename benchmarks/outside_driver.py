"""Drives a job of ``faults-from-outside``: predicts the cost of a loss, injects the fault, and waits until the job is
whole.

No code inside the job takes part in this. Processes are found by the logs to which they write, signals are sent to
process ids, and ``/proc`` shows that a fault happened. The prediction before a fault (the result of ``can_recover``)
and the observations after the fault are written to the run's ``outside.jsonl`` before the job continues.
"""

import contextlib
import json
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.covering import Row
from benchmarks.outside_jobs import OutsideJob, loss_of, losses_of, on_other_nodes, targets
from megatron_ft.errors import MegatronFtError
from megatron_ft.failpoints import append_to
from megatron_ft.failures.processes import HeldProcess, controllers_of, processes_of
from tools.can_recover import Answer, ask_run

OUTSIDE_FILE = "outside.jsonl"
WHOLE_SECONDS = 90.0
"""Longest time to wait until a job is whole again."""
COMPARED_AFTER = 5
"""Number of iterations after the last fault. If the launcher is killed, its last two iterations are not compared."""
_PAUSE_SECONDS = 0.01
_PROOF_SECONDS = 5.0

Event = Mapping[str, Any]


class NotWhole(Exception):
    """Raised if the job has ended, or is not in the expected state in time. The message names the reason."""


@dataclass(slots=True)
class Tail:
    """Reads the complete lines of a growing file of JSON lines."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all lines so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
            self._offset += len(whole + end)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


@dataclass(slots=True)
class LivingJob:
    """Running job that is observed and disturbed from outside."""

    job: OutsideJob
    run_dir: Path
    console: "subprocess.Popen[str]"
    rng: random.Random
    events: Tail = field(init=False)
    metrics: Tail = field(init=False)
    orders: Tail = field(init=False)

    def __post_init__(self) -> None:
        self.events, self.metrics, self.orders = (
            Tail(self.run_dir / f"{name}.jsonl") for name in ("events", "metrics", "decisions")
        )

    def suffer(self) -> list[dict[str, Any]]:
        """Inject all faults one after another. Stop after a fault that the job does not survive. Return a record of
        each."""
        records: list[dict[str, Any]] = []
        for fault in self.job.faults:
            try:
                records.append(self._fault(fault, records))
            except (NotWhole, MegatronFtError) as error:
                return [*records, {"fault": fault["fault"], "problem": f"the fault was not injected: {error}"}]
            append_to(self.run_dir / OUTSIDE_FILE)(records[-1])
            if "problem" in records[-1] or not records[-1]["answer"]["survives"]:
                return records
        newest = self.metrics.read()[-1]["iteration"]
        with contextlib.suppress(NotWhole):  # the comparison then reports that the last fault has nothing to compare
            self._wait(lambda: self.metrics.read()[-1]["iteration"] >= newest + COMPARED_AFTER, "iterations at the end")
        return records

    # --- one fault -----------------------------------------------------------------------------------------------

    def _fault(self, fault: Row, earlier: Sequence[Event]) -> dict[str, Any]:
        """Wait for the moment of a fault, predict its cost, inject the fault, and wait until the job is whole again.
        Raises NotWhole."""
        is_joined = fault["moment"] == "joined"
        self._wait_until_whole(num_iterations=0 if is_joined else int(fault["after"]))
        fault, lost, is_gone, asked = self._ask(fault)
        record: dict[str, Any] = {"fault": fault["fault"], "lost": list(lost), "is_gone": is_gone, "answer": asked}
        record["targets"] = [fault["first"], *([fault["second"]] if "second" in fault else [])]
        append_to(self.run_dir / OUTSIDE_FILE)({"before": True, **record})
        with self._held(fault) as (first, second):
            if fault["moment"] == "save":
                self._wait_for_a_save()
            elif not is_joined:
                time.sleep(self.rng.uniform(0.0, self._pace()))  # the fault comes at a random moment
            record |= self._send(fault, first, second)
        record["iteration"] = self.metrics.read()[-1]["iteration"]
        try:
            if asked["survives"]:
                self._wait_until_recovered(lost, record)
                record["whole_at"] = time.time()
            else:
                record |= self._wait_for_predicted_end(asked["strategy"], record["injected_at"])
        except NotWhole as error:
            record["problem"] = str(error)
        return record

    def _ask(self, fault: Row) -> tuple[Row, tuple[int, ...], bool, dict[str, Any]]:
        """Return (the fault with its final nodes, lost nodes, whether their agents are lost too, result of
        ``can_recover``).

        A fault of two nodes hits the drawn nodes if the job is predicted to survive their loss, otherwise other nodes.
        Raises MegatronFtError.
        """
        if fault["first"] != "lost":
            for found in on_other_nodes(fault, self.job.num_nodes):
                lost, is_gone = loss_of(found)
                answer = self._answer(lost, is_gone)
                if answer["survives"]:
                    return found, lost, is_gone, answer
            raise NotWhole(f"the job survives this fault on no choice of nodes: {answer['summary']}")
        for lost in losses_of(self.job.num_nodes):
            answer = self._answer(lost, is_gone=True)
            if not answer["survives"]:
                return {**fault, "first": "+".join(f"node:{node}" for node in lost)}, lost, True, answer
        raise NotWhole("the job survives the loss of any three nodes")

    def _answer(self, lost: Sequence[int], is_gone: bool) -> dict[str, Any]:
        """Return the result of ``can_recover`` for exactly this loss at this moment. Waits while a membership is
        forming."""
        deadline = time.monotonic() + WHOLE_SECONDS
        while True:
            try:
                found: Answer = ask_run(self.run_dir, lost, is_gone=is_gone, as_if_running=False)
                break
            except MegatronFtError:
                if time.monotonic() > deadline or self.console.poll() is not None:
                    raise
                time.sleep(_PAUSE_SECONDS)
        cost = found.cost
        return {
            "strategy": cost.strategy,
            "survives": cost.is_recoverable and cost.is_automatic,
            "summary": cost.summary(),
            "max_iterations": cost.max_iterations,
            "asked_at": time.time(),
        }

    @contextlib.contextmanager
    def _held(self, fault: Event) -> Iterator[tuple[list[HeldProcess], list[HeldProcess]]]:
        """Yield the processes that the first and the second fault hit. Raises NotWhole if one of them does not
        exist."""
        wanted = [targets(str(fault[key])) if key in fault else [] for key in ("first", "second")]
        nodes = {node for part in wanted for _, node in part if node is not None}
        with processes_of(self.run_dir, nodes, 1) as by_node, controllers_of(self.run_dir) as controllers:
            found = []
            for part in wanted:
                chosen = [each for what, node in part for each in _chosen(what, node, by_node, controllers)]
                if len(chosen) < len(part):
                    raise NotWhole(f"processes of {part} do not exist: {[each.log for each in chosen]}")
                found.append(chosen)
            yield found[0], found[1]

    def _send(self, fault: Event, first: Sequence[HeldProcess], second: Sequence[HeldProcess]) -> dict[str, Any]:
        """Send the signals. Return their times, their targets, and the effect that ``/proc`` showed."""
        seconds = fault.get("seconds")
        number = signal.SIGKILL if seconds is None else signal.SIGSTOP
        record: dict[str, Any] = {"injected_at": time.time(), "processes": {p.log: p.process_id for p in first}}
        hit = [process for process in first if process.send(number)]
        if second:
            time.sleep(float(fault["delay"]))  # delay after the first fault
            record["second_at"] = time.time()
            record["processes"] |= {process.log: process.process_id for process in second}
            hit += [process for process in second if process.send(number)]
        if seconds is None:
            record["proven"] = len(hit) > 0 and all(process.has_ended(_PROOF_SECONDS) for process in hit)
        else:
            record["proven"] = all(_is_stopped(process) for process in hit)
            time.sleep(float(str(seconds)))  # the process stays stopped for this time
            for process in hit:
                process.send(signal.SIGCONT)
            record["continued_at"] = time.time()
        record["hit"] = [process.log for process in hit]
        record["proven"] = record["proven"] and len(hit) == len(first) + len(second)
        return record

    # --- conditions ----------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], Any], what: str, seconds: float = WHOLE_SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if self.console.poll() is not None:
                raise NotWhole(f"{what}: the job has ended with exit code {self.console.returncode}")
            if time.monotonic() > deadline:
                raise NotWhole(f"{what}: did not happen within {seconds:g} s")
            time.sleep(_PAUSE_SECONDS)
        return found

    def _wait_until_whole(self, num_iterations: int) -> None:
        """Wait until all nodes are members, the membership has reported ``num_iterations`` iterations, and a job with a
        kept layout could replay."""
        self._wait(lambda: self._is_whole(num_iterations), "a whole job before the fault")

    def _is_whole(self, num_iterations: int) -> bool:
        began, nodes = self._membership()
        if began is None or len(nodes) < self.job.num_nodes:
            return False
        if self.job.kind == "kept" and num_iterations:
            events = self.events.lines
            if not any(e["kind"] == "window_committed" and e["time_unix_seconds"] > began for e in events):
                return False
        return len(self._iterations_since(began)) >= num_iterations

    def _membership(self) -> tuple[float | None, set[int]]:
        """Return (time at which the current membership began, its nodes). The time is None before the first
        membership."""
        for event in reversed(self.events.read()):
            if event["kind"] == "membership_changed":
                return event["time_unix_seconds"], set(event["nodes"])
            if event["kind"] == "ranks_ready":
                return event["time_unix_seconds"], set(range(event["world_size"]))
        return None, set()

    def _iterations_since(self, began: float) -> list[dict[str, Any]]:
        return [m for m in self.metrics.read() if m["time_unix_seconds"] > began and "loss" in m]

    def _wait_until_recovered(self, lost: Sequence[int], record: Event) -> None:
        """Wait until the loss was detected and all nodes are members again. If nothing was lost, wait for the next
        iteration."""
        since = record.get("second_at", record["injected_at"])
        if not lost:
            until = record.get("continued_at", since)
            if "controller.log" in record["processes"] and "continued_at" not in record:
                replaced = "controller_replaced"
                self._wait(lambda: any(e["kind"] == replaced for e in self._events_since(since)), "another controller")
                until = self._events_since(since)[-1]["time_unix_seconds"]
            self._wait(lambda: self._iterations_since(until), "an iteration after the fault")
            return
        self._wait(lambda: set(lost) <= self._lost_since(record["injected_at"]), f"the loss of nodes {list(lost)}")
        self._wait(lambda: self._is_whole_after_losses(record["injected_at"]), "all nodes back")

    def _is_whole_after_losses(self, since: float) -> bool:
        began, nodes = self._membership()
        last_loss = max((at for at, _ in losses_since(self.events.read(), self.orders.read(), since)), default=since)
        return began is not None and began > last_loss and len(nodes) == self.job.num_nodes

    def _lost_since(self, since: float) -> set[int]:
        return {node for _, node in losses_since(self.events.read(), self.orders.read(), since)}

    def _events_since(self, since: float) -> list[dict[str, Any]]:
        return [event for event in self.events.read() if event["time_unix_seconds"] > since]

    def _wait_for_a_save(self) -> None:
        """Wait until the folder of a new checkpoint exists."""
        folder = self.run_dir / "checkpoints"

        def saves() -> set[str]:
            return {path.name for path in folder.glob("iter_*")} if folder.exists() else set()

        known = saves()
        self._wait(lambda: saves() - known, "a save")

    def _wait_for_predicted_end(self, strategy: str, since: float) -> dict[str, Any]:
        """Wait for the predicted end of the job. Return ``ended`` with the job's exit code, or ``fell_to`` with the
        predicted strategy by which the job continued. Raises NotWhole if neither happens."""
        deadline = time.monotonic() + WHOLE_SECONDS
        while time.monotonic() < deadline:
            if self.console.poll() is not None:
                return {"ended": int(self.console.returncode)}
            decided = [e["strategy"] for e in self._events_since(since) if e["kind"] == "recovery_started"]
            if strategy in decided and self._is_whole(num_iterations=2):
                return {"fell_to": strategy}
            time.sleep(_PAUSE_SECONDS)
        raise NotWhole(
            f"the job was predicted to end or to continue with {strategy}, but did neither within {WHOLE_SECONDS:g} s"
        )

    def _pace(self) -> float:
        """Return the median duration of recent iterations in seconds."""
        return statistics.median(record["iteration_seconds"] for record in self.metrics.read()[-8:])


def losses_since(events: Sequence[Event], orders: Sequence[Event], since: float) -> list[tuple[float, int]]:
    """Return (time, node) of every loss that the run has recorded since a time. Losses come from events of nodes and
    ranks and from orders."""
    found = [
        (event["time_unix_seconds"], event["node"])
        for event in events
        if event["kind"] in ("node_lost", "rank_failed") and event["time_unix_seconds"] >= since
        if event.get("node") is not None
    ]
    ordered = [order for order in orders if order["time_unix_seconds"] >= since]
    return found + [(order["time_unix_seconds"], node) for order in ordered for node in order.get("lost_nodes", ())]


def _chosen(
    what: str, node: int | None, by_node: Mapping[int, Sequence[HeldProcess]], controllers: Sequence[HeldProcess]
) -> list[HeldProcess]:
    """Return the processes that the target ``what`` of a fault names (``targets``)."""
    if node is None:
        return list(controllers)
    logs = {"rank": f"rank-{node:05d}.log", "agent": f"node-{node:03d}.log", "keeper": f"node-{node:03d}-keeper.log"}
    return [process for process in by_node[node] if what == "node" or process.log == logs[what]]


def _is_stopped(process: HeldProcess) -> bool:
    """Return whether the kernel soon reports that the process is stopped."""
    deadline = time.monotonic() + 1.0
    while process.state != "T" and time.monotonic() < deadline:
        time.sleep(0.001)
    return process.state == "T"
