"""Measures the constants of ``RecoveryTimes``, and writes them into ``planning/cost/recovery_time.py``.

    python -m benchmarks.recovery_times            # measures, and prints the constants
    python -m benchmarks.recovery_times --write    # also replaces the constants in the source

Jobs lose ranks and nodes, from outside. They are other jobs than those of the claims about predicted times. The known
parts of the time of each recovery (iterations that run again, bytes that are sent and built) are subtracted. The
medians of the remaining times of each kind of loss give the constants. Predictions describe a quiet machine, so a job
begins only when the load is at most 2; the command ends with exit code 1 if that does not happen.
"""

import argparse
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.fallback_jobs import LINK_BYTES_PER_SECOND, Driver, FallbackJob
from benchmarks.fallback_order import FACTOR, MOST_LOAD, WARM
from benchmarks.localized_jobs import Layout
from megatron_ft.planning.cost import recovery_time
from megatron_ft.planning.cost.recovery_time import RecoveryTimes, RecoveryWork
from megatron_ft.testing.jobs import forkserver

SEED = 20261126
MIN_LOSSES = 3
"""Smallest number of losses of a kind from which a constant is computed."""
QUIET_SECONDS = 600.0
_FITTED = ("forming_seconds", "replacement_seconds", "rank_start_seconds", "restart_seconds", "abandon_seconds")
"""Constants that are computed from losses, in this order. Every recovery takes the first time. The last time is an
addition to the one before it."""
_STAGED = ("rank", "node", "all ranks", "rank", "node", "all ranks")
_REPLICATED = ("rank", "node", "all copies of an expert", "rank", "node", "all copies of an expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured recovery."""

    kind: str
    work: RecoveryWork
    iteration_seconds: float
    seconds: float
    """Time from the loss until the first iteration began that had not been committed before."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Sample | None":
        """Return the recovery in a record of ``fallback_jobs.Driver``; None if another strategy than the predicted one
        was used, or if no time was predicted."""
        if record.get("work") is None or record.get("served") != record["named"] or record["no_prediction"]:
            return None
        work = {**record["work"], "again_unknown": tuple(record["work"]["again_unknown"])}
        return cls(
            kind=record["kind"],
            work=RecoveryWork(**work),
            iteration_seconds=record["iteration_seconds"],
            seconds=record["seconds"],
        )

    def predicted(self, times: RecoveryTimes) -> float:
        """Return the seconds that ``times`` predicts."""
        found = times.predict(
            self.work, link_bytes_per_second=LINK_BYTES_PER_SECOND, iteration_seconds=self.iteration_seconds
        )
        assert found.seconds is not None, found.summary()
        return found.seconds


def fit(samples: Sequence[Sample], times: RecoveryTimes) -> RecoveryTimes:
    """Return ``times`` with the constants that ``samples`` determine. A kind of loss with fewer than ``MIN_LOSSES``
    samples changes no constant."""
    for name in _FITTED:
        found = [sample for sample in samples if _decides(sample.work) == name]
        if len(found) >= MIN_LOSSES:
            # The constants before this one are known already, so only this one is left.
            without = replace(times, **{name: 0.0})
            rest = statistics.median(
                (sample.seconds - sample.predicted(without)) / max(1, sample.work.num_replaced_nodes)
                for sample in found
            )
            times = replace(times, **{name: round(max(0.0, rest), 3)})
    return times


def _decides(work: RecoveryWork) -> str | None:
    """Return the constant of ``_FITTED`` that a recovery determines if all earlier constants are known; None if it
    depends on several unknown constants."""
    found = {
        "replacement_seconds": work.num_replaced_nodes > 0,
        "rank_start_seconds": work.starts_ranks,
        "restart_seconds": work.restarts_processes,
    }
    names = [name for name, is_part in found.items() if is_part]
    if work.tries_processes and names == ["restart_seconds"]:
        return "abandon_seconds"
    return None if len(names) > 1 else names[0] if names else "forming_seconds"


def rewritten(source: str, times: RecoveryTimes, origin: str) -> str:
    """Return the source of ``recovery_time.py`` with the constants of ``times``. A constant that changes gets the
    comment ``origin``."""
    for entry in fields(RecoveryTimes):
        value = getattr(times, entry.name)
        if value == entry.default:
            continue
        line = re.compile(rf"(?:    #[^\n]*\n)+    {entry.name}: float = [^\n]+\n")
        source, count = line.subn(f"    # {origin}\n    {entry.name}: float = {value!r}\n", source)
        assert count == 1, f"{entry.name} has no line with a comment in the source"
    return source


def measure() -> tuple[list[Sample], float]:
    """Run all jobs. Return the recoveries, and the largest load of the machine before a job.

    Raises:
        TimeoutError: the machine does not become quiet.
    """
    jobs = [FallbackJob.staged(n, _STAGED, Layout(pp=2, dp=2, sharded=True)) for n in range(2)]
    jobs += [FallbackJob.replicated(n, _REPLICATED, num_nodes=4) for n in range(2, 5)]
    found, load = list[Sample](), 0.0
    with tempfile.TemporaryDirectory(prefix="recovery-times-") as folder, forkserver(WARM) as socket:
        for job in jobs:
            load = max(load, _wait_until_quiet())
            rng = random.Random(f"{SEED} {job.number}")
            records, _, _ = Driver(job=job, folder=Path(folder), socket=socket, rng=rng).run()
            for record in records:
                sample = Sample.of(record)
                print(f"job {job.number}: {record['kind']}: {record.get('seconds', record.get('problem'))}", flush=True)
                found += [] if sample is None else [sample]
    return found, load


def _wait_until_quiet() -> float:
    deadline = time.monotonic() + QUIET_SECONDS
    while (load := os.getloadavg()[0]) > MOST_LOAD:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the load of the machine stays at {load:.1f}; it must be at most {MOST_LOAD:g}")
        time.sleep(1.0)
    return load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    first, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="recovery_times", description=first)
    parser.add_argument("--write", action="store_true", help="replace the constants in the source")
    options = parser.parse_args(argv)
    try:
        samples, load = measure()
    except TimeoutError as error:
        print(f"recovery_times: {error}", file=sys.stderr)
        return 1
    before = RecoveryTimes()
    times = fit(samples, before)
    good = sum(1 / FACTOR <= sample.seconds / sample.predicted(times) <= FACTOR for sample in samples)
    for entry in fields(RecoveryTimes):
        print(f"{entry.name} = {getattr(times, entry.name)} (before: {getattr(before, entry.name)})")
    print(f"{good} of {len(samples)} measured times are within a factor of {FACTOR:g} of these constants")
    if options.write:
        day = time.strftime("%Y-%m-%d")
        origin = f"benchmarks/recovery_times.py on {day}: median of {len(samples)} losses at a load up to {load:.1f}."
        path = Path(recovery_time.__file__)
        path.write_text(rewritten(path.read_text(), times, origin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
