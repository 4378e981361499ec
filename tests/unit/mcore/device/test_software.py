"""Tests that software which would break Megatron is reported in one sentence, before Megatron is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.errors import ConfigError, SoftwareError
from megatron_ft.mcore.device import install
from megatron_ft.mcore.device.install import _check_provider, _choose_transformer_impl, _Software
from megatron_ft.testing.engines import REPOSITORY

PROBE = """
import importlib, json, sys
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import SoftwareError
from megatron_ft.mcore.device.install import install
said = {}
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        install(JobConfig())
    except SoftwareError as error:
        said[folder] = [str(error), any(name.partition(".")[0] == "megatron" for name in sys.modules)]
    sys.path.remove(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("transformer_engine", "apex")]:
        del sys.modules[name]
print(json.dumps(said))
"""
PACKAGES = {
    "no_library": {"transformer_engine/__init__.py": "raise OSError('libtransformer_engine.so: cannot open')"},
    "no_torch_part": {"transformer_engine/__init__.py": ""},
    "assertion": {
        "transformer_engine/__init__.py": "",
        "transformer_engine/pytorch/__init__.py": "assert False, 'found no CUDA build of the framework part'",
    },
    "no_metadata": {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": ""},
    "foreign_apex": {"apex/__init__.py": "name = 'a web framework'"},
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Return [message, whether Megatron was imported] of ``install`` in a separate process in which such a package is
    found first."""
    top = tmp_path_factory.mktemp("packages")
    for package, files in PACKAGES.items():
        for name, text in files.items():
            path = top / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    folders = [str(top / package) for package in PACKAGES]
    outcome = subprocess.run(
        [sys.executable, "-c", PROBE, *folders], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    return {Path(folder).name: words for folder, words in json.loads(outcome.stdout).items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_half_installed_software_is_reported_before_megatron(output: dict[str, list[object]], package: str) -> None:
    message, megatron_was_imported = output[package]
    assert isinstance(message, str) and "\n" not in message
    assert not megatron_was_imported
    if package == "foreign_apex":
        assert "apex" in message and "pip uninstall apex" in message
    else:
        assert "transformer_engine is installed but cannot be imported" in message
        assert "pip uninstall transformer_engine" in message
    if package == "no_library":
        assert "OSError: libtransformer_engine.so" in message


def test_what_only_transformer_engine_does_is_refused_without_it() -> None:
    _check_provider(1, "local")
    _check_provider(2, "transformer_engine")
    with pytest.raises(ConfigError, match=r"parallel\.context_parallel_size=2: must be 1 without Transformer Engine"):
        _check_provider(2, "local")


@pytest.mark.parametrize(
    ("requested", "device", "version", "chosen"),
    [
        ("auto", "cuda", "2.10.0", "transformer_engine"),
        ("auto", "cuda", None, "local"),
        ("auto", "cpu", "2.10.0", "local"),
        ("local", "cuda", "2.10.0", "local"),
        ("transformer_engine", "cuda", "2.10.0", "transformer_engine"),
        ("transformer_engine", "cuda", None, None),
        ("transformer_engine", "cpu", "2.10.0", None),
    ],
)
def test_layers_are_chosen_by_what_is_complete(
    requested: str, device: str, version: str | None, chosen: str | None
) -> None:
    there = _Software(transformer_engine=version, apex=False)
    if chosen is not None:
        assert _choose_transformer_impl(requested, device, there) == chosen
        wanted = "local" if requested == "auto" else chosen
        assert _choose_transformer_impl(requested, device, there, only_local=True) == wanted
        return
    with pytest.raises(ConfigError, match=r"training\.transformer_impl=transformer_engine: needs"):
        _choose_transformer_impl(requested, device, there)


@pytest.mark.parametrize(
    ("version", "fits"), [("2.8.9", False), ("2.9.0", True), ("2.11.1+cu12", True), ("2.12.0", False)]
)
def test_versions_of_transformer_engine(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(install.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(install.importlib.metadata, "version", lambda name: version)
    if fits:
        assert install._transformer_engine() == version
        return
    with pytest.raises(SoftwareError, match=version):
        install._transformer_engine()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.torch.cuda, "is_available", lambda: False)
    assert [install.resolve_device(name) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"training\.device=cuda: needs a GPU"):
        install.resolve_device("cuda")
    monkeypatch.setattr(install.torch.cuda, "is_available", lambda: True)
    assert install.resolve_device("auto") == "cuda"
