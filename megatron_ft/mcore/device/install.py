"""The one call that readies a process for Megatron-Core, whatever its device."""

import logging
import warnings

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.device import common, cpu
from megatron_ft.mcore.device.software import check_provider, choose_transformer_impl, inspect_software


def resolve_device(requested: str) -> str:
    """``cpu`` or ``cuda``.

    Raises:
        ConfigError: CUDA was asked for and PyTorch sees no GPU.
    """
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("training.device", requested, "needs a GPU that PyTorch can see")
    return requested


def _is_news(record: logging.LogRecord) -> bool:
    # Said of every MoE layer that is a subclass of Megatron's; ours gets its groups through the layer spec.
    return not record.getMessage().startswith("Unknown MLP type")


def install(config: JobConfig) -> tuple[str, str]:
    """Check the software, install the CPU layer where there is no GPU, import Megatron.

    Returns:
        (device, transformer_impl): ``cpu`` or ``cuda``, ``local`` or ``transformer_engine``.
    """
    software = inspect_software()
    device = resolve_device(config.training.device)
    transformer_impl = choose_transformer_impl(config.training.transformer_impl, device, software)
    check_provider(config.precision.fp8, config.parallel.context_parallel_size, transformer_impl)
    with warnings.catch_warnings():
        # Megatron warns at import about every optional package; ours are checked above.
        warnings.simplefilter("ignore")
        if device == "cpu":
            cpu.install()
        else:
            common.install()
    logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_news)
    return device, transformer_impl
