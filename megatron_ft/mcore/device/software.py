"""Optional software beside Megatron-Core, inspected before Megatron is imported.

Megatron guards its optional imports only with ``except ImportError``. A half-installed Transformer Engine raises other
errors, which break ``import megatron.core``. With any package called ``apex``, Megatron chooses kernels that do not
exist. Both are reported here in one sentence instead.
"""

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from megatron_ft.errors import ConfigError, SoftwareError

TRANSFORMER_ENGINE_MIN = (2, 9)
TRANSFORMER_ENGINE_END = (2, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Optional software that can be used: version of Transformer Engine or None, and whether apex can be used."""

    transformer_engine: str | None
    apex: bool


def inspect_software() -> Software:
    """Probe Transformer Engine and apex.

    Raises:
        SoftwareError: an installation that would break Megatron's import or its choice of kernels.
    """
    return Software(transformer_engine=_transformer_engine(), apex=_apex())


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
            "install all three parts (pip install 'transformer_engine[pytorch]>=2.9,<2.12' beside a CUDA torch) "
            "or remove it (pip uninstall transformer_engine transformer_engine_cu12 transformer_engine_cu13)"
        ) from error
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not TRANSFORMER_ENGINE_MIN <= numbers < TRANSFORMER_ENGINE_END:
        raise SoftwareError(f"transformer_engine=={version}: Megatron-Core 0.16.1 needs >=2.9,<2.12")
    return version


def _apex() -> bool:
    if importlib.util.find_spec("apex") is None:
        return False
    try:
        importlib.import_module("amp_C")
        importlib.import_module("apex.normalization.fused_layer_norm")
    except Exception as error:
        raise SoftwareError(
            f"a package called apex is installed that is not NVIDIA's apex with its CUDA extensions "
            f"({type(error).__name__}: {error}): Megatron would choose kernels that are missing; "
            "pip uninstall apex, or install NVIDIA's from source"
        ) from error
    return True


def choose_transformer_impl(requested: str, device: str, software: Software) -> str:
    """Choose ``local`` or ``transformer_engine`` as requested; ``auto`` chooses Transformer Engine if it is complete.

    Raises:
        ConfigError: Transformer Engine was requested and is not usable here.
    """
    if requested == "auto":
        return "transformer_engine" if device == "cuda" and software.transformer_engine else "local"
    if requested == "transformer_engine":
        if device != "cuda":
            raise ConfigError.of("training.transformer_impl", requested, "needs training.device=cuda")
        if software.transformer_engine is None:
            raise ConfigError.of(
                "training.transformer_impl", requested, "needs transformer_engine>=2.9,<2.12, which is not installed"
            )
    return requested


def check_provider(fp8: str | None, context_parallel_size: int, transformer_impl: str) -> None:
    """Refuse features of Transformer Engine if it does not run the layers.

    Megatron itself would accept ``fp8`` and train unquantised, without a warning.
    """
    if transformer_impl == "transformer_engine":
        return
    if fp8 is not None:
        raise ConfigError.of(
            "precision.fp8", fp8, "needs Transformer Engine, which this job does not use; set precision.fp8=null"
        )
    if context_parallel_size > 1:
        raise ConfigError.of(
            "parallel.context_parallel_size",
            context_parallel_size,
            "must be 1 without Transformer Engine, which provides attention over split sequences",
        )
