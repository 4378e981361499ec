"""Checks before the start of ranks: whether the machine on which the command runs is sufficient for the job."""

import dataclasses
import os
import shutil
from importlib.util import find_spec

import psutil

from megatron_ft.config.checks.parallel import needs_transformer_engine
from megatron_ft.config.findings import Findings, value_of
from megatron_ft.config.job import JobConfig
from megatron_ft.control.launcher import check_start
from megatron_ft.errors import ConfigError
from megatron_ft.formatting import memory_size
from megatron_ft.planning.compilers import find_compiler, kernels_of, no_compiler, or_without
from megatron_ft.planning.devices import DeviceFacts, gpus_needed
from megatron_ft.planning.job import JobPlan


def with_gpu_memory(config: JobConfig, facts: DeviceFacts) -> JobConfig:
    """Return ``config`` with ``limits.gpu_memory_bytes`` set to the GPU memory of this machine. A value that ``config``
    already has is kept."""
    if config.training.device != "cuda" or config.limits.gpu_memory_bytes is not None:
        return config
    limits = dataclasses.replace(config.limits, gpu_memory_bytes=facts.gpu_memory_bytes)
    return dataclasses.replace(config, limits=limits)


def check_gpus(config: JobConfig, facts: DeviceFacts) -> None:
    """Check that this machine has enough GPUs for the ranks that the command starts on it. If the ranks start on other
    machines, check nothing.

    Raises:
        ConfigError: this machine has too few GPUs.
    """
    launch = config.launch
    if config.training.device != "cuda" or launch.mode != "local" or launch.node_launcher != "local":
        return
    usable, num_ranks = facts.usable_gpus(), config.most_nodes * launch.ranks_per_node
    if usable == 0:
        raise ConfigError.of("training.device", "cuda", "needs a GPU, and this machine has no usable GPU")
    if usable < gpus_needed(num_ranks, launch.ranks_per_gpu):
        most = usable * launch.ranks_per_gpu
        constraint = (
            f"must be lower: the job starts {num_ranks} ranks on this machine, whose {usable} usable GPUs have room "
        )
        constraint += f"for {most} (launch.ranks_per_gpu={launch.ranks_per_gpu})"
        raise ConfigError.of("launch.ranks_per_node", launch.ranks_per_node, constraint)


def check_this_machine(config: JobConfig, found: Findings) -> None:
    """Check whether this machine can start ranks: software, addresses, sockets, run folder. Add errors to ``found``."""
    with found.collecting():
        _check_transformer_engine(config)
    for key, (value, missing) in _missing_compilers(config, config.training.device).items():
        with found.collecting():
            raise ConfigError.of(key, value, missing)
    if config.launch.mode == "local":
        check_start(config, found)


def check_host_memory(config: JobConfig, plan: JobPlan) -> None:
    """Check that this machine has enough memory for all nodes that this command starts on it.

    Raises:
        ConfigError: this machine has too little memory.
    """
    if config.launch.mode != "local" or config.limits.host_memory_bytes is not None:
        return
    nodes_here = plan.num_nodes if config.launch.node_launcher == "local" else 1
    total, needed = psutil.virtual_memory().total, plan.host_bytes_per_node * nodes_here
    if needed > total:
        raise ConfigError.of(
            "limits.host_memory_bytes",
            "null",
            f"null means the memory of this machine, {memory_size(total)}, but the job's nodes on it ({nodes_here}) "
            f"need an estimated {memory_size(needed)}; choose a smaller model or fewer ranks",
        )


def with_compiler_note(plan: JobPlan, config: JobConfig) -> JobPlan:
    """Return ``plan`` with a note for each missing compiler that the start of ranks on this machine requires."""
    if config.launch.mode != "local":
        return plan
    notes = [
        f"{key}={value}: {missing}; without a compiler, no ranks can start on this machine"
        for key, (value, missing) in _missing_compilers(config, plan.device).items()
    ]
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))


def _check_transformer_engine(config: JobConfig) -> None:
    if find_spec("transformer_engine") is None:
        for key, value, constraint in needs_transformer_engine(config):
            shown = str(value).lower()
            raise ConfigError.of(
                key, shown, f"{constraint}: this value needs Transformer Engine, which is not installed on this machine"
            )


def _missing_compilers(config: JobConfig, device: str) -> dict[str, tuple[str, str]]:
    """Find configuration keys whose kernels cannot be compiled on this machine, because a compiler is missing. Map each
    key to its value and an error message. The result is empty if ranks run on other machines."""
    if config.launch.mode == "local" and config.launch.node_launcher != "local":
        return {}
    return {
        key: (str(value_of(config, key)), no_compiler(kernels, os.environ) + or_without(key))
        for key, kernels in kernels_of(config, device).items()
        if find_compiler(kernels, os.environ, shutil.which) is None
    }
