"""Checks that installed packages have supported versions, without importing them, and that a compiler is installed."""

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.doctor.findings import Finding
from megatron_ft.doctor.supported import (
    MEGATRON,
    NCCL,
    PACKAGES,
    PYTHON,
    TRANSFORMER_ENGINE,
    TRANSFORMER_ENGINE_CORES,
    TRANSFORMER_ENGINE_TORCH,
    Package,
)
from megatron_ft.planning.compilers import Which, find_compiler, no_compiler, or_without

_OTHERS = (*NCCL, *TRANSFORMER_ENGINE_CORES, TRANSFORMER_ENGINE_TORCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareFacts:
    """Python and packages that are installed where this command runs."""

    python: str
    versions: Mapping[str, str]
    """Installed version of each package of ``supported.py`` that is installed."""
    torch_requires: tuple[str, ...] = ()
    """Requirements in the metadata of torch, e.g. ``nvidia-nccl-cu12==2.27.3; platform_system == "Linux"``."""
    has_transformer_engine_libraries: bool = False
    """Whether Transformer Engine's libraries (``.so``) are in folders where wheels or source builds install them."""
    apex: str | None = None
    """Kind of the package ``apex``: ``nvidia`` (with CUDA extensions), ``other``, or None if it is not installed."""

    def check(self, *, device: str, needs_transformer_engine: bool) -> list[Finding]:
        """Check the versions of Python and of packages, and the installations of Transformer Engine, NCCL and apex.

        Args:
            device: ``cpu`` or ``cuda``, the device of the job.
            needs_transformer_engine: whether the job requires Transformer Engine.
        """
        lacking = self.missing()
        # Without the package ``packaging``, no version can be compared.
        if "packaging" not in self.versions:
            return lacking
        found = [
            *lacking,
            *_check_python(self),
            *_check_versions(self),
            *_check_megatron(self),
            *_check_transformer_engine(self, wanted=needs_transformer_engine),
            *_check_apex(self),
            *_check_torch(self, device),
        ]
        if any(finding.level != "info" for finding in found):
            return found
        shown = ["torch", "megatron-core", "transformer-engine", *NCCL]
        names = [f"{name} {self.versions[name]}" for name in shown if name in self.versions]
        apex = "apex" if self.apex else "no apex"
        return [*found, Finding.info("versions", f"Python {self.python}, {', '.join(names)}, {apex}: supported")]

    def missing(self) -> list[Finding]:
        """Report required packages that are not installed."""
        absent = [package for package in PACKAGES if package.is_required and package.name not in self.versions]
        return [Finding.error("versions", f"{each.name} is not installed", _mend(each)) for each in absent]

    @classmethod
    def observe(cls) -> "SoftwareFacts":
        """Observe installed versions. Only Python's standard library is used."""
        versions = {}
        for name in (*(package.name for package in PACKAGES), *_OTHERS):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # an absent distribution has no version
        requires = importlib.metadata.requires("torch") if "torch" in versions else None
        return cls(
            python=platform.python_version(),
            versions=versions,
            torch_requires=tuple(requires or ()),
            has_transformer_engine_libraries=_has_transformer_engine_libraries(),
            apex=_apex(),
        )


def _has_transformer_engine_libraries() -> bool:
    spec = importlib.util.find_spec("transformer_engine")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    places = [place for folder in folders for place in (folder, folder.parent, folder / "wheel_lib")]
    names = ("libtransformer_engine*.so", "transformer_engine_torch*.so")
    return bool(places) and all(any(list(place.glob(name)) for place in places) for name in names)


def _apex() -> str | None:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    has_norms = any((folder / "normalization").is_dir() for folder in folders)
    # ``amp_C`` exists only in builds with CUDA extensions. Another package on the index is called apex, too.
    return "nvidia" if has_norms and importlib.util.find_spec("amp_C") is not None else "other"


def _mend(package: Package) -> str:
    return package.install or f"pip install '{package.name}{package.versions}', or run make train, which installs all"


def check_compilers(
    needed: Mapping[str, str], variables: Mapping[str, str], which: Which = shutil.which
) -> list[Finding]:
    """Check that the compilers with which ranks build kernels are installed.

    Args:
        needed: ``JobNeeds.kernels``.
        variables: environment variables with which the job is started.
        which: function that finds a command, as ``shutil.which``.
    """
    return [
        _check_compiler(key, kernels, find_compiler(kernels, variables, which), variables)
        for key, kernels in needed.items()
    ]


def _check_compiler(key: str, kernels: str, command: list[str] | None, variables: Mapping[str, str]) -> Finding:
    if command is None:
        what, _, fix = no_compiler(kernels, variables).partition("; ")
        return Finding.error("compiler", f"{what}, but ranks build the kernels of {key}", fix + or_without(key))
    return Finding.info("compiler", f"{' '.join(command)} builds the kernels of {key} ({kernels})")


def name_update_backends(device: str, variables: Mapping[str, str], which: Which = shutil.which) -> Finding:
    """Return a finding that lists the backends of the optimizer ``ScaledAdamW`` for ``device`` (``cpu`` or ``cuda``).
    Without a compiler for its kernel, the only backend is ``torch``."""
    kernels = "cuda" if device == "cuda" else "cpp"
    found = find_compiler(kernels, variables, which)
    if found is None:
        reason, _, _ = no_compiler(kernels, variables).partition("; ")
        return Finding.info("update", f"the only backend of scaled AdamW on {device} is torch: {reason}")
    return Finding.info(
        "update", f"backends of scaled AdamW on {device}: torch and {kernels} (compiled by {' '.join(found)})"
    )


def _fits(version: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet

    # NVIDIA's containers have pre-releases of torch, which a specifier leaves out by default.
    return SpecifierSet(versions).contains(version, prereleases=True)


def _public(version: str) -> str:
    return version.partition("+")[0]


def _check_python(facts: SoftwareFacts) -> list[Finding]:
    if _fits(facts.python, PYTHON):
        return []
    fix = "install such a Python and name it, e.g. make train PYTHON=python3.11 VENV=.venv"
    return [Finding.error("versions", f"Python {facts.python}: must be {PYTHON}", fix)]


def _check_versions(facts: SoftwareFacts) -> list[Finding]:
    found = []
    for package in PACKAGES:
        version = facts.versions.get(package.name)
        if version is None or _fits(version, package.versions):
            continue
        judge = Finding.error if package.breaks else Finding.warning
        reason = f"must be {package.versions}" if package.breaks else f"only {package.versions} is tested"
        found.append(judge("versions", f"{package.name} {version}: {reason}", _mend(package)))
    return found


def _check_megatron(facts: SoftwareFacts) -> list[Finding]:
    name = "megatron-core"
    version = facts.versions.get(name)
    (package,) = (each for each in PACKAGES if each.name == name)
    if version is None or not _fits(version, package.versions):
        return []
    fix = f"make train MEGATRON={list(MEGATRON)[-1]} VENV=.venv-megatron PYTHON=python3.12"
    pythons = MEGATRON.get(_public(version))
    if pythons is None:
        return [Finding.warning("versions", f"{name} {version}: only {', '.join(MEGATRON)} are tested", fix)]
    if _fits(facts.python, PYTHON) and not _fits(facts.python, pythons):
        return [Finding.error("versions", f"{name} {version} with Python {facts.python}: needs Python {pythons}", fix)]
    return []


def _check_transformer_engine(facts: SoftwareFacts, *, wanted: bool) -> list[Finding]:
    name, versions = TRANSFORMER_ENGINE.name, facts.versions
    parts = {part: versions[part] for part in (*TRANSFORMER_ENGINE_CORES, TRANSFORMER_ENGINE_TORCH) if part in versions}
    remove = f"{TRANSFORMER_ENGINE.install}, or pip uninstall {' '.join([name, *parts])}"
    if name not in versions:
        if parts:
            what = f"{', '.join(parts)} without {name}: Megatron-Core cannot be imported"
            return [Finding.error("versions", what, remove)]
        what = f"{name} is not installed, and this job needs it (training.transformer_impl, context parallelism)"
        return [Finding.error("versions", what, TRANSFORMER_ENGINE.install)] if wanted else []
    if not facts.has_transformer_engine_libraries:
        what = f"{name} {versions[name]}: libtransformer_engine*.so or transformer_engine_torch*.so is missing"
        what += f" (installed parts: {', '.join(parts) or 'none'})"
        return [Finding.error("versions", f"{what}: Megatron-Core cannot be imported", remove)]
    if any(_public(version) != _public(versions[name]) for version in parts.values()):
        shown = ", ".join(f"{part} {version}" for part, version in parts.items())
        return [Finding.error("versions", f"{name} {versions[name]} with {shown}: must have the same version", remove)]
    return []


def _check_apex(facts: SoftwareFacts) -> list[Finding]:
    if facts.apex != "other":
        return []
    what = "the installed package apex is not NVIDIA's apex with CUDA extensions, but Megatron would import it"
    return [Finding.error("versions", what, "pip uninstall apex, or install NVIDIA's apex from source")]


def _check_torch(facts: SoftwareFacts, device: str) -> list[Finding]:
    from packaging.requirements import Requirement

    version = facts.versions.get("torch", "")
    if device == "cpu" or not version:
        return []
    if "+cpu" in version:
        what = f"torch {version} is built without CUDA, but this job runs on CUDA"
        return [
            Finding.error(
                "versions", what, "install a CUDA build and run make train TORCH=skip, or set training.device=cpu"
            )
        ]
    found = []
    for requirement in map(Requirement, facts.torch_requires):
        if requirement.name not in NCCL or not (requirement.marker is None or requirement.marker.evaluate()):
            continue
        installed = facts.versions.get(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            what = f"{requirement.name} {installed or 'missing'}: torch {version} requires {requirement.specifier}"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            found.append(
                Finding.error("versions", what, fix) if installed is None else Finding.warning("versions", what, fix)
            )
    return found
