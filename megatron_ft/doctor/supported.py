"""Supported versions of required and optional software. A test compares these versions with ``pyproject.toml``,
``requirements/`` and ``mcore/device/install.py``."""

from collections.abc import Mapping
from dataclasses import dataclass

PYTHON = ">=3.10,<3.14"
"""Supported Python versions. grpcio, scipy and Megatron-Core 0.16.1 have wheels for all of them."""
MEGATRON: Mapping[str, str] = {"0.16.1": PYTHON, "0.17.1": ">=3.12", "0.18.2": ">=3.12", "0.19.0": ">=3.12"}
"""Maps each supported release of Megatron-Core to its Python versions. ``make`` installs the first release, or the one
that ``MEGATRON=...`` names. ``mcore/versions.py`` handles the differences between the releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A Python package whose installed version is checked. ``name`` is its name on the package index."""

    name: str
    versions: str
    """Supported versions as a specifier (PEP 440); empty if all versions are supported."""
    is_required: bool = True
    breaks: bool = False
    """Whether jobs fail with versions outside of ``versions``. If false, such versions are only untested."""
    install: str = ""
    """Command that installs the package; empty if ``make train`` installs it."""


TORCH = Package(
    name="torch", versions=">=2.6", breaks=True, install="install a build for your CUDA, then run make train TORCH=skip"
)
"""PyTorch. Version 2.13.0 was tested; Megatron-Core 0.16.1 requires at least version 2.6."""
TRANSFORMER_ENGINE = Package(
    name="transformer-engine",
    versions=">=2.9,<2.12",
    is_required=False,
    breaks=True,
    install="pip install --no-build-isolation -r requirements/gpu.txt",
)
"""Transformer Engine. Megatron-Core 0.16.1's extra ``dev`` requires these versions; later versions write empty extra
state (docs/dependencies.md)."""
TRANSFORMER_ENGINE_CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
TRANSFORMER_ENGINE_TORCH = "transformer-engine-torch"
"""Package that connects Transformer Engine to torch. It needs the library: one of ``TRANSFORMER_ENGINE_CORES``, in the
same version as this package."""
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Names of the packages that contain NCCL. The supported version of NCCL is that which the installed torch requires."""

PACKAGES = (
    TORCH,
    Package(name="megatron-core", versions=">=0.16.1,<0.20", breaks=True),
    Package(name="numpy", versions=""),
    Package(name="scipy", versions="==1.15.3"),
    Package(name="hydra-core", versions="==1.3.8"),
    Package(name="omegaconf", versions="==2.3.1"),
    Package(name="wandb", versions="==0.31.0"),
    Package(name="rich", versions="==15.0.0"),
    Package(name="grpcio", versions="==1.85.1"),
    Package(name="tokenizers", versions="==0.23.3"),
    Package(name="safetensors", versions="==0.8.0"),
    Package(name="xxhash", versions="==4.1.0"),
    Package(name="fsspec", versions="==2026.9.0"),
    Package(name="psutil", versions="==7.2.2"),
    Package(name="packaging", versions="==26.3"),
    Package(name="PyYAML", versions="==6.0.3"),
    TRANSFORMER_ENGINE,
)
"""Packages that this project imports directly, except NVIDIA's apex, which is not on the package index."""
