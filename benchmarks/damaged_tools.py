"""Runs every tool that reads checkpoints on damaged inputs.

A command must refuse the input with one line that names it, and with exit code 2, 3 or 5. It must print no traceback
and no control characters, run no code of the input, and write nothing.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from benchmarks.damaged_inputs import (
    COMMON,
    DTYPE,
    EXPERTS,
    METADATA,
    MLP,
    NAMES,
    RUN,
    SETTINGS,
    SHAPES,
    VALUES,
    Damage,
    damaged_checkpoints,
    damaged_folders,
    damaged_windows,
)
from benchmarks.damaged_megatron import ARGUMENTS, FOLDER, FORMAT, SOUND, TRACKER, damaged_megatron
from benchmarks.damaged_megatron import write_folder as write_megatron
from benchmarks.forked import Begin, Job, run_forked
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.rundir import RunId
from megatron_ft.corpus.samples import resolve_vocab_size
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.testing.jobs import inside
from megatron_ft.testing.stored_samples import KINDS, NEW, OLD, sample_name, sample_window

REFUSALS = (2, 3, 5)
"""Exit codes of errors about values, input files and checkpoints."""
RUN_ID = "ab" * 16
_JOB_CASES = 60
"""Number of cases that one process runs: enough that forking costs little, but so few that all cores have work to the
end."""
_LISTED = ("all", METADATA, RUN)
_READ = (*_LISTED, VALUES, DTYPE, SHAPES)
_COMPARED = (*_LISTED, VALUES, DTYPE)  # other shapes are a difference
_MODEL = ("model", EXPERTS, MLP, SETTINGS)
_ALL = (*_READ, *_MODEL, NAMES)
_FOREIGN = ("all", METADATA, COMMON, FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a tool, with one damaged argument."""

    name: str
    tool: str
    """Module in ``tools``, or ``LOAD``."""
    words: Callable[[Path, Path], list[object]]
    """Returns the command line for (folder with the damaged input, path of the result)."""
    kind: str
    """Kind of the damaged input: ``dense``, ``window``, ``folder`` (of Hugging Face) or ``megatron``."""
    reads: tuple[str, ...] = _ALL
    """Parts of the input that the command reads. With damage to another part, it may succeed.

    For example, a load of weights gives the right values even if the metadata has a wrong dtype, and it ignores keys of
    the model that a later version may have written.
    """
    experts: bool = True
    """Whether the checkpoint is that of an MoE model."""
    code: int = 0
    """Exit code with an intact input."""


def _dense(name: str, tool: str, *words: object, **options: Any) -> Command:
    """Return a command that gets a dense checkpoint. In ``words``, ``IN`` is the damaged checkpoint, ``SOUND`` an
    intact one, and ``OUT`` the path of the result."""

    def fill(folder: Path, out: Path) -> list[object]:
        known = {
            "IN": folder / directory_name(NEW),
            "SOUND": folder / directory_name(OLD),
            "OUT": out,
            "RUN": folder.parent,
            "WINDOW": folder / sample_name(NEW),
            "SOUND-WINDOW": folder / sample_name(OLD),
            "HF": folder / "hf",
            "SOUND-HF": folder / "sound-hf",
            "MEGATRON": folder / FOLDER,
            "MEGATRON-CHECKPOINT": folder / FOLDER / directory_name(NEW),
            "SOUND-MEGATRON": folder / SOUND,
        }
        return [known.get(word, word) if isinstance(word, str) else word for word in words]

    return Command(name=name, tool=tool, words=fill, **{"kind": "dense", **options})


def _megatron(name: str, tool: str, *words: object, **options: Any) -> Command:
    """Return a command that gets a folder of Megatron-LM."""
    return _dense(name, tool, *words, **{"kind": "megatron", "reads": _EVERYTHING, **options})


_FOREIGN_VALUES = (*_FOREIGN, TRACKER, VALUES, DTYPE, SHAPES)
_FOREIGN_COMPARED = (*_FOREIGN, TRACKER, VALUES, DTYPE)
_EVERYTHING = (*_FOREIGN_VALUES, NAMES, ARGUMENTS)
_CONVERT, _INSPECT, _TRUST = "convert_checkpoint", "inspect_checkpoint", "--trust"
LOAD = "checkpoint.load_weights"
"""Name of the command that loads weights as a job does: the check of the launcher, then the load of a rank."""
_PROMPT = ("--prompt", "x", "--tokens", 1)
COMMANDS: tuple[Command, ...] = (
    _dense("to-hf", _CONVERT, "to-hf", "IN", "OUT", "--family", "mixtral"),
    _dense("weights", _CONVERT, "weights", "IN", "OUT"),
    _dense("weights, rounded", _CONVERT, "weights", "IN", "OUT", "--dtype", "fp16"),
    _dense("average, first", _CONVERT, "average", "IN", "SOUND", "OUT"),
    _dense("average, second", _CONVERT, "average", "SOUND", "IN", "OUT"),
    _dense("to-megatron", _CONVERT, "to-megatron", "IN", "OUT", reads=(*_LISTED, SHAPES, COMMON, NAMES, *_MODEL)),
    _dense(
        "upcycle",
        _CONVERT,
        "upcycle",
        "IN",
        "OUT",
        "--experts",
        4,
        "--topk",
        2,
        experts=False,
        reads=(*_READ, NAMES, "model", MLP),
    ),
    _dense("list", _INSPECT, "list", "IN", reads=_LISTED),
    _dense("list, with norms", _INSPECT, "list", "IN", "--norms", "--json", reads=_READ),
    _dense("verify", _INSPECT, "verify", "IN", reads=(*_READ, NAMES, COMMON, "model", EXPERTS, MLP)),
    _dense("strategies", _INSPECT, "strategies", "IN", reads=_LISTED),
    _dense("diff, first", _INSPECT, "diff", "IN", "SOUND", reads=_COMPARED),
    _dense("diff, second", _INSPECT, "diff", "SOUND", "IN", "--optimizer", reads=_COMPARED),
    _dense(
        "generate",
        "generate",
        "IN",
        "--run",
        "RUN",
        *_PROMPT,
        reads=("all", METADATA, VALUES, SHAPES, COMMON, NAMES, "model", EXPERTS),
    ),
    _dense("load_weights", LOAD, "IN", reads=(*_LISTED, VALUES, SHAPES, COMMON, NAMES, "model", EXPERTS)),
    _dense("from-hf, a checkpoint", _CONVERT, "from-hf", "IN", "OUT", code=5),
    _dense("from-window, a checkpoint", _CONVERT, "from-window", "IN", "OUT", code=3),
    _dense("from-window", _CONVERT, "from-window", "RUN", "OUT", "--window", sample_name(NEW), kind="window", code=9),
    _dense("list", _INSPECT, "list", "WINDOW", kind="window"),
    _dense("list, with optimizer", _INSPECT, "list", "WINDOW", "--optimizer", "--norms", kind="window"),
    _dense("verify", _INSPECT, "verify", "WINDOW", "--json", kind="window"),
    _dense("strategies", _INSPECT, "strategies", "WINDOW", kind="window"),
    _dense("load_weights, a window", LOAD, "WINDOW", kind="window", code=5),
    _dense("diff, first", _INSPECT, "diff", "WINDOW", "SOUND-WINDOW", kind="window", code=1),
    _dense("diff, second", _INSPECT, "diff", "SOUND-WINDOW", "WINDOW", kind="window", code=1),
    _dense("weights, a window", _CONVERT, "weights", "WINDOW", "OUT", kind="window", code=5),
    _dense("generate, a window", "generate", "WINDOW", "--run", "RUN", *_PROMPT, kind="window", code=5),
    _dense("from-hf", _CONVERT, "from-hf", "HF", "OUT", kind="folder"),
    _dense("list", _INSPECT, "list", "HF", kind="folder"),
    _dense("list, with norms", _INSPECT, "list", "HF", "--norms", "--json", kind="folder"),
    _dense("verify", _INSPECT, "verify", "HF", kind="folder"),
    _dense("strategies", _INSPECT, "strategies", "HF", "--json", kind="folder"),
    _dense("load_weights, a folder", LOAD, "HF", kind="folder", code=5),
    _dense("diff, first", _INSPECT, "diff", "HF", "SOUND-HF", kind="folder"),
    _dense("diff, second", _INSPECT, "diff", "SOUND-HF", "HF", kind="folder"),
    _dense("to-hf, a folder", _CONVERT, "to-hf", "HF", "OUT", "--family", "mixtral", kind="folder", code=5),
    _megatron("to-hf", _CONVERT, "to-hf", "MEGATRON", "OUT", "--family", "mixtral", _TRUST, reads=_EVERYTHING),
    _megatron("list", _INSPECT, "list", "MEGATRON", _TRUST, reads=(*_FOREIGN, TRACKER)),
    _megatron("list, with norms", _INSPECT, "list", "MEGATRON", "--norms", "--json", _TRUST, reads=_FOREIGN_VALUES),
    _megatron("verify", _INSPECT, "verify", "MEGATRON", _TRUST, reads=_FOREIGN_VALUES),
    _megatron("strategies", _INSPECT, "strategies", "MEGATRON", _TRUST, reads=(*_FOREIGN, TRACKER)),
    _megatron("diff, first", _INSPECT, "diff", "MEGATRON", "SOUND-MEGATRON", _TRUST, reads=_FOREIGN_COMPARED),
    _megatron("diff, second", _INSPECT, "diff", "SOUND-MEGATRON", "MEGATRON", _TRUST, reads=_FOREIGN_COMPARED),
    _megatron("load_weights", LOAD, "MEGATRON", _TRUST, reads=(*_FOREIGN, TRACKER, VALUES, SHAPES, NAMES)),
    _megatron(
        "generate",
        "generate",
        "MEGATRON-CHECKPOINT",
        "--run",
        "RUN",
        *_PROMPT,
        _TRUST,
        reads=(*_FOREIGN, VALUES, SHAPES, NAMES),
    ),
    _megatron("to-hf, not trusted", _CONVERT, "to-hf", "MEGATRON", "OUT", "--family", "mixtral", code=5),
    _megatron("weights, not trusted", _CONVERT, "weights", "MEGATRON", "OUT", code=5),
    _megatron("verify, not trusted", _INSPECT, "verify", "MEGATRON", code=5),
    _megatron("load_weights, not trusted", LOAD, "MEGATRON", code=5),
)
"""All commands that read checkpoints, windows or folders, once for each argument that can be damaged."""


def damages(kind: str) -> list[Damage]:
    """Return all damages of one kind of input."""
    makers = {"dense": damaged_checkpoints, "window": damaged_windows, "folder": damaged_folders}
    makers["megatron"] = damaged_megatron
    return makers[kind]()


@dataclass(slots=True)
class Outcomes:
    """Number of refused and accepted inputs, and everything that a command must not do."""

    refused: int = 0
    unaffected: int = 0
    """Commands that succeeded because they do not read the damaged part."""
    problems: list[str] = field(default_factory=list)


class Workplace:
    """Folder with intact inputs of all kinds, from which each case gets a copy."""

    def __init__(self, root: Path) -> None:
        """Write the inputs into ``root``, an existing directory."""
        self.root = root
        config = _config()
        for experts in (True, False):
            folder = self._template(experts) / "checkpoints"
            model = config.model if experts else replace(config.model, num_moe_experts=None, moe_ffn_hidden_size=None)
            for iteration in (OLD, NEW):
                _write_checkpoint(folder / directory_name(iteration), replace(config, model=model), iteration)
        (window, _), folder = KINDS, self._template(True)
        for iteration in (OLD, NEW):
            window.save(folder / "windows", iteration)
        for name in ("hf", "sound-hf"):
            _write_folder(folder / "folders" / name)
        write_megatron(folder / "megatron" / FOLDER, config, resolve_vocab_size(config))
        shutil.copytree(folder / "megatron" / FOLDER, folder / "megatron" / SOUND)
        for template in (self._template(True), self._template(False)):
            (template / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
            (template / "run_id.json").write_text(json.dumps({"run_id": RUN_ID, "is_older": False}))

    def _template(self, experts: bool) -> Path:
        return self.root / ("experts" if experts else "dense")

    def run(self, command: Command, damage: Damage | None, outcomes: Outcomes, case: Path | None = None) -> None:
        """Run a command on a damaged copy, or on an intact one if ``damage`` is None, and judge what it does. The copy
        is written to ``case``, which is deleted first; None for a directory in ``root``."""
        case = self.root / "case" if case is None else case
        shutil.rmtree(case, ignore_errors=True)
        names = {"dense": "checkpoints", "window": "windows", "folder": "folders", "megatron": "megatron"}
        run, template = case / "run", self._template(command.experts)
        run.mkdir(parents=True)
        for name in ("config.yaml", "run_id.json"):
            shutil.copyfile(template / name, run / name)
        folder = run / names[command.kind]
        shutil.copytree(template / names[command.kind], folder)
        victim = None if damage is None else damage.apply(folder)
        out = case / "out" / "result"
        out.parent.mkdir()
        before, inside = _listing(case), case / "cwd"
        inside.mkdir()
        code, printed, error = _call(command, [str(word) for word in command.words(folder, out)], inside)
        inside_after = sorted(path.name for path in inside.iterdir())
        shutil.rmtree(inside)
        what = f"{command.kind}, {command.name}, {'intact' if damage is None else damage.name}"
        if inside_after:
            outcomes.problems.append(f"{what}: ran code, or wrote {inside_after}")
        if damage is None:
            if code != command.code:
                outcomes.problems.append(f"{what}: ended with {code}, not {command.code}: {error[-2000:]}")
            return
        assert victim is not None, "a damage names what it changed"
        reads = damage.part in command.reads
        if code in (0, 1) and not reads and (not error or error.endswith(": loading\n")):
            outcomes.unaffected += 1
            return
        after = _listing(case)
        problem = _problem(code, printed, error, victim) or ("" if after == before else f"wrote {after - before}")
        if problem:
            outcomes.problems.append(f"{what}: {problem}")
        outcomes.refused += not problem


def _problem(code: int, printed: str, error: str, victim: Path) -> str:
    """Return what is wrong with the outcome of a command that must refuse ``victim``; empty if nothing is wrong."""
    if code not in REFUSALS:
        return f"ended with {code}: {error[-1500:]}"
    lines = error.strip("\n").split("\n")
    lines = [line for line in lines if not line.endswith(": loading")]
    if len(lines) != 1 or not lines[0]:
        return f"printed {len(lines)} lines: {error[:1500]!r}"
    if not all(char.isprintable() for char in lines[0]) or len(lines[0]) > 2000:
        return f"printed control characters or {len(lines[0])} characters: {lines[0][:300]!r}"
    if str(victim) not in lines[0] and str(victim.parent) not in lines[0]:
        return f"does not name the input: {lines[0]}"
    return ""


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "cwd" not in path.parts}


def _call(command: Command, words: list[str], cwd: Path) -> tuple[int, str, str]:
    """Run a tool in this process. Return exit code, output and errors."""
    import importlib

    from megatron_ft.mcore.convert import window_replay

    run = _load_weights if command.tool == LOAD else importlib.import_module(f"tools.{command.tool}").main
    printed, errors = io.StringIO(), io.StringIO()
    try:
        # The windows belong to a run whose id is no random number. They cannot be replayed, so the job is not started.
        with (
            inside(cwd),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(errors),
            mock.patch.object(window_replay.RunId, "read", return_value=RunId(run_id=sample_window(NEW, 0)[0].run_id)),
            mock.patch.object(window_replay, "_job", side_effect=_Started),
        ):
            code = int(run(words))
    except _Started:
        code = 9
    except BaseException as error:  # noqa: BLE001 - any error would be a traceback for the user
        import traceback

        return -1, printed.getvalue(), errors.getvalue() + "".join(traceback.format_exception(error)[-6:])
    return code, printed.getvalue(), errors.getvalue()


def _load_weights(words: list[str]) -> int:
    """Load weights as a job of one rank with ``checkpoint.load_weights`` does. Return the exit code."""
    import torch

    from megatron_ft.config.identity import JobIdentity, settings_of
    from megatron_ft.corpus.samples import resolve_vocab_size
    from megatron_ft.errors import CheckpointError
    from megatron_ft.mcore.checkpoint.manager import CheckpointManager
    from megatron_ft.mcore.device.install import install
    from megatron_ft.mcore.model.build import build_bare_model
    from megatron_ft.mcore.model.transformer_config import build_transformer_config
    from megatron_ft.snapshot.storage.checkpoints import newest_of_megatron
    from megatron_ft.snapshot.storage.run_settings import check_source
    from megatron_ft.testing import engines

    path, config, is_trusted = Path(words[0]), _config(), _TRUST in words
    vocab_size = resolve_vocab_size(config)
    settings = settings_of(config, data_fingerprint="", vocab_size=vocab_size)
    _, transformer_impl = install(config)
    try:
        path = newest_of_megatron(path) or path
        check_source(path, settings, weights_only=True, trust=is_trusted)
        with warnings.catch_warnings(), engines.groups_of(config) as groups:
            warnings.simplefilter("ignore")  # as in a rank
            model = build_bare_model(
                config,
                build_transformer_config(config, transformer_impl),
                vocab_size=vocab_size,
                device=torch.device("cpu"),
                pg_collection=groups.pg_collection,
            )
            manager = CheckpointManager(
                replace(config.checkpoint, trust=is_trusted),
                run_dir=path,  # nothing is saved
                identity=JobIdentity(run_id="", run_name="", settings=settings),
                topology_record={"world_size": 1},
                group=groups.vote,
                dp_cp_group=groups.pg_collection.dp_cp,
                report=lambda record: None,
            )
            del groups
            manager.load_weights([model], None, path)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


class _Started(Exception):
    """Raised when a command would start a job."""


def _config() -> JobConfig:
    """Return the configuration of a job with a tiny model that is in the family Mixtral."""
    config = JobConfig()
    small = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "ffn_hidden_size": 24}
    small |= {"moe_ffn_hidden_size": 24, "num_moe_experts": 2, "moe_router_topk": 2, "make_vocab_size_divisible_by": 64}
    config = replace(config, model=replace(config.model, **small))
    training = replace(config.training, device="cpu", micro_batch_size=1, global_batch_size=4)
    return replace(config, training=training)


def _write_checkpoint(path: Path, config: JobConfig, iteration: int) -> None:
    import torch

    from megatron_ft.config.identity import settings_of
    from megatron_ft.mcore.convert.model_tensors import tensors_of
    from megatron_ft.mcore.convert.weights import weights_manifest, write_weights

    model = replace(config.model, vocab_size=resolve_vocab_size(config))
    settings = settings_of(config, data_fingerprint="", vocab_size=model.vocab_size or 0)["model"]
    generator = torch.Generator().manual_seed(7)
    tensors = ((name, torch.randn(shape, generator=generator)) for name, shape in sorted(tensors_of(model)))
    manifest = replace(weights_manifest("run", settings, {}), iteration=iteration, run_id=RUN_ID)
    write_weights(path, tensors, manifest, num_bytes=0)


def _write_folder(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from megatron_ft.mcore.convert.converter import FAMILIES

    family, model = FAMILIES["mixtral"], _folder_model()
    path.mkdir(parents=True)
    shapes = [
        (name, shape)
        for rule in family.tensors(model)
        for name, shape in zip(rule.theirs, rule.their_shapes(model), strict=True)
    ]
    save_file({name: torch.ones(shape) for name, shape in shapes}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": family.name, **family.settings(model)}))


def _folder_model() -> Any:
    small = {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6}
    small |= {"vocab_size": 40, "ffn_hidden_size": 12, "moe_ffn_hidden_size": 12, "num_moe_experts": 3}
    return replace(JobConfig().model, **small, seq_length=32, moe_router_topk=2)


def run_all(root: Path, *, stride: int = 1) -> tuple[dict[str, int], list[str]]:
    """Run all commands on damaged inputs, each on every ``stride``-th one, in forked processes. ``root`` is an empty
    directory.

    Returns:
        Counts of outcomes by kind of input, and everything that a command must not do.
    """
    from megatron_ft.testing import engines

    engines.install()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as ``tools/generate.py`` sets it
    (root / "inputs").mkdir()
    (root / "jobs").mkdir()
    workplace, counts, problems = Workplace(root / "inputs"), dict[str, int](), list[str]()
    chosen: list[tuple[Command, list[Damage | None]]] = []
    for number, command in enumerate(COMMANDS):
        mine = [None, *damages(command.kind)[number % stride :: stride]]
        chosen += [(command, mine[start : start + _JOB_CASES]) for start in range(0, len(mine), _JOB_CASES)]
    engines.be_ready_to_fork()
    jobs = [
        Job(name=f"{command.kind}, {command.name}", run=partial(_run_cases, workplace, command, mine))
        for command, mine in chosen
    ]
    for (command, _), done in zip(chosen, run_forked(jobs, root / "jobs"), strict=True):
        if done.problem is not None:
            problems.append(done.problem)
            continue
        outcomes = Outcomes(**done.result)
        problems += outcomes.problems
        for name, count in (("refused", outcomes.refused), ("unread", outcomes.unaffected)):
            counts[f"tools_{command.kind}_{name}"] = counts.get(f"tools_{command.kind}_{name}", 0) + count
    return counts, problems


def _run_cases(
    workplace: Workplace, command: Command, chosen: list[Damage | None], folder: Path, begin: Begin
) -> dict[str, Any]:
    outcomes = Outcomes()
    for damage in chosen:
        begin("intact" if damage is None else damage.name)
        workplace.run(command, damage, outcomes, folder / "case")
    return asdict(outcomes)
