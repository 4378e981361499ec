"""Tests the checks of versions: each finding appears with its cause and disappears without it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_ft.doctor.software import SoftwareFacts, check_compilers, name_update_backends
from megatron_ft.doctor.supported import MEGATRON, PACKAGES, PYTHON, TRANSFORMER_ENGINE
from megatron_ft.mcore.device.install import TRANSFORMER_ENGINE_END, TRANSFORMER_ENGINE_MIN
from tests.helpers.machines import SOFTWARE, judged

ROOT = Path(__file__).parents[3]
FULL_ENGINE = {
    "transformer-engine": "2.11.0",
    "transformer-engine-cu13": "2.11.0",
    "transformer-engine-torch": "2.11.0+build7",
}


def versions(**changed: str) -> dict[str, Any]:
    return {"versions": {**SOFTWARE.versions, **{name.replace("_", "-"): each for name, each in changed.items()}}}


def engine(**changed: str) -> dict[str, Any]:
    full = {"versions": {**SOFTWARE.versions, **FULL_ENGINE, **{k.replace("_", "-"): v for k, v in changed.items()}}}
    return {**full, "has_transformer_engine_libraries": True}


CUDA = {"device": "cuda"}
CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "an old Python": ({"python": "3.9.18"}, {}, "error", "Python 3.9.18: must be >=3.10,<3.14"),
    "a new Python": ({"python": "3.14.0"}, {}, "error", "Python 3.14.0"),
    "an old torch": (versions(torch="2.5.1"), {}, "error", "torch 2.5.1: must be >=2.6"),
    "an old Megatron-Core": (versions(megatron_core="0.16.0"), {}, "error", "must be >=0.16.1,<0.20"),
    "a new Megatron-Core": (versions(megatron_core="0.20.0"), {}, "error", "must be >=0.16.1,<0.20"),
    "an untested Megatron-Core": (
        {**versions(megatron_core="0.17.0"), "python": "3.12.1"},
        {},
        "warning",
        "megatron-core 0.17.0: only 0.16.1, 0.17.1, 0.18.2, 0.19.0 are tested",
    ),
    "a Megatron-Core for another Python": (
        {**versions(megatron_core="0.19.0"), "python": "3.11.7"},
        {},
        "error",
        "megatron-core 0.19.0 with Python 3.11.7: needs Python >=3.12",
    ),
    "another package": (versions(rich="14.0.0"), {}, "warning", "rich 14.0.0: only ==15.0.0 is tested"),
    "another Transformer Engine": (
        engine(transformer_engine="2.12.0", transformer_engine_cu13="2.12.0", transformer_engine_torch="2.12.0"),
        {},
        "error",
        "transformer-engine 2.12.0: must be >=2.9,<2.12",
    ),
    "the name of Transformer Engine alone": (
        versions(transformer_engine="2.11.0"),
        {},
        "error",
        "installed parts: none",
    ),
    "parts without their name": (versions(transformer_engine_cu13="2.11.0"), {}, "error", "without transformer-engine"),
    "parts of two versions": (engine(transformer_engine_torch="2.10.0"), {}, "error", "must have the same version"),
    "Transformer Engine is needed": ({}, {"needs_transformer_engine": True}, "error", "this job needs it"),
    "a foreign apex": ({"apex": "other"}, {}, "error", "is not NVIDIA's apex"),
    "torch for CPU": (versions(torch="2.13.0+cpu"), CUDA, "error", "built without CUDA"),
    "another NCCL": (versions(nvidia_nccl_cu13="2.27.3"), CUDA, "warning", "requires ==2.28.9"),
}


def found(facts: dict[str, Any], asked: dict[str, Any]) -> list[Any]:
    return replace(SOFTWARE, **facts).check(**{"device": "cpu", "needs_transformer_engine": False, **asked})


@pytest.mark.parametrize("cause", CAUSES)
def test_a_finding_appears_with_its_cause(cause: str) -> None:
    facts, asked, level, what = CAUSES[cause]
    (finding,) = judged(found(facts, asked))
    assert (finding.level, what in finding.what) == (level, True), finding
    assert finding.fix


FINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it should be": ({}, {}),
    "on CUDA": ({}, CUDA),
    "a whole Transformer Engine": (engine(), {**CUDA, "needs_transformer_engine": True}),
    "Transformer Engine from source": (
        {**versions(transformer_engine="2.9.0+70f5366"), "has_transformer_engine_libraries": True},
        CUDA,
    ),
    "NVIDIA's apex": ({"apex": "nvidia"}, CUDA),
    "another Python": ({"python": "3.13.0"}, {}),
    **{
        f"Megatron-Core {release}": ({**versions(megatron_core=release), "python": "3.12.1"}, {})
        for release in MEGATRON
    },
    "a torch from source": ({**versions(torch="2.9.0a0+50eac81"), "torch_requires": ()}, CUDA),
    "another NCCL on CPU": (versions(nvidia_nccl_cu13="2.27.3"), {}),
}


@pytest.mark.parametrize("cause", FINE)
def test_and_goes_without(cause: str) -> None:
    facts, asked = FINE[cause]
    (finding,) = found(facts, asked)
    assert finding.level == "info" and finding.what.endswith("supported")


@pytest.mark.parametrize("name", ["torch", "hydra-core", "packaging"])
def test_what_is_not_there_is_said_first(name: str) -> None:
    facts = replace(SOFTWARE, versions={each: SOFTWARE.versions[each] for each in SOFTWARE.versions if each != name})
    (finding,) = facts.missing()
    assert finding.what == f"{name} is not installed"
    assert finding in facts.check(device="cpu", needs_transformer_engine=False)
    assert SOFTWARE.missing() == []


def test_a_missing_nccl_breaks_what_runs_on_gpus() -> None:
    without = {name: each for name, each in SOFTWARE.versions.items() if name != "nvidia-nccl-cu13"}
    (finding,) = judged(found({"versions": without}, CUDA))
    assert (finding.level, "nvidia-nccl-cu13 missing" in finding.what) == ("error", True)


def test_a_missing_compiler_is_an_error_for_jobs_with_replicas() -> None:
    assert check_compilers({}, {}, lambda _: None) == []
    (finding,) = check_compilers({"placement.dispatch_backend": "cpp"}, {}, lambda _: None)
    assert (finding.level, finding.what.startswith("no compiler found for cpp")) == ("error", True)
    assert finding.fix == "install a C++17 compiler or name it in CXX, or set placement.dispatch_backend=reference"
    needed = {"placement.dispatch_backend": "cpp", "optimizer.update_backend": "cpp"}
    found = check_compilers(needed, {}, lambda name: f"/bin/{name}")
    assert [(each.level, each.what) for each in found] == [
        ("info", f"/bin/c++ builds the kernels of {key} (cpp)") for key in needed
    ]
    *_, finding = check_compilers(needed, {}, lambda _: None)
    assert finding.fix == "install a C++17 compiler or name it in CXX, or set optimizer.update_backend=torch"


def test_the_backends_of_scaled_adamw_are_named() -> None:
    """The reference needs no compiler, so that a missing compiler is no error."""
    for device, kernels, compiler in (("cpu", "cpp", "/bin/c++"), ("cuda", "cuda", "/bin/nvcc")):
        found = name_update_backends(device, {}, lambda name: f"/bin/{name}")
        assert (found.level, found.check) == ("info", "update")
        assert found.what == f"backends of scaled AdamW on {device}: torch and {kernels} (compiled by {compiler})"
        missing = name_update_backends(device, {}, lambda _: None)
        start = f"the only backend of scaled AdamW on {device} is torch: no compiler found for {kernels} (tried "
        assert missing.level == "info" and missing.what.startswith(start) and "placement" not in missing.what


def test_this_environment_is_supported() -> None:
    facts = SoftwareFacts.observe()
    assert judged(facts.check(device="cpu", needs_transformer_engine=False)) == []


def test_a_package_called_apex_is_looked_at_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert SoftwareFacts.observe().apex == "other"
    (tmp_path / "apex/normalization").mkdir()
    (tmp_path / "amp_C.py").touch()
    assert SoftwareFacts.observe().apex == "nvidia"


def test_the_matrix_is_what_the_project_installs() -> None:
    """``pyproject.toml``, ``requirements/`` and the check before Megatron's import must name the same versions."""
    project = (ROOT / "pyproject.toml").read_text()
    (python,) = re.findall(r'^requires-python = "(.+)"$', project, re.MULTILINE)
    (block,) = re.findall(r"^dependencies = \[(.+?)^\]", project, re.MULTILINE | re.DOTALL)
    assert python == PYTHON
    declared = {each.name: str(each.specifier) for each in map(Requirement, re.findall(r'"(.+)"', block))}
    assert declared == {
        package.name: str(SpecifierSet(package.versions)) for package in PACKAGES if package.is_required
    }
    train = [line for line in (ROOT / "requirements/train.txt").read_text().splitlines() if line[0] != "#"]
    installed = {each.name: str(each.specifier) for each in map(Requirement, train)}
    megatron = {"megatron-core": f"=={next(iter(MEGATRON))}"}
    assert installed == {name: versions for name, versions in declared.items() if name != "torch"} | megatron
    (gpu,) = [line for line in (ROOT / "requirements/gpu.txt").read_text().splitlines() if line[0] != "#"]
    wanted = Requirement(f"x{TRANSFORMER_ENGINE.versions}").specifier
    assert Requirement(gpu).specifier == wanted
    low, end = (".".join(map(str, numbers)) for numbers in (TRANSFORMER_ENGINE_MIN, TRANSFORMER_ENGINE_END))
    assert Requirement(f"x>={low},<{end}").specifier == wanted


def test_supported_releases_of_megatron_can_be_installed_and_are_documented() -> None:
    _, *others = MEGATRON
    locks = {path.name for path in (ROOT / "requirements").glob("megatron-*.lock")}
    assert locks == {f"megatron-{release}.lock" for release in others}
    for release in others:
        assert f"megatron-core=={release} " in (ROOT / f"requirements/megatron-{release}.lock").read_text()
    (supported,) = (package.versions for package in PACKAGES if package.name == "megatron-core")
    assert all(Requirement(f"x{supported}").specifier.contains(release) for release in MEGATRON)
    page = (ROOT / "docs/dependencies.md").read_text()
    rows = re.findall(r"^\| ([0-9.]+) \| `([0-9.,<>=]+)` \|", page, re.MULTILINE)
    assert dict(rows) == dict(MEGATRON)
