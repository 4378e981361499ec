"""Claim ``trace-replay``: a recorded trace of preemptible nodes, replayed on a running job and on restarts from
checkpoints.

The trace is the first 80 minutes of Bamboo's trace (Lazarus, section 6.4), scaled in time, on at most ten nodes with
one rank each. All processes of a lost node receive SIGKILL; an arriving node is added by an operator's call. For
comparison, a second job runs the same training and is killed as a whole at the time of every change. It is started
again from the same fork server on the available nodes, and continues from its newest dense checkpoint. The compared
figure is the number of different iterations that are still valid at the end of the replayed time.
"""

import dataclasses
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.elastic_jobs import untold
from benchmarks.kill_peers import records_of
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from benchmarks.trace_jobs import Job
from megatron_ft.control.admin import AdminClient
from megatron_ft.control.launcher import PRELOAD
from megatron_ft.failures.injecting import INJECTED_FILE, Injector
from megatron_ft.failures.schedule import FailureSchedule
from megatron_ft.failures.traces import MembershipTrace
from megatron_ft.testing.jobs import forkserver

ID = "trace-replay"
TRACE = ROOT.parent / "shared" / "data" / "traces" / "aws_p3_bamboo.csv"
FULL = {"most_nodes": 10, "minutes": 80, "scale": 1 / 20}
QUICK = {"most_nodes": 5, "minutes": 55, "scale": 1 / 120}
SAVE_INTERVALS, QUICK_INTERVALS = (5, 20), (10,)
"""Iterations between dense checkpoints of the restarted job. The interval with the better figure counts."""
Event = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of replaying the trace on one job."""

    useful_iterations: int
    first_iteration_seconds: float
    """Time from the start of the process to the first iteration. It is not part of the replayed time."""
    iteration_seconds: float
    """Median duration of iterations, which depends on other work on the machine."""
    counts: dict[str, int]
    problems: list[str]
    restart_seconds: list[float | None] = dataclasses.field(default_factory=list)
    """Time from the start of each later launcher to its first iteration; None if the launcher was killed before
    that."""


def measure_elastic(job: Job, schedule: FailureSchedule) -> tuple[Replayed, list[dict[str, Any]]]:
    """Replay the schedule on a running job. Return the result and the injected faults."""
    injector = Injector(run_dir=job.run_dir, ranks_per_node=1, connect=lambda: AdminClient(job.run_dir))
    problems, first_seconds, ended_at = [], 0.0, 0.0
    try:
        job.start(f"launch.num_nodes={schedule.num_initial_nodes}")
        first_seconds = job.wait_for_an_iteration()
        problems += injector.replay(schedule, until=lambda: not job.alive())
        ended_at = time.time()
    except TimeoutError as error:
        problems.append(str(error))
    finally:
        problems += job.stop()
    history = committed(job.iterations(ended_at), job.events())
    injected = records_of(job.run_dir / INJECTED_FILE)
    problems += history.problems + unproven(injected, job.events())
    strategies = [
        event["strategy"] for event in job.events() if event["kind"] == "recovery_started" and event["generation"]
    ]
    changes = [event for event in job.events() if event["kind"] == "membership_changed"]
    counts = {
        "changes_in_living_processes": len(changes),
        "restarts_after_rung_1_declined": sum(event["kind"] == "ranks_restarted" for event in job.events()),
        "continued_from_checkpoint": strategies.count("checkpoint"),
        "run_again": history.num_void,
        "unreported": history.num_untold,
    }
    replayed = Replayed(
        useful_iterations=history.num_iterations,
        first_iteration_seconds=first_seconds,
        iteration_seconds=median_seconds(job.iterations(ended_at)),
        counts=counts,
        problems=problems,
    )
    return replayed, injected


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Iterations that are valid at the end."""

    num_iterations: int
    num_void: int
    """Number of iterations that were reported, and run again after a restart from a checkpoint."""
    num_untold: int
    """Number of iterations that all ranks committed, but whose reporting rank died before its report."""
    problems: list[str]


def committed(iterations: Sequence[Event], events: Sequence[Event]) -> History:
    """Return the valid iterations, each once. Iterations after the checkpoint of a restart are void."""
    changes = [event for event in events if event["kind"] == "membership_changed"]
    restarts = [
        e for e in events if e["kind"] == "recovery_started" and e["generation"] and e["strategy"] != "living_state"
    ]
    problems, standing, num_void = [], set[int](), 0
    for record in sorted([*iterations, *restarts], key=lambda record: record["time_unix_seconds"]):
        iteration = record["iteration"]
        if record.get("kind") == "recovery_started":
            num_void += sum(number > iteration for number in standing)
            standing = {number for number in standing if number <= iteration}
        elif iteration in standing:
            problems.append(f"iteration {iteration} reported twice")
        else:
            standing.add(iteration)
    missing = set(range(1, max(standing, default=0) + 1)) - standing
    unreported = untold(changes, standing)
    num_untold = len(missing & unreported)
    problems += [f"iteration {number} not reported" for number in sorted(missing - unreported)]
    return History(
        num_iterations=len(standing) + num_untold, num_void=num_void, num_untold=num_untold, problems=problems
    )


def unproven(injected: Sequence[Event], events: Sequence[Event]) -> list[str]:
    """Return the killed members of which the job's events do not show that the job continued without them.

    A kill of a node that has not joined yet needs no such proof.
    """
    problems = []
    for number, fault in enumerate(injected):
        since = fault["time_unix_seconds"]
        later = [event for event in events if event["time_unix_seconds"] >= since]
        restarted = any(event["kind"] == "ranks_restarted" for event in later)
        memberships = [event["nodes"] for event in later if event["kind"] == "membership_changed"]
        for node in fault["nodes"] if fault["action"] == "kill" else ():
            was_member = node in _members_before(injected[:number], events, since, node)
            if was_member and not restarted and not any(node not in nodes for nodes in memberships):
                problems.append(f"no membership without node {node} after its death")
    return problems


def _members_before(injected: Sequence[Event], events: Sequence[Event], since: float, node: int) -> list[int]:
    """Return the newest membership before a time; the first membership if nothing has changed yet."""
    earlier = [e for e in events if e["kind"] == "membership_changed" and e["time_unix_seconds"] < since]
    added = any(fault["action"] == "add" and node in fault["nodes"] for fault in injected)
    return list(earlier[-1]["nodes"]) if earlier else ([] if added else [node])


def changes_of(injected: Sequence[Event], num_nodes: int) -> list[tuple[float, int]]:
    """Return each change of the number of nodes: seconds since the replay began, and the number of nodes afterwards."""
    refused = [(fault["action"], tuple(fault["nodes"])) for fault in injected if fault["action"].endswith("_injected")]
    assert not refused, f"the schedule of a replay that failed: {refused}"
    found: dict[int, tuple[float, int]] = {}
    for fault in injected:
        num_nodes += len(fault["nodes"]) if fault["action"] == "add" else -len(fault["nodes"])
        found[fault["event"]] = (fault["at_seconds"], num_nodes)
    return list(found.values())


def measure_restarts(
    job: Job, num_nodes: int, changes: Sequence[tuple[float, int]], duration_seconds: float
) -> Replayed:
    """Replay the trace on the job that is killed and started again at every change."""
    problems, first_seconds, ended_at = [], 0.0, 0.0
    try:
        job.start("run.resume=auto", f"launch.num_nodes={num_nodes}")
        first_seconds = job.wait_for_an_iteration()
        began = time.monotonic()
        for seconds, count in changes:
            _wait_until(began + seconds, job.alive)
            job.kill()
            job.start("run.resume=auto", f"launch.num_nodes={count}")
        _wait_until(began + duration_seconds, job.alive)
        ended_at = time.time()
    except (TimeoutError, psutil.Error) as error:
        problems.append(str(error))
    finally:
        if job.alive() and standing_at_end(job.iterations(), [], job.began) == 0:
            job.kill()  # the last launcher is still starting, so it is killed instead of stopped
        else:
            problems += job.stop()
    loaded = [event for event in job.events() if event["kind"] == "checkpoint_loaded"]
    counts = {"restarts": len(changes), "restarts_that_loaded": len(loaded)}
    return Replayed(
        useful_iterations=standing_at_end(job.iterations(ended_at), job.events(), job.began),
        first_iteration_seconds=first_seconds,
        iteration_seconds=median_seconds(job.iterations(ended_at)),
        counts=counts,
        problems=problems,
        restart_seconds=restart_seconds(job.iterations(ended_at), job.starts)[1:],
    )


def restart_seconds(iterations: Sequence[Event], starts: Sequence[float]) -> list[float | None]:
    """Return the seconds from each start to the first iteration before the next start."""
    times = [record["time_unix_seconds"] for record in iterations]
    return [
        min((at - began for at in times if began <= at < following), default=None)
        for began, following in zip(starts, [*starts[1:], math.inf], strict=True)
    ]


def median_seconds(iterations: Sequence[Event]) -> float:
    """Return the median duration of iterations; 0 if there are none."""
    return statistics.median([record["iteration_seconds"] for record in iterations] or [0.0])


def standing_at_end(iterations: Sequence[Event], events: Sequence[Event], began: float) -> int:
    """Return the newest iteration of the launcher started at ``began``. If it has completed none, return the iteration
    of the newest checkpoint before its start."""
    saved = [e for e in events if e["kind"] == "checkpoint_saved" and e["time_unix_seconds"] < began]
    own = [record["iteration"] for record in iterations if record["time_unix_seconds"] >= began]
    return max(own or [event["iteration"] for event in saved], default=0)


def _wait_until(deadline: float, alive: Callable[[], bool]) -> None:
    """Wait until a time of the monotonic clock. Raises TimeoutError if the job ends before."""
    while (left := deadline - time.monotonic()) > 0:
        if not alive():
            raise TimeoutError("the job ended by itself")
        time.sleep(min(left, 0.05))


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the trace on both kinds of jobs, and judge the figures."""
    arguments = parse_arguments(__doc__, argv)
    schedule = MembershipTrace.read(TRACE).schedule(**(QUICK if arguments.quick else FULL))  # type: ignore[arg-type]
    intervals = QUICK_INTERVALS if arguments.quick else SAVE_INTERVALS
    restarts: dict[int, Replayed] = {}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="trace-replay-") as name, forkserver(*PRELOAD) as socket:
        folder, most = Path(name), schedule.most_nodes
        words = ["recovery.min_nodes=2", f"nodes.max_nodes={most}", "recovery.max_restarts=3"]
        words += ["nodes.join_window_seconds=0.5", f"checkpoint.save_interval_iterations={intervals[-1]}"]
        job = Job(folder, "elastic", words, socket, most)
        elastic, injected = measure_elastic(job, schedule)
        keep(job, elastic)
        load.append(os.getloadavg()[0])
        for interval in intervals if not elastic.problems else ():
            job = Job(folder, f"restarts-{interval}", [f"checkpoint.save_interval_iterations={interval}"], socket, most)
            changes = changes_of(injected, schedule.num_initial_nodes)
            restarts[interval] = measure_restarts(job, schedule.num_initial_nodes, changes, schedule.duration_seconds)
            keep(job, restarts[interval])
            load.append(os.getloadavg()[0])
    return judge(arguments, schedule, elastic, restarts, injected, load)


def keep(job: Job, replayed: Replayed) -> None:
    """Copy the folder of a failed job to a place where users can examine it."""
    if replayed.problems and job.run_dir.exists():
        kept = ROOT / ".cache" / "benchmarks" / ID / job.name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(job.run_dir, kept, ignore=shutil.ignore_patterns("checkpoints"))


def judge(
    arguments: Any,
    schedule: FailureSchedule,
    elastic: Replayed,
    restarts: Mapping[int, Replayed],
    injected: Sequence[Event],
    load: Sequence[float],
) -> int:
    """Write the result. In the quick variant, which runs beside other tests, times are not judged."""
    interval = max(restarts, key=lambda each: restarts[each].useful_iterations, default=0)
    theirs = restarts[interval].useful_iterations if restarts else 0
    problems = elastic.problems + [problem for each in restarts.values() for problem in each.problems]
    num_injected = sum(len(fault["nodes"]) for fault in injected if fault["action"] in ("kill", "add"))
    complete = bool(restarts) and not problems and num_injected == schedule.num_leaves + schedule.num_joins
    passed = complete and (arguments.quick or elastic.useful_iterations > theirs)
    counts = elastic.counts
    their_pace = restarts[interval].iteration_seconds if restarts else 0.0
    took = [seconds for seconds in restarts[interval].restart_seconds if seconds is not None] if restarts else []
    restart = f" ({statistics.median(took):.1f} s until they train)" if took else ""
    figure = (
        f"{elastic.useful_iterations} iterations (median {elastic.iteration_seconds:.2f} s) against {theirs} "
        f"({their_pace:.2f} s) of restarts{restart} from checkpoints every {interval}: "
        f"{elastic.useful_iterations / max(1, theirs):.2f}x, in {schedule.duration_seconds:g} s with "
        f"{schedule.num_leaves} nodes lost (up to {schedule.most_lost_at_once} at once) and {schedule.num_joins} that "
        f"joined, of {schedule.num_initial_nodes}; {counts['restarts_after_rung_1_declined']} times replicas declined "
        f"and a restart served, {counts['run_again']} iterations run again"
    )
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=figure if complete else f"{len(problems)} problems: {problems[0][:300] if problems else 'not injected'}",
        threshold="more iterations than restarts from checkpoints, each once; every event injected, no failure",
        counts={
            "useful_iterations": elastic.useful_iterations,
            "nodes_lost": schedule.num_leaves,
            "nodes_joined": schedule.num_joins,
            "most_lost_at_once": schedule.most_lost_at_once,
            "injected": num_injected,
            **counts,
            **{f"restarts_every_{each}": replayed.useful_iterations for each, replayed in restarts.items()},
        },
        details={
            "schedule": schedule.to_json(),
            "injected": json.loads(json.dumps(list(injected))),
            "elastic": dataclasses.asdict(elastic),
            "restarts": {str(each): dataclasses.asdict(replayed) for each, replayed in restarts.items()},
            "load_average": list(load),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
