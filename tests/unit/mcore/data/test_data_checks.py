"""Tests whether a joining rank reads the same data as the run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import DataError


def samples(fingerprint: str) -> Any:
    """Replacement for samples with only the compared fields."""
    return SimpleNamespace(fingerprint=lambda: fingerprint)


def test_a_joining_node_that_reads_other_data_is_refused_before_it_joins(tmp_path: Path) -> None:
    from megatron_ft.mcore.data.batches import check_run_data, note_run_data

    config = JobConfig()
    check_run_data(config, samples("b"), tmp_path)
    note_run_data(samples("a"), tmp_path)
    check_run_data(config, samples("a"), tmp_path)
    with pytest.raises(DataError, match="data.train=.*: this joining rank reads other data than the run"):
        check_run_data(config, samples("b"), tmp_path)
    note_run_data(samples("b"), tmp_path)
    check_run_data(config, samples("b"), tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}"])
def test_a_damaged_note_is_named(tmp_path: Path, content: bytes) -> None:
    from megatron_ft.mcore.data.batches import RUN_DATA_NAME, check_run_data

    (tmp_path / RUN_DATA_NAME).write_bytes(content)
    with pytest.raises(DataError, match=f"{RUN_DATA_NAME}: must contain the fingerprint"):
        check_run_data(JobConfig(), samples("a"), tmp_path)


def test_without_survivors_other_data_ends_the_job() -> None:
    from megatron_ft.mcore.data.batches import check_newcomers_data

    worker = SimpleNamespace(can_survive=False)
    context: Any = SimpleNamespace(worker=worker, rank=2)
    check_newcomers_data(JobConfig(), context, ["a", "a", "a"], 0)
    with pytest.raises(DataError, match="rank 2 and rank 1 read different data"):
        check_newcomers_data(JobConfig(), context, ["a", "a", "b"], 1)
    worker.can_survive, context.rank = True, 0
    with pytest.raises(
        RuntimeError, match=r"ranks \[2\] read other training data than rank 1 and are excluded: data.train="
    ):
        check_newcomers_data(JobConfig(), context, ["a", "a", "b"], 1)
