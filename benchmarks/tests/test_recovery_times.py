"""Tests how the constants of predicted times are computed from measured recoveries."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery_times import MIN_LOSSES, Sample, fit, rewritten
from megatron_ft.planning.cost import recovery_time
from megatron_ft.planning.cost.recovery_time import RecoveryTimes, RecoveryWork

WORK = RecoveryWork(num_ranks=4, state_bytes=5_000_000, restarts_processes=False, sent_bytes=0, again_iterations=0)
KINDS = {
    "living": WORK,
    "node": replace(WORK, num_replaced_nodes=2, again_iterations=5, again_share=0.25),
    "rank": replace(WORK, starts_ranks=True, sent_bytes=2_000_000_000),
    "all ranks": replace(WORK, restarts_processes=True, again_iterations=7),
    "all copies": replace(WORK, restarts_processes=True, tries_processes=True, again_iterations=3),
}
TRUE = replace(
    RecoveryTimes(),
    forming_seconds=1.25,
    replacement_seconds=0.5,
    rank_start_seconds=0.75,
    restart_seconds=2.5,
    abandon_seconds=1.5,
)


def measured(kind: str, error: float = 0.0) -> Sample:
    sample = Sample(kind=kind, work=KINDS[kind], iteration_seconds=0.2, seconds=0.0)
    return replace(sample, seconds=sample.predicted(TRUE) + error)


def test_the_constants_of_measured_times_are_found() -> None:
    samples = [measured(kind, error) for kind in KINDS for error in (-0.2, 0.0, 0.1)]
    assert fit(samples, RecoveryTimes()) == TRUE


def test_too_few_losses_of_a_kind_change_no_constant() -> None:
    samples = [measured("living") for _ in range(MIN_LOSSES)] + [measured("node")] * (MIN_LOSSES - 1)
    found, before = fit(samples, RecoveryTimes()), RecoveryTimes()
    assert found == replace(before, forming_seconds=TRUE.forming_seconds)


def test_a_restart_on_replaced_nodes_determines_no_constant() -> None:
    both = replace(WORK, restarts_processes=True, num_replaced_nodes=1)
    samples = [Sample(kind="node", work=both, iteration_seconds=0.2, seconds=30.0)] * MIN_LOSSES
    assert fit(samples, RecoveryTimes()) == RecoveryTimes()


@pytest.mark.parametrize(
    "changes", [{"served": ["checkpoint", None]}, {"work": None}, {"no_prediction": ["the transfers are not planned"]}]
)
def test_only_recoveries_as_predicted_count(changes: dict[str, Any]) -> None:
    record = {
        "kind": "node",
        "named": ["living_state", None],
        "served": ["living_state", None],
        "no_prediction": [],
        "work": {**asdict(WORK), "again_unknown": []},
        "iteration_seconds": 0.2,
        "seconds": 1.0,
    }
    assert Sample.of(record) == Sample(kind="node", work=WORK, iteration_seconds=0.2, seconds=1.0)
    assert Sample.of({**record, **changes}) is None


def test_written_constants_are_those_of_the_source() -> None:
    source = rewritten(Path(recovery_time.__file__).read_text(), TRUE, "measured")
    module: dict[str, Any] = {"__name__": recovery_time.__name__}
    exec(compile(source, "recovery_time.py", "exec"), module)
    assert asdict(module["RecoveryTimes"]()) == asdict(TRUE)
    assert source.count("# measured\n") == 5
