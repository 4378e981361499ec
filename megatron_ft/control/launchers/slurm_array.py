"""``launch.node_launcher=none``: each node is a task of a Slurm array. Tasks start by themselves, also after a loss.

Source: the manual page sbatch(1). An array keeps its id, ``SLURM_ARRAY_JOB_ID``, when one of its tasks is requeued.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from megatron_ft.config.job import JobConfig
from megatron_ft.control.launchers.base import LaunchContext, OnEnd
from megatron_ft.control.node import join_file
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.join_file import JoinFile
from megatron_ft.control.slurm.attempts import RunAttempts
from megatron_ft.control.slurm.nodes import Allocation, address_of
from megatron_ft.errors import FINAL_EXIT_CODES, ConfigError

_KEY = "launch.node_launcher"
_NAMES = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")


class SlurmArrayLauncher:
    """Publishes the data that tasks of the array need to join (``node/join.py``), and starts nothing."""

    starts_nodes: ClassVar[bool] = False
    is_local: ClassVar[bool] = False

    def __init__(self, config: JobConfig, variables: Mapping[str, str]) -> None:
        self._allocation = _read_array(variables, most_nodes=config.most_nodes)
        self._interface = address_of(config.control.interface)
        self._script = variables.get("MFT_SCRIPT")
        self._run_dir: Path | None = None

    @property
    def interface(self) -> str:
        return self._interface

    def publish(self, context: LaunchContext, spec: AgentSpec) -> None:
        self._run_dir = context.run_dir
        self._allocation.keep_script(context.run_dir, self._script)
        content = JoinFile(
            agent=spec,
            preload=list(context.preload),
            job_id=self._allocation.job_id,
            num_nodes=context.most_nodes,
            num_returns=context.num_returns,
        )
        content.publish(context.run_dir)

    def start(self, node: int, spec: AgentSpec, on_end: OnEnd) -> None:
        """Do nothing: nodes start by themselves."""

    def stop(self, patience_seconds: float) -> None:
        if self._run_dir is not None:
            join_file.JoinFile.withdraw(self._run_dir)

    def finish(self, exit_code: int, reason: str, *, is_complete: bool) -> None:
        """Write the file that marks the job's end; the array's tasks end when they find this file."""
        assert self._run_dir is not None, "finish() was called before publish()"
        # After a final error, another job that continues this run would end with the same error.
        is_final = is_complete or exit_code in FINAL_EXIT_CODES
        RunAttempts(self._run_dir).leave_marker(
            self._allocation.job_id, exit_code=exit_code, reason=reason, is_final=is_final
        )


def _read_array(variables: Mapping[str, str], *, most_nodes: int) -> Allocation:
    """Read the Slurm array that contains this process. The result has no hosts, because nodes start by themselves.

    Args:
        most_nodes: largest number of nodes, spares included.

    Raises:
        ConfigError: this process is not in an array, or the array does not have one task for each node.
    """
    missing = [name for name in _NAMES if not variables.get(name)]
    if missing:
        raise ConfigError.of(_KEY, "none", f"needs a Slurm array with one task for each node: {missing[0]} is not set")
    job, *numbers = (variables[name] for name in _NAMES)
    count, first, last = (int(number) for number in numbers)
    if (count, first, last) != (most_nodes, 0, most_nodes - 1):
        wanted = f"needs --array=0-{most_nodes - 1}, one task for each node and each spare node"
        raise ConfigError.of(_KEY, "none", f"{wanted}, but array {job} has {count} tasks, numbered {first} to {last}")
    return Allocation(job, ())
