"""Writes folders of imaginary runs for tests, in the formats that ranks and the control plane use."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ft import events
from megatron_ft.events import Metrics, Record
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.telemetry.report.files import RunFiles
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.page import render

ZERO = 1_700_000_000.0
"""Wall-clock time, in seconds since 1970, at which the imaginary runs begin."""
ITERATION_SECONDS = 0.5
RUN_STARTED = {"kind": "run_started", "run_name": "trial", "model": "moe_micro", "world_size": 2}
PLAN = PlacementPlan(
    num_experts=4,
    num_slots_per_rank=3,
    ranks=(0, 1),
    domains=("node0", "node1"),
    layer_numbers=(2,),
    slots=(((0, 1, 1), (1, 2, 3)),),
    algorithm="overlap_search",
)


def metrics_record(iteration: int, loss: float | str | None = None) -> dict[str, object]:
    """Return the metrics record of an imaginary iteration. If no loss is given, the loss falls with the iteration."""
    return {
        "kind": "metrics",
        "iteration": iteration,
        "loss": 5.0 / iteration if loss is None else loss,
        "grad_norm": 1.0 + 0.1 * iteration,
        "learning_rate": 1e-3,
        "tokens": 2048,
        "iteration_seconds": 0.5,
        "tokens_per_second": 4096.0,
    }


def run_records(first: int, last: int, *, loss_offset: float = 0.0) -> Iterator[dict[str, object]]:
    """Yield records of an imaginary run: metrics and expert load of iterations ``first`` to ``last``, and an
    evaluation after every fourth iteration."""
    for iteration in range(first, last + 1):
        yield metrics_record(iteration, 5.0 / iteration + loss_offset)
        yield {"kind": "expert_load", "iteration": iteration, "layers": [[1, 2, 3, 2], [8, 0, 0, 0]]}
        if iteration % 4 == 0:
            yield {"kind": "evaluation", "iteration": iteration, "loss": 5.1 / iteration}


class MadeUpRun:
    """Folder of an imaginary run, with methods that write its records. Times are seconds after the run's start."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        for name in ("events.jsonl", "metrics.jsonl"):
            (path / name).touch()

    def say(self, at: float, *records: Record) -> None:
        """Write events to ``events.jsonl``, with the time ``at``."""
        for record in records:
            self.line("events.jsonl", {**record.to_record(), "time_unix_seconds": ZERO + at})

    def train(self, first: int, last: int, at: float) -> float:
        """Write metrics of the iterations ``first`` to ``last``. The first iteration begins at ``at``. Return the time
        at which the last iteration ends."""
        for iteration in range(first, last + 1):
            at += ITERATION_SECONDS
            values = {"loss": 5.0 / iteration, "iteration_seconds": ITERATION_SECONDS}
            metrics = Metrics(time_unix_seconds=ZERO + at, iteration=iteration, values=values)
            self.line("metrics.jsonl", metrics.to_record())
        return at

    def decide(self, at: float, generation: int, reason: str, **about: object) -> None:
        """Write a decision of the controller to ``decisions.jsonl``. No report shows its field ``positions``."""
        positions = [{"rank": 0, "generation": generation, "completed": 4, "contributed": 4, "vote": None}]
        head = {"generation": generation, "time_unix_seconds": ZERO + at, "reason": reason, "positions": positions}
        self.line("decisions.jsonl", head | about)

    def line(self, file: str, content: object) -> None:
        with (self.path / file).open("a") as lines:
            lines.write(json.dumps(content) + "\n")

    def files(self) -> RunFiles:
        return RunFiles.read(self.path)

    def report(self) -> RunReport:
        return RunReport.of(self.files())

    def page(self) -> str:
        return render(self.report())


def started(world_size: int = 4, resumed_from_iteration: int | None = None, name: str = "trial") -> events.RunStarted:
    """Return the event ``RunStarted`` of an imaginary run with one rank per node."""
    return events.RunStarted(
        run_name=name,
        model="moe_micro",
        world_size=world_size,
        num_nodes=world_size,
        train_iterations=16,
        device="cpu",
        resumed_from="somewhere" if resumed_from_iteration is not None else None,
        resumed_from_iteration=resumed_from_iteration,
    )


def next_membership(generation: int, previous_ranks: Sequence[int | None], nodes: Sequence[int]) -> dict[str, object]:
    """Return a membership (the ranks that train together from now on) in the format of ``decisions.jsonl``."""
    target = {"iteration": 12, "vote": None}
    about = {"generation": generation, "previous_ranks": list(previous_ranks), "nodes": list(nodes), "target": target}
    return about | {"master_addr": "127.0.0.1", "master_port": 1, "reason": ""}


def stage_recovery(rank: int, role: str, *, began: float, seconds: float, **about: int) -> events.StageRecovery:
    """Return the event in which a rank reports its work in a recovery. The job has two ranks per pipeline stage. With
    role ``replays``, the rank runs iterations 8 to 12 again."""
    replays = role == "replays"
    return events.StageRecovery(
        generation=about.get("generation", 1),
        rank=rank,
        stage=rank // 2,
        role=role,
        start_iteration=7 if replays else 12,
        iteration=12,
        num_iterations=5 if replays else 0,
        num_forward_passes=40 if replays else 0,
        bytes_moved=about.get("bytes_moved", 0),
        began_unix_seconds=ZERO + began,
        seconds=seconds,
    )


def localized(run: MadeUpRun, *, ends: bool = True) -> None:
    """Write a run with 4 ranks in which rank 2 dies in iteration 13. Spare node 4 replaces its node, and the ranks of
    its pipeline stage run iterations 8 to 12 again.

    The work of each rank is written before the new membership is reported, as in a real run.
    """
    run.say(0.0, started(), events.RanksReady(seconds=0.1, world_size=4))
    run.train(1, 12, 0.1)
    run.say(6.30, events.FailpointHit(action="kill", phase="forward", iteration=13, rank=2, node=2))
    run.say(6.32, events.RankFailed(rank=2, node=2, signal="SIGKILL", first=True, iteration=13))
    about = {"lost_nodes": [2], "left_nodes": [], "joined_nodes": [4]}
    run.decide(6.40, 0, "rank 2 was killed", next=next_membership(1, (0, 1, None, 3), (0, 1, 4, 3)), **about)
    run.say(6.9, events.RecoveryStarted(generation=1, strategy="localized_replay", iteration=12))
    run.say(8.0, stage_recovery(3, "replays", began=7.0, seconds=1.0, bytes_moved=2_000_000))
    run.say(8.0, stage_recovery(2, "replays", began=7.0, seconds=0.9, bytes_moved=1_500_000))
    run.say(8.0, stage_recovery(0, "serves", began=7.0, seconds=1.0, bytes_moved=3_500_000))
    run.say(8.0, stage_recovery(1, "waits", began=7.0, seconds=1.0))
    changed = {"world_size": 4, "nodes": (0, 1, 4, 3), "reason": "rank 2 was killed", "iteration": 12}
    run.say(8.0, events.MembershipChanged(generation=1, seconds=1.5, **changed))
    end = run.train(13, 16, 8.1)
    if ends:
        run.say(end, events.RunFinished(exit_code=0, reason="all ranks have finished", iteration=16))


def placed(run: MadeUpRun, iteration: int, at: float = 0.5, reason: str = "first") -> Path:
    """Write an event (placement ``PLAN`` is in use from ``iteration`` on) and the placement's file. Return its path."""
    about = {"moved_bytes": 3_000_000, "imbalance_before": 2.5, "imbalance_after": 1.25, "gain": 0.5, "seconds": 0.04}
    changed = about if reason != "first" else {}
    run.say(at, events.PlacementInForce(iteration=iteration, reason=reason, stages=(PLAN.summary(),), **changed))
    path = run.path / "placements" / f"iter_{iteration:07d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"stages": [PLAN.to_json()], "loads": None}))
    return path


def elastic(run: MadeUpRun) -> None:
    """Write a run with expert replicas on 3 nodes. Node 1 is lost in iteration 5, and joins again before iteration
    9."""
    run.say(0.0, started(3), events.RanksReady(seconds=0.1, world_size=3))
    placed(run, 1, at=0.05)
    run.say(0.06, events.AlertRaised(alert="single_loss_survival", value=0.5, limit=1.0, iteration=1))
    for iteration in range(1, 5):
        run.say(0.1 + iteration, events.ExpertLoad(iteration=iteration, layers=((1, 2, 3, 2), (8, 0, 0, 1))))
    run.train(1, 4, 0.1)
    run.say(2.3, events.RankFailed(rank=1, node=1, signal="SIGKILL", first=True, iteration=5))
    run.decide(2.4, 0, "rank 1 was killed", next=next_membership(1, (0, 2), (0, 2)), lost_nodes=[1])
    _goes_on(run, 3.4, 1, (0, 2), 4)
    end = run.train(5, 8, 3.4)
    run.decide(end + 0.1, 1, "nodes [1] join", next=next_membership(2, (0, None, 1), (0, 1, 2)), joined_nodes=[1])
    _goes_on(run, end + 1.1, 2, (0, 1, 2), 8)
    run.train(9, 10, end + 1.1)


def _goes_on(run: MadeUpRun, at: float, generation: int, nodes: tuple[int, ...], iteration: int) -> None:
    reason = "nodes [1] join" if len(nodes) == 3 else "rank 1 was killed"
    about = {"world_size": len(nodes), "nodes": nodes, "reason": reason, "iteration": iteration}
    run.say(at, events.RecoveryStarted(generation=generation, strategy="living_state", iteration=iteration))
    run.say(at, events.MembershipChanged(generation=generation, seconds=0.9, **about))


def restarted(run: MadeUpRun) -> None:
    """Write a run with 3 ranks in which rank 1 dies in iteration 9. The job cannot continue without a restart, so two
    ranks restart from the checkpoint of iteration 6."""
    run.say(0.0, started(3), events.RanksReady(seconds=0.1, world_size=3))
    run.train(1, 8, 0.0)
    run.say(4.2, events.RankFailed(rank=1, node=1, signal="SIGKILL", first=True, iteration=9))
    run.say(4.3, events.RankFailed(rank=0, node=0, exit_code=8, iteration=9, error="connection closed"))
    run.decide(4.5, 0, "rank 1 was killed", declined="no copy of expert 3", lost_nodes=[1])
    about = {"reason": "rank 1 was killed", "failed_ranks": (1, 0), "iteration": 9, "num_restarts_left": 1}
    run.say(5.0, events.RanksRestarted(generation=1, **about))
    run.say(7.0, events.CheckpointLoaded(iteration=6, seconds=0.5))
    run.say(7.1, events.RecoveryStarted(generation=1, strategy="checkpoint", iteration=6, declined=("no window",)))
    run.say(7.2, started(2, resumed_from_iteration=6), events.RanksReady(seconds=1.0, world_size=2))
    end = run.train(7, 12, 7.2)
    run.say(end, events.RunStopped(exit_code=130, reason="SIGINT", iteration=12))
