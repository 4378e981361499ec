"""Prepares a process for Megatron-Core, on any device, in one call."""

import logging
import warnings

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.device import common, cpu
from megatron_ft.mcore.device.software import check_provider, choose_transformer_impl, inspect_software
from megatron_ft.planning.devices import device_index, node_on_host


def resolve_device(requested: str) -> str:
    """Resolve the device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: CUDA was requested and PyTorch sees no GPU.
    """
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("training.device", requested, "needs a GPU that PyTorch can see")
    return requested


def take_device(config: JobConfig, *, node: int, local_rank: int) -> torch.device:
    """Make the rank's device the current device of this process, and return it. Call it before anything else that may
    use CUDA.

    Args:
        node: the rank's node.
        local_rank: the rank's position on that node.

    Raises:
        ConfigError: PyTorch sees no GPU, or too few for this rank.
    """
    if resolve_device(config.training.device) == "cpu":
        return torch.device("cpu")
    index = device_index(
        node_on_host=node_on_host(config.launch, node),
        local_rank=local_rank,
        ranks_per_node=config.launch.ranks_per_node,
        num_visible=torch.cuda.device_count(),
        ranks_per_gpu=config.launch.ranks_per_gpu,
    )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _is_news(record: logging.LogRecord) -> bool:
    # Logged for every MoE layer that is a subclass of Megatron's; the project's gets its groups by the layer spec.
    return not record.getMessage().startswith("Unknown MLP type")


def install(config: JobConfig) -> tuple[str, str]:
    """Check the software, install the CPU layer if there is no GPU, import Megatron.

    Returns:
        (device, transformer_impl): ``cpu`` or ``cuda``, ``local`` or ``transformer_engine``.
    """
    software = inspect_software()
    device = resolve_device(config.training.device)
    transformer_impl = choose_transformer_impl(config.training.transformer_impl, device, software)
    check_provider(config.precision.fp8, config.parallel.context_parallel_size, transformer_impl)
    with warnings.catch_warnings():
        # Megatron warns at import about every optional package; this module checks them above.
        warnings.simplefilter("ignore")
        if device == "cpu":
            cpu.install()
        else:
            common.install()
    logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_news)
    return device, transformer_impl
