"""A Slurm array with a task per node: what the console reads of it.

Source: the manual page sbatch(1). An array keeps its id, ``SLURM_ARRAY_JOB_ID``, when a task of it is requeued.
"""

from collections.abc import Mapping

from megatron_ft.control.slurm.nodes import Allocation
from megatron_ft.errors import ConfigError

_KEY = "launch.node_launcher"
_NAMES = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")


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
