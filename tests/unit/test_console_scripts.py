"""Tests the console scripts of an installation, and what the entry point says without one."""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_ft.errors import ConfigError

ROOT = Path(__file__).parents[2]
PARTS = (
    *("megatron_ft", "tools", "slurm", "conf", "pretrain_moe.py", "hydra_entry.py"),
    *("pyproject.toml", "README.md", "LICENSE"),
)


def scripts() -> dict[str, str]:
    """Return the target of each console script in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.scripts]\n")[2].partition("\n\n")[0]
    pairs = (line.split(" = ") for line in section.splitlines())
    return {name: target.strip('"') for name, target in pairs}


@pytest.mark.parametrize(("name", "target"), scripts().items())
def test_each_script_has_a_target(name: str, target: str) -> None:
    module, _, function = target.partition(":")
    assert name.startswith("mft-") and callable(getattr(importlib.import_module(module), function))


def test_commands_for_users_have_scripts() -> None:
    targets = set(scripts().values())
    for module in ("pretrain_moe", "tools.report", "tools.status", "tools.doctor", "tools.can_recover", "slurm.submit"):
        assert f"{module}:main" in targets


@pytest.mark.slow
def test_an_editable_installation_runs_from_any_folder(tmp_path: Path) -> None:
    clone, elsewhere = tmp_path / "clone", tmp_path / "elsewhere"
    elsewhere.mkdir()
    clone.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, clone / part)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    # The environment has the packages of this one, so that nothing is downloaded.
    (site,) = environment.glob("lib/python3.*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--no-index", "-e", str(clone)], check=True, timeout=170)
    for words, text in (
        (["mft-pretrain", "--version"], "megatron-ft "),
        (["mft-pretrain", "--cfg", "job", "-p", "parallel"], "tensor_model_parallel_size: 1"),
        (["mft-report", "--help"], "usage: report"),
        (["mft-from-megatron", "--format", "command", "--", "--bf16"], "precision=bf16"),
        (["mft-submit", "--help"], "--dry-run"),
    ):
        command = [str(environment / "bin" / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and text in done.stdout, f"{words}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "words", [["pretrain_moe.py", "dry_run=true"], ["-m", "tools.status", "runs/a"], ["-m", "tools.generate", "a"]]
)
def test_without_the_environment_one_line_says_so(words: list[str]) -> None:
    """An interpreter without site-packages has no package that a command needs."""
    command = [sys.executable, "-S", "-E", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ConfigError.exit_code
    (line,) = done.stderr.splitlines()
    assert "is not installed for" in line and "activate the project's environment" in line and "make install" in line


def test_without_conf_the_message_names_it(tmp_path: Path) -> None:
    for name in ("pretrain_moe.py", "hydra_entry.py"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, str(tmp_path / "pretrain_moe.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == ConfigError.exit_code and "pip install -e ." in done.stderr


def test_a_job_is_checked_where_there_is_no_slurm(tmp_path: Path) -> None:
    """Without ``sbatch`` the script says so in one line; ``--dry-run`` needs none."""
    site = tmp_path / "site.env"
    values = ("MFT_INTERFACE=lo", f"MFT_PYTHON={sys.executable}", f"MFT_RUNS={tmp_path}", "MFT_RANKS_PER_NODE=1")
    site.write_text("\n".join([*values, "MFT_SPARE_NODES=0", "MFT_SBATCH="]))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "bash").symlink_to(shutil.which("bash") or "bash")
    command = [sys.executable, str(ROOT / "slurm" / "submit.py"), "--nodes", "2", "--site", str(site), "run.name=a"]
    environment = {**os.environ, "PATH": str(tools)}
    results = [
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False, env=environment)
        for more in ([], ["--dry-run"])
    ]
    assert results[0].returncode == 2 and results[0].stderr.startswith("sbatch: must be installed")
    assert len(results[0].stderr.splitlines()) == 1 and "--dry-run" in results[0].stderr
    assert results[1].returncode == 0, results[1].stderr
    assert "nothing was submitted. sbatch" in results[1].stdout and "--nodes=2" in results[1].stdout
