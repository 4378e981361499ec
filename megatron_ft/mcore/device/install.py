"""Prepares a process for Megatron-Core, on any device."""

import importlib
import importlib.metadata
import importlib.util
import logging
import warnings
from dataclasses import dataclass

import torch

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError, SoftwareError
from megatron_ft.mcore.device import common, cpu
from megatron_ft.mcore.versions import LOGGERS, NOT_NEWS
from megatron_ft.planning.devices import device_index, node_on_host

# Megatron's optional imports catch only ``ImportError``. An incomplete Transformer Engine raises other errors, so that
# ``import megatron.core`` fails. With any package called ``apex``, Megatron chooses kernels that may not exist. This
# module reports each of these problems with one clear error.

TRANSFORMER_ENGINE_MIN = (2, 9)
TRANSFORMER_ENGINE_END = (2, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Software:
    """Optional software that Megatron can use."""

    transformer_engine: str | None
    """Version of Transformer Engine; None if it is not installed."""
    apex: bool
    """Whether NVIDIA's apex is installed."""

    @classmethod
    def inspect(cls) -> "_Software":
        """Check the installations of Transformer Engine and apex.

        Raises:
            SoftwareError: an installation is incomplete, and Megatron's import or its choice of kernels would fail.
        """
        return cls(transformer_engine=_transformer_engine(), apex=_apex())


def _transformer_engine() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine")
        importlib.import_module("transformer_engine.pytorch")
        version = importlib.metadata.version("transformer_engine")
    except Exception as error:
        raise SoftwareError(
            f"transformer_engine is installed but cannot be imported ({type(error).__name__}: {error}): "
            "install all three parts (pip install 'transformer_engine[pytorch]>=2.9,<2.12', which needs a torch with "
            "CUDA) or remove it (pip uninstall transformer_engine transformer_engine_cu12 transformer_engine_cu13)"
        ) from error
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not TRANSFORMER_ENGINE_MIN <= numbers < TRANSFORMER_ENGINE_END:
        raise SoftwareError(
            f"transformer_engine {version} is installed, but Megatron-Core 0.16.1 needs >=2.9,<2.12: install "
            "a version in this range, or remove transformer_engine"
        )
    return version


def _apex() -> bool:
    if importlib.util.find_spec("apex") is None:
        return False
    try:
        importlib.import_module("amp_C")
        importlib.import_module("apex.normalization.fused_layer_norm")
    except Exception as error:
        raise SoftwareError(
            f"the installed package apex is not NVIDIA's apex with its CUDA extensions "
            f"({type(error).__name__}: {error}), so Megatron would choose kernels that are missing: remove it (pip "
            "uninstall apex), or install NVIDIA's apex from source"
        ) from error
    return True


def _choose_transformer_impl(requested: str, device: str, software: _Software, *, only_local: bool = False) -> str:
    """Return ``local`` or ``transformer_engine`` for ``requested``, a value of ``training.transformer_impl``.

    ``auto`` chooses Transformer Engine if it is installed and the device is ``cuda``. With ``only_local``, ``auto``
    always chooses ``local``, because other keys request features that only local layers have.

    Raises:
        ConfigError: Transformer Engine was requested, but is not installed or cannot run on the device.
    """
    if requested == "auto":
        has_engine = device == "cuda" and software.transformer_engine and not only_local
        return "transformer_engine" if has_engine else "local"
    if requested == "transformer_engine":
        if device != "cuda":
            raise ConfigError.of("training.transformer_impl", requested, "needs training.device=cuda")
        if software.transformer_engine is None:
            raise ConfigError.of(
                "training.transformer_impl", requested, "needs transformer_engine>=2.9,<2.12, which is not installed"
            )
    return requested


def _check_provider(context_parallel_size: int, transformer_impl: str) -> None:
    """Raise ConfigError if the job needs context parallelism, but does not use Transformer Engine."""
    if transformer_impl == "transformer_engine":
        return
    if context_parallel_size > 1:
        raise ConfigError.of(
            "parallel.context_parallel_size",
            context_parallel_size,
            "must be 1 without Transformer Engine, because only Transformer Engine has context-parallel attention",
        )


def resolve_device(requested: str) -> str:
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
    """Make this rank's device the current device of the process, and return it. Call this before CUDA is used.

    Args:
        node: number of the rank's node.
        local_rank: index of the rank within its node.

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
    return not record.getMessage().startswith(NOT_NEWS)


def ignore_missing_packages() -> None:
    """Hide warnings for a command that uses neither optional packages nor CUDA: Megatron's warnings at import about
    Apex, Transformer Engine and absl, and torch's warning about CUDA. Other warnings are shown."""
    packages = r".*(Apex|Transformer Engine|transformer_engine|absl\.logging)"
    warnings.filterwarnings("ignore", packages, category=UserWarning, module=r"megatron\.")
    # From 0.17, Megatron imports torch's module for extensions, which warns if there is a CUDA compiler but no GPU.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_news)


def install(config: JobConfig) -> tuple[str, str]:
    """Check the optional software, import Megatron, and patch it if the device is a CPU.

    Returns:
        (device, transformer_impl): ``cpu`` or ``cuda``, and ``local`` or ``transformer_engine``.
    """
    software = _Software.inspect()
    device = resolve_device(config.training.device)
    requested, only_local = (
        config.training.transformer_impl,
        (config.precision.fp8 is not None or config.data.reset_attention_mask),
    )
    transformer_impl = _choose_transformer_impl(requested, device, software, only_local=only_local)
    _check_provider(config.parallel.context_parallel_size, transformer_impl)
    with warnings.catch_warnings():
        # Megatron warns at import about each missing optional package. These were checked above.
        warnings.simplefilter("ignore")
        if device == "cpu":
            cpu.install()
        else:
            common.install()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    return device, transformer_impl
