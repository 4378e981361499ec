"""Supported versions of required and optional software; a test compares them with ``pyproject.toml``, ``requirements/``
and ``mcore/device/software.py``."""

from dataclasses import dataclass

PYTHON = ">=3.10,<3.13"
"""Python versions for which grpcio, scipy and Megatron-Core 0.16.1 have wheels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A distribution by its name on the package index."""

    name: str
    versions: str
    """A version specifier (PEP 440); empty for any."""
    is_required: bool = True
    breaks: bool = False
    """Whether another version breaks the job; otherwise it is only untested."""
    install: str = ""
    """Command that installs it, if that is not ``make train``."""


TORCH = Package(name="torch", versions=">=2.6", breaks=True, install="install a build for your CUDA, then TORCH=skip")
"""Tested with 2.13.0; Megatron-Core 0.16.1 requires at least 2.6."""
TRANSFORMER_ENGINE = Package(
    name="transformer-engine",
    versions=">=2.9,<2.12",
    is_required=False,
    breaks=True,
    install="pip install --no-build-isolation -r requirements/gpu.txt",
)
"""Versions that Megatron-Core 0.16.1 names in its extra ``dev``; later ones write empty extra state
(docs/dependencies.md)."""
TRANSFORMER_ENGINE_CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
TRANSFORMER_ENGINE_TORCH = "transformer-engine-torch"
"""Library of Transformer Engine and its part for torch: both must be present, in the same version."""
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""NCCL wheels: the version that the installed torch names is supported."""

PACKAGES = (
    TORCH,
    Package(name="megatron-core", versions="==0.16.1", breaks=True),
    Package(name="numpy", versions=""),
    Package(name="scipy", versions="==1.15.3"),
    Package(name="hydra-core", versions="==1.3.8"),
    Package(name="omegaconf", versions="==2.3.1"),
    Package(name="wandb", versions="==0.31.0"),
    Package(name="rich", versions="==15.0.0"),
    Package(name="grpcio", versions="==1.85.1"),
    Package(name="tokenizers", versions="==0.23.3"),
    Package(name="xxhash", versions="==4.1.0"),
    Package(name="fsspec", versions="==2026.9.0"),
    Package(name="psutil", versions="==7.2.2"),
    Package(name="packaging", versions="==26.3"),
    Package(name="PyYAML", versions="==6.0.3"),
    TRANSFORMER_ENGINE,
)
"""Directly imported packages. NVIDIA's apex is not on the package index; its modules are searched instead."""
