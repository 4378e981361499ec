"""Claim ``control-plane-scale``: a controller of 1,024 ranks detects the lost node and no other, and orders the next
membership soon.

The script runs a real controller process. Each node is an agent with the real protocol and its own connection
(``light_agents``); there are no ranks, and nothing trains. Nodes die one after the other. The launcher reports each
death, as it does for a process that ends; the other nodes report their progress, and the controller orders the next
membership. The measured time is that from the death to the arrival of this order at the last agent. Agents, launcher
and controller share the machine. The job may continue with a single node. So if a healthy node is lost by mistake, it
stays lost and is found at the end.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.light_agents import Fleet
from benchmarks.real_controller import RealController, real_controller
from benchmarks.report import finish, parse_arguments
from megatron_ft.control.admin import AdminClient
from megatron_ft.control.membership.events import KillRequested, NodeLost
from megatron_ft.framing import Message

ID = "control-plane-scale"
NUM_NODES, QUICK_NODES = 128, 16
RANKS_PER_NODE = 8
NUM_LOSSES, QUICK_LOSSES = 5, 2
MOST_SECONDS = 2.0
STEADY_SECONDS = 3.0
LIMIT_SECONDS = 60.0


@dataclass(slots=True)
class Outcome:
    """Observations of the run."""

    problems: list[str] = field(default_factory=list)
    formed_seconds: float = 0.0
    steady_share: float = 0.0
    """Share of one processor that the controller uses while nothing happens."""
    order_seconds: list[float] = field(default_factory=list)
    """Time from each death until the last agent has received the order."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time that the controller uses for each loss."""
    journal_bytes: list[int] = field(default_factory=list)
    """Bytes that each loss adds to the journal."""
    num_retries: int = 0


async def status_when(run_dir: Path, phase: str, seconds: float) -> Message:
    """Return the job's status when it has reached ``phase``, or the last status before the time limit."""
    deadline = time.monotonic() + seconds
    while True:
        status = await asyncio.to_thread(ask_status, run_dir)
        if status["phase"] == phase or time.monotonic() > deadline:
            return status
        await asyncio.sleep(0.05)


def ask_status(run_dir: Path) -> Message:
    """Ask the controller for the job's status over a new connection."""
    with AdminClient(run_dir) as operator:
        return operator.status()


async def lose_nodes(job: RealController, num_nodes: int, losses: Sequence[int]) -> Outcome:
    """Form a job, lose one node after the other, and end the job."""
    outcome, fleet = Outcome(), Fleet(job.address, job.token)
    began = time.monotonic()
    for node in range(num_nodes):
        fleet.begin(node, 1000 + node)
    status = await status_when(job.run_dir, "running", LIMIT_SECONDS)
    outcome.formed_seconds = time.monotonic() - began
    if status["phase"] != "running":
        outcome.problems.append(f"the job is {status['phase']} after {LIMIT_SECONDS:g} s")
    before = job.cpu_seconds
    await asyncio.sleep(STEADY_SECONDS)
    outcome.steady_share = (job.cpu_seconds - before) / STEADY_SECONDS
    for number, node in enumerate(losses, start=1):
        await lose_node(job, fleet, outcome, node, number)
        await asyncio.sleep(STEADY_SECONDS)
    status = await asyncio.to_thread(ask_status, job.run_dir)
    if status["members"] != sorted(fleet.agents):
        outcome.problems.append(f"the members are {status['members']}, but the living nodes are {sorted(fleet.agents)}")
    outcome.problems += [f"node {node} was refused: {why}" for node, why in fleet.refused.items()]
    outcome.problems += [f"the controller was replaced {job.num_replaced} times"] if job.num_replaced else []
    outcome.num_retries = sum(agent.retries for agent in fleet.agents.values())
    job.link.post(KillRequested())
    await fleet.end(LIMIT_SECONDS)
    return outcome


async def lose_node(job: RealController, fleet: Fleet, outcome: Outcome, node: int, generation: int) -> None:
    """Kill one node, and wait for the next membership, whose number is ``generation``."""
    journal, cpu = job.run_dir / "control" / "journal.jsonl", job.cpu_seconds
    num_bytes = journal.stat().st_size
    process_id = await fleet.kill(node)
    died = time.monotonic()
    job.link.post(NodeLost(node, time.time(), "its process was killed by SIGKILL", process_id))
    last = await fleet.last_arrival("reform", generation, LIMIT_SECONDS)
    if last is None:
        outcome.problems.append(
            f"after the loss of node {node} some agents received no order within {LIMIT_SECONDS:g} s"
        )
        return
    outcome.order_seconds.append(last - died)
    outcome.cpu_seconds.append(job.cpu_seconds - cpu)
    outcome.journal_bytes.append(journal.stat().st_size - num_bytes)


def healthy_nodes_lost(run_dir: Path, losses: Sequence[int]) -> list[int]:
    """Return the nodes about which the decisions are wrong: living nodes named as lost, and dead nodes not named."""
    path = run_dir / "decisions.jsonl"
    decisions = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    named = [node for decision in decisions for node in decision.get("lost_nodes", ())]
    return sorted(set(named) ^ set(losses))


def measure(num_nodes: int, num_losses: int) -> tuple[Outcome, list[int], Any]:
    """Run one job. Return the observations, the healthy nodes that were lost, and how the job ended."""
    losses = [(7 + 31 * number) % num_nodes for number in range(num_losses)]
    with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
        with real_controller(Path(folder), num_nodes, RANKS_PER_NODE) as job:
            outcome = asyncio.run(lose_nodes(job, num_nodes, losses))
        return outcome, healthy_nodes_lost(Path(folder), losses), job.end


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    num_nodes, num_losses = (QUICK_NODES, QUICK_LOSSES) if arguments.quick else (NUM_NODES, NUM_LOSSES)
    outcome, wrong, end = measure(num_nodes, num_losses)
    if end is None:
        outcome.problems.append("the job did not end")
    slowest = max(outcome.order_seconds, default=float("inf"))
    is_complete = len(outcome.order_seconds) == num_losses
    passed = is_complete and not outcome.problems and not wrong and slowest <= MOST_SECONDS
    figure = (
        f"{num_losses} of {num_nodes} nodes with {RANKS_PER_NODE} ranks each lost one after the other, {len(wrong)} "
        f"healthy ones with them; order at the last agent after at most {slowest:.2f} s"
    )
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=figure,
        threshold=f"0 healthy nodes lost; the order reaches the last agent within {MOST_SECONDS:g} s",
        counts={"nodes": num_nodes, "ranks": num_nodes * RANKS_PER_NODE, "losses": len(outcome.order_seconds)},
        details={
            "problems": outcome.problems,
            "healthy_nodes_lost": wrong,
            "formed_seconds": outcome.formed_seconds,
            "steady_share_of_a_processor": outcome.steady_share,
            "order_seconds": outcome.order_seconds,
            "controller_cpu_seconds_per_loss": outcome.cpu_seconds,
            "journal_bytes_per_loss": outcome.journal_bytes,
            "calls_made_again": outcome.num_retries,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
