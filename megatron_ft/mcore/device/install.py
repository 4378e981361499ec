"""Prepares a process for Megatron-Core, on any device."""

import logging
import warnings

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.device import common, cpu
from megatron_ft.mcore.device.software import Software, check_provider, choose_transformer_impl
from megatron_ft.planning.devices import device_index, node_on_host


def _resolve_device(requested: str) -> str:
    """Return ``cpu`` or ``cuda`` for ``requested``, a value of ``training.device``.

    Raises:
        ConfigError: ``requested`` is ``cuda`` and PyTorch sees no GPU.
    """
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of(
            "training.device", requested, "needs a GPU, but PyTorch sees none; set training.device=cpu"
        )
    return requested


def take_device(config: JobConfig, *, node: int, local_rank: int) -> torch.device:
    """Make the device of this rank the current device of the process, and return it. Nothing may use CUDA before.

    Args:
        node: number of the rank's node.
        local_rank: rank within the node.

    Raises:
        ConfigError: PyTorch sees no GPU, or too few for this rank.
    """
    if _resolve_device(config.training.device) == "cpu":
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
    # Megatron logs this for each subclass of its MoE layer. The project's layers get their groups from the layer spec.
    return not record.getMessage().startswith("Unknown MLP type")


def install(config: JobConfig) -> tuple[str, str]:
    """Check the optional software, patch Megatron if the device is a CPU, and import it.

    Returns:
        (device, transformer_impl): ``cpu`` or ``cuda``, and ``local`` or ``transformer_engine``.
    """
    software = Software.inspect()
    device = _resolve_device(config.training.device)
    transformer_impl = choose_transformer_impl(config.training.transformer_impl, device, software)
    check_provider(config.precision.fp8, config.parallel.context_parallel_size, transformer_impl)
    with warnings.catch_warnings():
        # Megatron warns at import about each missing optional package. They have been checked above.
        warnings.simplefilter("ignore")
        if device == "cpu":
            cpu.install()
        else:
            common.install()
    logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_news)
    return device, transformer_impl
