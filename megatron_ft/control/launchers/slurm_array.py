"""``launch.node_launcher=none``: nodes are the tasks of a Slurm array, which come and come back by themselves.

Source: the manual page sbatch(1). An array keeps its id, ``SLURM_ARRAY_JOB_ID``, when a task of it is requeued.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from megatron_ft.config.launch import LaunchConfig
from megatron_ft.control.launchers.base import LaunchContext, OnEnd
from megatron_ft.control.node import join_file
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.join_file import JoinFile
from megatron_ft.control.slurm.attempts import leave_marker
from megatron_ft.control.slurm.nodes import Allocation, address_of
from megatron_ft.errors import EXIT_OK, FINAL_EXIT_CODES, ConfigError

_KEY = "launch.node_launcher"
_NAMES = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")


class SlurmArrayLauncher:
    """Publishes what the array's tasks need to join (``node/join.py``), and starts nothing."""

    starts_nodes: ClassVar[bool] = False
    is_local: ClassVar[bool] = False

    def __init__(self, launch: LaunchConfig, variables: Mapping[str, str]) -> None:
        self._allocation = read_array(variables, most_nodes=launch.most_nodes)
        self._interface = address_of(launch.interface)
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
        join_file.publish(context.run_dir, content)

    def start(self, node: int, spec: AgentSpec, on_end: OnEnd) -> None:
        """See ``NodeLauncher``: the node comes by itself, or does not."""

    def stop(self, patience_seconds: float) -> None:
        if self._run_dir is not None:
            join_file.withdraw(self._run_dir)

    def finish(self, exit_code: int, reason: str) -> None:
        """Leave the marker by which the array's tasks end."""
        assert self._run_dir is not None, "publish comes first"
        # Another job of the chain would end with the same error.
        is_final = exit_code in {EXIT_OK, *FINAL_EXIT_CODES}
        leave_marker(self._run_dir, self._allocation.job_id, exit_code=exit_code, reason=reason, is_final=is_final)


def read_array(variables: Mapping[str, str], *, most_nodes: int) -> Allocation:
    """The array that this process runs in; its nodes come by themselves and have no names here.

    Args:
        most_nodes: nodes that the job can have, spares included.

    Raises:
        ConfigError: it runs in none, or the tasks are not those nodes.
    """
    missing = [name for name in _NAMES if not variables.get(name)]
    if missing:
        raise ConfigError.of(_KEY, "none", f"needs a Slurm array, whose tasks are the nodes: {missing[0]} is not set")
    job, *numbers = (variables[name] for name in _NAMES)
    count, first, last = (int(number) for number in numbers)
    if (count, first, last) != (most_nodes, 0, most_nodes - 1):
        wanted = f"needs an array of {most_nodes} tasks, --array=0-{most_nodes - 1}, for the job's nodes and spares"
        raise ConfigError.of(_KEY, "none", f"{wanted}; array {job} has {count}, from {first} to {last}")
    return Allocation(job, ())
