"""Tests how the variables of a Slurm array are read. ``tests/slurm`` has jobs on a real cluster."""

import pytest

from megatron_ft.control.launchers.slurm_array import _read_array
from megatron_ft.control.slurm.nodes import Allocation
from megatron_ft.errors import ConfigError

ARRAY = {
    "SLURM_ARRAY_JOB_ID": "17",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "3",
    "SLURM_JOB_ID": "21",
}


def test_a_job_goes_by_the_arrays_id() -> None:
    assert _read_array(ARRAY, most_nodes=4) == Allocation("17", ())


@pytest.mark.parametrize("missing", [name for name in ARRAY if "ARRAY" in name])
def test_outside_of_an_array_nothing_is_started(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"launch\.node_launcher=none: needs a Slurm array.*{missing} is not set"):
        _read_array({**ARRAY, missing: ""}, most_nodes=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_ARRAY_TASK_COUNT": "5", "SLURM_ARRAY_TASK_MAX": "4"},
        {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "4"},
        {"SLURM_ARRAY_TASK_MAX": "6"},
    ],
)
def test_tasks_are_the_nodes(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"needs --array=0-3, one task for each node"):
        _read_array({**ARRAY, **changes}, most_nodes=4)
