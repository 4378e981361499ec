"""Tests how the variables of a Slurm array are read. ``tests/slurm`` has jobs on a real cluster."""

import json
from pathlib import Path

import pytest

from megatron_ft.config.serialize import from_dict
from megatron_ft.control.launchers.slurm_array import SlurmArrayLauncher, _read_array
from megatron_ft.control.slurm.nodes import Allocation
from megatron_ft.errors import ConfigError
from tests.helpers.keys import grouped

ARRAY = {
    "SLURM_ARRAY_JOB_ID": "17",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "3",
    "SLURM_JOB_ID": "21",
}


@pytest.mark.parametrize(
    ("exit_code", "is_complete", "is_final"),
    [(0, True, True), (0, False, False), (130, False, False), (4, False, True)],
)
def test_the_marker_of_a_planned_end_lets_the_chain_continue_unless_the_run_is_complete(
    tmp_path: Path, exit_code: int, is_complete: bool, is_final: bool
) -> None:
    launcher = SlurmArrayLauncher(from_dict(grouped(num_nodes=4, interface="10.0.0.7")), ARRAY)
    launcher._run_dir = tmp_path
    launcher.finish(exit_code, "because", is_complete=is_complete)
    assert json.loads((tmp_path / "slurm" / "17.json").read_text())["is_final"] == is_final


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
