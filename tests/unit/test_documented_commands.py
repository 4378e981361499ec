"""Runs every command of README.md, CONTRIBUTING.md and docs/. A command that starts a job runs with ``dry_run=true``.

The commands of slurm/README.md run on a cluster in ``tests/slurm``, and the README's demo runs in ``tests/functional``.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import pretrain_moe
from megatron_ft.config.identity import settings_of
from megatron_ft.config.model import ModelConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.errors import ControlError
from megatron_ft.events import Metrics, RanksReady, RunFinished, RunStarted
from megatron_ft.mcore.convert.converter import import_folder
from megatron_ft.mcore.convert.model_tensors import tensors_of
from megatron_ft.mcore.convert.weights import weights_manifest, write_weights
from megatron_ft.snapshot.storage.checkpoints import MEGATRON_LATEST_NAME
from tests.contract.test_convert import write_folder
from tests.unit.corpus.test_tokenizers import small_gpt2
from tests.unit.snapshot.storage.conftest import make_checkpoint

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NEED_A_RUNNING_JOB = ("status", "drain", "add_node", "inject_failures")
"""Tools that call the controller. Without a job they refuse after parsing their arguments. With a job,
``tests/distributed/test_operator_tools.py`` and ``test_inject_failures.py`` run them."""
LAUNCHERS = {"torchrun": "torchrun", "ft_launcher": "torchrun", "srun": "srun"}
"""Option of the group ``launch`` with which the job of a program is checked, by program."""
NOT_OURS = ("pretrain_gpt.py", "source ", "kill ")
"""Beginnings of commands that are not part of this project: Megatron-LM's entry point, and commands of the shell."""


@dataclass(frozen=True)
class Command:
    """One command, and the output that the page shows."""

    page: str
    words: tuple[str, ...]
    output: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"[:100]


def commands_of(page: Path) -> Iterator[Command]:
    """Return the commands in blocks of ``sh``, and those after a prompt in blocks without a language."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for language, block in blocks:
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield Command(page.name, tuple(words))
        elif not language and block.startswith("$ "):
            line, _, output = block.partition("\n")
            yield Command(page.name, tuple(shlex.split(line[2:])), output)


COMMANDS = sorted(
    {
        command.words: command
        for page in PAGES
        for command in commands_of(page)
        if not any(text in shlex.join(command.words) for text in NOT_OURS)
    }.values(),
    key=str,
)
"""All distinct commands of the pages."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the commands read."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "book.txt").write_text("It was a dark night. " * 4000)
    (folder / "more.jsonl").write_text('{"text": "The wind rose."}\n' * 40)
    (folder / "data").mkdir()
    small_gpt2(folder)
    loads = np.random.default_rng(1).integers(1, 99, size=(120, 1, 4, 1, 8))
    np.savez(folder / "loads.npz", counts=loads, iters=np.arange(1, 121))
    with _chdir(folder):
        corpus = "--input book.txt --output-prefix corpus_text_document --tokenizer gpt2 --vocab-file vocab.json"
        assert run_module("tools.preprocess_data", [*corpus.split(), "--merges-file", "merges.txt"]) == 0
        for suffix in (".bin", ".idx"):
            shutil.copy(f"corpus_text_document{suffix}", f"data/books{suffix}")
        plan = _output(["placement=overlap_search", "launch.num_nodes=4", "dry_run=true", "dry_run_format=json"])
        for name in ("first.json", "second.json"):
            (folder / name).write_text(json.dumps(json.loads(plan)["placement"]))
    _write_run(folder / "runs" / "first")
    _write_weights(folder)
    _write_dense(folder / "runs" / "dense" / "checkpoints" / "iter_0001000")
    return folder


def _write_weights(folder: Path) -> None:
    """Write a Hugging Face folder and a checkpoint with random weights, and the manifest of a checkpoint of Mixtral."""
    theirs, out = folder / "hf" / "mixtral", folder / "weights" / "mixtral"
    write_folder(theirs)
    (theirs / "tokenizer.json").write_text("{}")
    saved = folder / "runs" / "mixtral" / "checkpoints" / "iter_0001000"
    manifest = import_folder(theirs, saved, progress=lambda line: None)
    shutil.copytree(saved, saved.with_name("iter_0000900"))
    out.mkdir(parents=True)
    config, _ = pretrain_moe.compose(["model=mixtral_8x7b"])
    settings = settings_of(config, data_fingerprint="", vocab_size=config.model.vocab_size or 0)
    replace(manifest, settings=settings, files=()).write(out)
    # A folder of Megatron-LM, of which a dry run reads only the names.
    foreign = folder / "megatron" / "theirs" / "iter_0001000"
    foreign.mkdir(parents=True)
    (foreign / ".metadata").touch()
    (foreign.parent / MEGATRON_LATEST_NAME).write_text("1000")


def _write_dense(saved: Path) -> None:
    """Write a checkpoint of weights of a dense model of one layer."""
    model = ModelConfig(num_layers=1, vocab_size=128, num_moe_experts=None, moe_ffn_hidden_size=None)
    tensors = {name: torch.zeros(shape) for name, shape in tensors_of(model)}
    settings = {f"model.{name}": value for name, value in vars(model).items()}
    write_weights(saved, iter(tensors.items()), weights_manifest("dense", settings, {}), num_bytes=0)


def _write_run(path: Path) -> None:
    """Write a finished run of six nodes."""
    path.mkdir(parents=True)
    saving = ["checkpoint.save_interval_iterations=20", "training.global_batch_size=12"]
    config, _ = pretrain_moe.compose(["model=moe_micro", "launch.num_nodes=6", *saving])
    (path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    about = {"run_name": "first", "model": "moe_micro", "world_size": 6, "num_nodes": 6, "train_iterations": 60}
    events = [
        RunStarted(time_unix_seconds=1000.0, **about),  # type: ignore[arg-type]
        RanksReady(time_unix_seconds=1001.0, seconds=1.0, world_size=6),
        RunFinished(time_unix_seconds=1100.0, exit_code=0, reason="all ranks have finished", iteration=60),
    ]
    metrics = [
        Metrics(
            time_unix_seconds=1001.0 + iteration,
            iteration=iteration,
            values={"loss": 5.0 / iteration, "iteration_seconds": 1.0},
        )
        for iteration in range(1, 61)
    ]
    make_checkpoint(path / "checkpoints" / "iter_0000040", 40)
    for name, records in (("events.jsonl", events), ("metrics.jsonl", metrics)):
        (path / name).write_text("".join(json.dumps(record.to_record()) + "\n" for record in records))


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _output(overrides: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert pretrain_moe.main(overrides) == 0
    return out.getvalue()


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for key in ("SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_documented_command_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(list(command.words))
    out, err = capsys.readouterr()
    if command.output:
        assert command.output == out + err
    else:
        assert code == expected_code(command.words), f"exit code {code}\n{out[-500:]}\n{err}"
        assert "usage:" not in err


def expected_code(words: tuple[str, ...]) -> int:
    """Return the exit code of a correct command."""
    is_refused = "-m" in words and words[words.index("-m") + 1].removeprefix("tools.") in NEED_A_RUNNING_JOB
    return ControlError.exit_code if is_refused else 0


def run(words: list[str]) -> int:
    """Run a command in this process and return its exit code. A command that starts a job runs with
    ``dry_run=true``."""
    while "=" in words[0]:  # a variable of the environment
        words = words[1:]
    program = words[0]
    if program == "make":
        return subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, check=False).returncode
    if program == "srun" and "-m" in words:  # a tool on another machine
        return run(words[words.index("python") :])
    if program in LAUNCHERS:
        at = words.index("pretrain_moe.py")
        ranks = re.search(r"--n(?:proc|tasks)-per-node=(\d+)", shlex.join(words))
        assert ranks is not None, "the number of ranks"
        counts = [f"launch={LAUNCHERS[program]}", f"launch.ranks_per_node={ranks.group(1)}"]
        return pretrain_moe.main([*words[at + 1 :], *counts, "training.device=cpu", "dry_run=true"])
    assert program in ("python", "python3"), f"{program}: a program that this test cannot run"
    if words[1] == "pretrain_moe.py":
        return run_job(words[2:])
    if words[1] == "-m":
        return run_module(words[2], words[3:])
    return run_module(words[1].removesuffix(".py").replace("/", "."), words[2:])


def run_job(overrides: list[str]) -> int:
    """Check a job, on the machine's CPUs."""
    device = [] if any(word.startswith("training.device=") for word in overrides) else ["training.device=cpu"]
    return pretrain_moe.main(overrides if overrides[0].startswith("--") else [*overrides, *device, "dry_run=true"])


def run_module(module: str, arguments: list[str]) -> int:
    """Run the ``main`` of a tool. Of a process of the control plane, only run ``--help``."""
    if module.startswith("megatron_ft.control"):
        options = {word for word in arguments if word.startswith("--")}
        help_words = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(help_words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert sorted(option for option in options if option not in done.stdout) == []
        return done.returncode
    if module == "tools.doctor":  # what this machine lacks is not the command's fault: it must give an answer
        with contextlib.redirect_stdout(io.StringIO()) as out:
            importlib.import_module(module).main([*arguments, "--json"])
        assert "findings" in json.loads(out.getvalue())
        return 0
    if module == "tools.gpu_day":  # minutes of measurements, which ``tests/unit/tools/test_gpu_day.py`` has in small
        return 0 if importlib.import_module(module)._parse(arguments).call == arguments[0] else 1
    if module == "tools.convert_checkpoint" and arguments[0] == "from-window":  # ``tests/distributed`` starts such jobs
        return 0 if importlib.import_module(module)._parse(arguments).window else 1
    if module == "tools.convert_checkpoint" and arguments[0] == "from-hf":  # it does not overwrite a checkpoint
        arguments = [*arguments[:2], f"{arguments[2]}-converted", *arguments[3:]]
    if module == "tools.generate":  # ``tests/distributed/test_generate.py`` trains a model for it
        return 0 if importlib.import_module(module)._parse(arguments).tokens else 1
    if module == "tools.preprocess_data":  # it does not overwrite a dataset
        for file in Path("data").glob("books.*"):
            file.unlink()
    try:
        return int(importlib.import_module(module).main(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_commands_are_found() -> None:
    """Fewer commands would mean that a changed style of the pages has hidden some from this test."""
    assert len(COMMANDS) >= 40
    assert {command.page for command in COMMANDS} >= {"README.md", "tools.md", "launch.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_commands_are_marked(page: Path) -> None:
    """A command in a block that is not marked ``sh`` would not be run."""
    text = page.read_text(encoding="utf-8")
    unmarked = re.findall(r"^ *```(?!sh)\w*\n(?:python|make|torchrun|srun) .*$", text, re.MULTILINE)
    indented = re.findall(r"\n\n    (?:python|make|torchrun|srun) .*$", text, re.MULTILINE)
    assert unmarked + indented == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_exist(page: Path) -> None:
    """Checks modules, scripts and targets. ``benchmarks/tests/test_claims.py`` checks claims."""
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"`(?:srun \.\.\. )?python -m ([\w.]+)", text))
    modules = {module for module in modules if module != "MODULE" and not module.endswith(".")}  # `tools.<name>`
    assert sorted(module for module in modules if importlib.util.find_spec(module) is None) == []
    scripts = set(re.findall(r"`(?:python )?(tools/\w+\.py|benchmarks/\w+\.py)", text))
    assert sorted(script for script in scripts if not (ROOT / script).exists()) == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(set(re.findall(r"`make ([a-z-]+)", text)) - targets) == []
