"""Functions that ranks without a model run instead of the training loop, for tests of the control plane alone."""

import dataclasses
import json
import socket
import threading
import time
from pathlib import Path

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import TrainingStopped
from megatron_ft.framing import FrameReader, send
from megatron_ft.planning.recovery.membership import NextMembership, Position
from megatron_ft.planning.snapshot.memory import PeerAssignment
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME

ITERATION_SECONDS = 0.02
LAST_COMPLETED = 4
"""Iteration that every rank of ``run_surviving`` reports as completed when a rank is lost in generation 0. In
generation g (after g changes of membership), the reported iteration is higher by 10 * g."""


def run(config: JobConfig, context: RankContext) -> bool:
    """Count iterations instead of training. Rank 0 reports them. Failpoints and stop requests act as in training.
    Return whether the run is complete. The other ``run...`` functions of this module return the same."""
    record = failpoints.append_to(context.run_dir / "failpoints.jsonl")
    failpoints.arm(
        config.testing.failpoints, rank=context.rank, node=context.node, generation=context.generation, record=record
    )
    failpoints.watch(context.worker.progress)
    print(f"rank {context.rank} of {context.world_size} on node {context.node}", flush=True)
    (context.run_dir / "logs" / f"started-{context.rank}").write_text(str(time.time()))
    for iteration in range(1, config.training.train_iterations + 1):
        for phase in ("forward", "backward"):
            failpoints.hit(phase, iteration)
        time.sleep(ITERATION_SECONDS)
        if context.rank == 0:
            context.worker.report({"kind": "metrics", "iteration": iteration, "loss": 1.0 / iteration})
        if context.worker.stop_requested():
            folder = context.run_dir / "checkpoints" / directory_name(iteration)
            folder.mkdir(exist_ok=True)
            (folder / f"rank-{context.rank}").touch()
            (folder / MANIFEST_NAME).touch()
            return False
    return True


def run_restarted(config: JobConfig, context: RankContext) -> bool:
    """Report the rank, generation, port and checkpoint with which this rank starts, then call ``run``."""
    names = ("rank", "generation", "master_port")
    resume_from = None if context.resume_from is None else str(context.resume_from)
    started = {name: getattr(context, name) for name in names} | {"resume_from": resume_from}
    context.worker.report({"kind": "started", **started})
    return run(config, context)


def run_surviving(config: JobConfig, context: RankContext) -> bool:
    """Count iterations instead of training. After a loss of ranks, report and join the next membership.

    Failpoints (injected faults) of phase ``replay`` act before a rank reports which iteration it completed. Those of
    phase ``build`` act when the rank continues.
    """
    record = failpoints.append_to(context.run_dir / "failpoints.jsonl")
    if context.is_joining:
        context.worker.report({"kind": "waiting", "number": context.rank, "node": context.node})
        begun = _begin(context, context.worker.await_membership())
        if begun is None:
            return False
        context = begun
    else:
        _wait_for_all(context)
    iteration = 1
    while True:
        where = {"rank": context.rank, "node": context.node, "generation": context.generation}
        failpoints.arm(config.testing.failpoints, **where, record=record)
        failpoints.watch(context.worker.progress)
        broken = threading.Event()
        context.worker.on_break(lambda _reason, broken=broken: broken.set())
        failpoints.hit("build", iteration)
        following: NextMembership | None
        try:
            while iteration <= config.training.train_iterations and not context.worker.change_requested():
                failpoints.hit("forward", iteration)
                if broken.wait(ITERATION_SECONDS):
                    raise RuntimeError("connection closed by peer")
                if context.worker.stop_requested():
                    return False
                iteration += 1
            if not context.worker.change_requested():
                return True
            leaving = context.worker.awaited_change().leaving
            following = context.worker.change(_position(context))
            if following is None:
                context.worker.report({"kind": "left", "rank": context.rank, "leaving": list(leaving)})
                return False
        except (RuntimeError, TrainingStopped) as error:
            failpoints.hit("replay", iteration)
            following = context.worker.survive(_position(context), error)
        begun = _begin(context, following)
        if begun is None:
            return False
        context = begun


def run_in_domains(config: JobConfig, context: RankContext) -> bool:
    """Report the configured failure domains and the peers of this rank's node, then call ``run_surviving``."""
    peers = PeerAssignment.of(config.member_domains, config.snapshot.num_peer_copies).peers
    own = peers[context.node] if context.node < len(peers) else ()
    domains = config.topology.failure_domains
    context.worker.report({"kind": "domains", "node": context.node, "domains": domains, "peers": list(own)})
    return run_surviving(config, context)


def _position(context: RankContext) -> Position:
    completed = LAST_COMPLETED + 10 * context.generation
    return Position(
        rank=context.rank, generation=context.generation, completed=completed, contributed=completed, vote=None
    )


def _begin(context: RankContext, following: NextMembership) -> RankContext | None:
    """Wait for the first membership, from ``following`` on, that has a rank for this process. Report the start of this
    membership, and return the rank's context in it. Return None if the process's node leaves the job first."""
    rank = following.rank_on(context.node, context.local_rank)
    while rank is None:
        context.worker.report({"kind": "spared", "node": context.node, "generation": following.generation})
        awaited = context.worker.stand_by()
        if awaited is None:
            return None
        following = awaited
        rank = following.rank_on(context.node, context.local_rank)
    context.worker.report({"kind": "reformed", "rank": rank, "node": context.node, "next": following.to_json()})
    about = {"rank": rank, "world_size": following.world_size, "generation": following.generation}
    return dataclasses.replace(context, **about, master_port=following.master_port)


def _wait_for_all(context: RankContext) -> None:
    """Report the start of this rank, and wait until ``records.jsonl`` contains such a report of every rank. Ranks with
    a model also wait for each other at their start."""
    about = {"world_size": context.world_size, "nodes": list(context.nodes), "num_nodes": context.num_nodes}
    started = {"rank": context.rank, "node": context.node, "generation": context.generation, **about}
    context.worker.report({"kind": "started", **started})
    sink = context.run_dir / "records.jsonl"
    while True:
        lines = [json.loads(line) for line in sink.read_text().splitlines(keepends=True) if line.endswith("\n")]
        started = [line for line in lines if line["kind"] == "started" and line["generation"] == context.generation]
        if len(started) == context.world_size:
            return
        threading.Event().wait(ITERATION_SECONDS)


def run_with_sidecar(config: JobConfig, context: RankContext) -> bool:
    """Send a request to the sidecar (helper process) of this rank's node, report the answer, then call ``run``."""
    service = context.sidecars["dummy"]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(service["socket"])
        send(connection, {"token": service["token"]})
        (answer,), _ = FrameReader(connection).pump()
    where = {"rank": context.rank, "node": context.node, "generation": context.generation}
    context.worker.report({"kind": "service", **where, **answer, "addresses": service["addresses"]})
    return run(config, context)


def run_stubborn(config: JobConfig, context: RankContext) -> None:
    """Run for ever and ignore stop requests."""
    context.worker.report({"kind": "metrics", "iteration": 1, "loss": 1.0})
    while True:
        time.sleep(1.0)


def run_stopped_by_policy(config: JobConfig, context: RankContext) -> None:
    """Raise the error ``TrainingStopped``, as if a policy stopped training because the loss is NaN."""
    raise TrainingStopped("training.non_finite_policy=stop: loss is NaN at iteration 3")


def run_chatty(config: JobConfig, context: RankContext) -> bool:
    """Report metrics of all iterations as fast as possible."""
    for iteration in range(1, config.training.train_iterations + 1):
        context.worker.report({"kind": "metrics", "iteration": iteration, "loss": float(context.rank)})
    Path(context.run_dir / f"chatty-{context.rank}").touch()
    return True


def take_time() -> None:
    """Sleep two seconds. A fork server that runs this function at its start is delayed by it."""
    time.sleep(2.0)
