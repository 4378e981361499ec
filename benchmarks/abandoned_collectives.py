"""Claim ``abandoned-collectives``: nodes die while large payloads are in transfer, and every other rank reports in
time.

Jobs of gloo ranks keep payloads of 64 MiB in flight: all-reduces, all-to-alls, coalesced reduce-scatters and
all-gathers, broadcasts, sends and receives, and several of these at once. Nodes are killed one after the other at
random moments. After a random delay of 0 to 20 ms, in which a controller would detect the loss, the other ranks are
ordered to abandon their operations. The measured time is that from SIGKILL to the arrival of the last survivor's
report. Then the survivors form the next membership in their processes and continue, and their results are checked. At
the end all ranks are ordered to exit, and must exit at once even if an operation still blocks.

The ranks run the project's own code (``payload_ranks``); this script takes the place of the controller. During the
measured time, ranks have priority over other processes of the machine if that is permitted; the result contains the
number of kills with priority. A trial counts only if at least one survivor was in an operation that began before the
kill, had received part of its payload, and failed.
"""

import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.campaign import Outcome, Trial, execute_jobs, run_campaign
from benchmarks.report import finish, parse_arguments

ID = "abandoned-collectives"
NUM_OPERATIONS = 3
"""Number of operations of each membership. A node dies in one of them."""
NUM_NODES, NUM_LEFT = 5, 2
KILLS_PER_JOB = NUM_NODES - NUM_LEFT
NUM_KILLS, QUICK_KILLS = 201, 3
LIMIT_SECONDS = 1.0
QUICK_LIMIT_SECONDS = 5.0
"""Time limit of the quick variant's few kills on a machine that is busy with tests. It is far below gloo's own
timeout."""
EXIT_SECONDS = 5.0
HIGH_PRIORITY = -20
PATIENCE_SECONDS = 60.0
MOST_SECONDS_TO_BREAK = 0.02
SEED = 20261122


def run_job(number: int) -> list[Outcome]:
    """Run a job that loses nodes one after the other. Return an outcome for each kill."""
    from benchmarks.payload_job import PayloadJob

    draw = random.Random(SEED + number)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        job = PayloadJob(NUM_NODES, Path(folder))
        try:
            job.await_records("went_on", PATIENCE_SECONDS)
            for _ in range(KILLS_PER_JOB):
                outcomes.append(_lose_one(job, draw))
            exit_seconds = job.end(PATIENCE_SECONDS)
        except TimeoutError as error:
            failed = Outcome(proven=True, passed=False, num_compared=0, details={"error": str(error)})
            return outcomes + [failed] * (KILLS_PER_JOB - len(outcomes))
        finally:
            job.close()
    details = {**outcomes[-1].details, "exit_seconds": exit_seconds}
    passed = outcomes[-1].passed and exit_seconds < EXIT_SECONDS
    return [*outcomes[:-1], replace(outcomes[-1], passed=passed, details=details)]


def _lose_one(job: Any, draw: random.Random) -> Outcome:
    """Kill one node at a random moment of one of its next operations, and make the other nodes continue."""
    number = draw.randrange(NUM_OPERATIONS)
    job.await_operation(number, PATIENCE_SECONDS)
    began = time.monotonic()
    job.await_operation(number + 1, PATIENCE_SECONDS)
    time.sleep(draw.uniform(0.0, time.monotonic() - began))  # about as long as an operation takes
    before, victim = job.nodes, draw.choice(job.nodes)
    with other_load_kept_out([os.getpid(), *job.process_ids]) as is_kept_out:
        killed = job.kill(victim)
        time.sleep(draw.uniform(0.0, MOST_SECONDS_TO_BREAK))
        job.break_off(f"node {victim} was lost")
        reports = job.await_reports(PATIENCE_SECONDS)
    job.reform(before)
    broken = job.await_records("broke", PATIENCE_SECONDS)
    went_on = job.await_records("went_on", PATIENCE_SECONDS)
    hit = [about for about in broken.values() if about["began"] < killed and about["num_received_bytes"] > 0]
    return Outcome(
        proven=bool(hit),
        passed=True,
        num_compared=len(went_on),  # sums over the next membership, each compared with the number of its ranks
        details={
            "seconds": max(reports.values()) - killed,
            "is_other_load_kept_out": is_kept_out,
            "seconds_to_order": max(about["ordered"] for about in broken.values()) - killed,
            "seconds_to_leave": max(about["left"] for about in broken.values()) - killed,
            "num_survivors": len(reports),
            "num_abandoned": sum(about["num_abandoned"] > 0 for about in broken.values()),
            "num_held": sum(about["num_held"] for about in broken.values()),
            "release_seconds": max(about["release_seconds"] for about in broken.values()),
            "operations": sorted({about["operation"] for about in hit}),
        },
    )


@contextmanager
def other_load_kept_out(process_ids: Sequence[int]) -> Iterator[bool]:
    """Give processes a higher priority than others while the block runs. Yield False if this is not permitted.

    With priority, a busy machine gives the same figures as an idle one.
    """
    before = os.nice(0)
    is_permitted = _set_priority(process_ids, HIGH_PRIORITY)
    try:
        yield is_permitted
    finally:
        if is_permitted:
            _set_priority(process_ids, before)


def _set_priority(process_ids: Sequence[int], priority: int) -> bool:
    """Set the priority of all threads of these processes. Ended processes are ignored. Return False if this is not
    permitted."""
    for process_id in process_ids:
        try:
            threads = [int(name) for name in os.listdir(f"/proc/{process_id}/task")]
        except FileNotFoundError:
            continue
        for thread in threads:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, priority)
            except PermissionError:
                return False
            except ProcessLookupError:
                pass
    return True


def execute(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
    """Run all trials, in a process that has imported the modules that ranks need."""
    from megatron_ft.mcore.rank_main import warm

    warm()
    return execute_jobs(trials, run_job)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that at least the fraction ``share`` of them does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> int:
    """Run the campaign and judge its result."""
    arguments = parse_arguments(__doc__)
    num_kills = QUICK_KILLS if arguments.quick else NUM_KILLS
    limit = QUICK_LIMIT_SECONDS if arguments.quick else LIMIT_SECONDS
    rows = [{"job": kill // KILLS_PER_JOB, "fault": kill % KILLS_PER_JOB} for kill in range(num_kills)]
    counts, outcomes = run_campaign(ID, rows, execute, script=Path(__file__), quick=arguments.quick)
    proven = [outcome.details for _, outcome in outcomes if outcome.proven and "seconds" in outcome.details]
    seconds = [about["seconds"] for about in proven] or [math.inf]
    p50, p99, longest = percentile(seconds, 0.5), percentile(seconds, 0.99), max(seconds)
    num_abandoned = sum(about["num_abandoned"] for about in proven)
    num_kills_abandoned = sum(about["num_abandoned"] > 0 for about in proven)
    num_kept_out = sum(about["is_other_load_kept_out"] for about in proven)
    operations = Counter(name for about in proven for name in about["operations"])
    return finish(
        arguments.out,
        ID,
        passed=counts.complete and p99 < limit,
        figure=(
            f"{len(proven)} of {counts.planned} kills with every survivor's process kept; from SIGKILL to the last "
            f"report p50 {p50:.2f} s, p99 {p99:.2f} s, longest {longest:.2f} s; gloo forgot an operation in "
            f"{num_kills_abandoned} of them"
        ),
        threshold=f"all survivors of {num_kills} kills report, continue; p99 < {limit:g} s; exit < {EXIT_SECONDS:g} s",
        counts={
            "kills": counts.planned,
            "failed": counts.failed,
            "unproven": counts.unproven,
            "run again after a failure": counts.failed_before,
            "run again because nothing was hit": counts.unproven_before,
            "survivors": sum(about["num_survivors"] for about in proven),
            "abandoned_waits": num_abandoned,
            "measured with high priority": num_kept_out,
            **{f"in {name}": number for name, number in sorted(operations.items())},
        },
        details={"seconds": sorted(seconds), "trials": proven},
    )


if __name__ == "__main__":
    raise SystemExit(main())
