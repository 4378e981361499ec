"""Tests checkpoints from which a job cannot start: the launcher names the reason before any rank starts.

Each case is a command that a user may give by mistake. The advice in the error must be safe, and must not be what the
command already does.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import pretrain_moe
from megatron_ft.config.identity import settings_of
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.report import resume_advice
from megatron_ft.control.rundir import has_complete_state
from megatron_ft.corpus.samples import SplitPlan, resolve_vocab_size
from megatron_ft.corpus.tokenizers import build_tokenizer
from megatron_ft.errors import CheckpointError, ConfigError, DataError
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.window_file import rank_name
from tools import preprocess_data

JOB = ("model=moe_micro", "training.device=cpu", "telemetry.wandb=disabled", "training.eval_interval_iterations=0")
JOB += ("training.micro_batch_size=1", "training.global_batch_size=2")
RUN_ID = "ab" * 16


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset and the run ``a``, which trained 34 iterations and was saved after 17 and 34."""
    folder = tmp_path_factory.mktemp("template")
    write_text(folder / "corpus.txt", "text of the corpus. " * 200)
    run = folder / "runs" / "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save(run / "checkpoints" / directory_name(34), 34)
        config, _ = pretrain_moe.compose([*JOB, "data.train=[corpus]"])
    shutil.copytree(run / "checkpoints" / directory_name(34), run / "checkpoints" / directory_name(17))
    (run / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    (run / "run_id.json").write_text(json.dumps({"run_id": RUN_ID, "is_older": False}))
    return folder


@pytest.fixture
def runs(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the folder of runs in ``template``. The working directory is its parent."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def write_text(path: Path, text: str, *words: str) -> None:
    """Index a text for ``data.train``."""
    path.write_text(text)
    given = ["--input", str(path), "--output-prefix", str(path.with_suffix("")), *words]
    assert preprocess_data.main(given) == 0


def save(path: Path, iteration: int, *words: str, concerns: tuple[str, ...] = ()) -> None:
    """Write the manifest of a checkpoint of a job with ``words``, with only the given concerns if there are any."""
    config, _ = pretrain_moe.compose([*JOB, "data.train=[corpus]", *words])
    split = SplitPlan.of(config.data, config.model.seq_length, "train", build_tokenizer(config.data))
    settings = settings_of(config, data_fingerprint=split.fingerprint(), vocab_size=resolve_vocab_size(config))
    path.mkdir(parents=True)
    manifest = Manifest(
        run_id=RUN_ID,
        run_name="a",
        generation=0,
        topology={"world_size": 1},
        iteration=iteration,
        consumed_samples=2 * iteration,
        settings={name: values for name, values in settings.items() if not concerns or name in concerns},
        software={},
        files=(),
    )
    manifest.write(path)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command that cannot work."""

    words: tuple[str, ...]
    says: tuple[str, ...]
    """Texts of the error."""
    never: tuple[str, ...] = ("trust",)
    """Advice that would be unsafe or useless."""
    prepare: Callable[[Path], None] = lambda runs: None
    """Changes the folder of runs before the command."""
    exit_code: int = CheckpointError.exit_code
    dry_run: bool = True
    """Whether a dry run finds the error, too. It does not index data, so it cannot compare them."""


LOAD, RESUME = "checkpoint.load=runs/a/checkpoints/iter_0000034", ("run.name=a", "run.resume=must")
NEWEST = "the newest is runs/a/checkpoints/iter_0000034"


def _foreign(runs: Path) -> None:
    path = runs.parent / "foreign"
    path.mkdir()
    (path / ".metadata").write_bytes(b"")


def _incomplete(runs: Path) -> None:
    path = runs / "a" / "checkpoints" / directory_name(40)
    path.mkdir()
    (path / ".metadata").write_bytes(b"")


def _unsaved(runs: Path) -> None:
    (runs / "b").mkdir()
    (runs / "b" / "config.yaml").write_text("")


def _window(runs: Path) -> None:
    path = runs / "a" / "windows" / "window_0000030"
    path.mkdir(parents=True)
    (path / rank_name(0)).write_bytes(b"")


def _folder(runs: Path) -> None:
    (runs.parent / "hf").mkdir()
    (runs.parent / "hf" / "config.json").write_text("{}")


def _weights(runs: Path) -> None:
    save(runs.parent / "weights", 0, concerns=("model",))


def _dense(runs: Path) -> None:
    save(runs.parent / "dense", 5, "model.num_moe_experts=null", "model.moe_ffn_hidden_size=null")


def _plain(runs: Path) -> None:
    save(runs.parent / "plain", 5, "parallel.use_distributed_optimizer=false")


def _other_text(runs: Path) -> None:
    write_text(runs.parent / "other.txt", "another text for training. " * 200)


def _other_tokens(runs: Path) -> None:
    write_text(runs.parent / "corpus.txt", "other words under the old name " * 200, "--overwrite")


def _tokenizer(runs: Path) -> None:
    """Write a tokenizer of one token for each byte, as ``bytes`` has, but with other numbers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    backend = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(runs.parent / "tokenizer.json"))


def _damage_record(runs: Path) -> None:
    (runs.parent / "corpus.tokenizer.json").write_text("{}")


def _damaged(runs: Path) -> None:
    path = runs / "a" / "checkpoints" / directory_name(34) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"iteration": 34', b'"iteration": 35'))


def _newer_format(runs: Path) -> None:
    path = runs / "a" / "checkpoints" / directory_name(34) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version": 2', b'"format_version": 9'))


CASES: dict[str, Case] = {
    "1 a path that does not exist": Case(words=("checkpoint.load=nope",), says=("must be an existing directory",)),
    "1 a file": Case(words=("checkpoint.load=corpus.txt",), says=("must be an existing directory",)),
    "1 weights from a path that does not exist": Case(
        words=("checkpoint.load_weights=nope",), says=("checkpoint.load_weights=nope", "must be an existing directory")
    ),
    "2 the folder of a run": Case(
        words=("checkpoint.load=runs/a",), says=("is the folder of a run; its checkpoints are in", NEWEST)
    ),
    "2 the folder of a run that saved nothing": Case(
        words=("checkpoint.load=runs/b",),
        says=("checkpoints/ and windows/ contain none yet",),
        prepare=_unsaved,
    ),
    "2 the folder of its checkpoints": Case(
        words=("checkpoint.load=runs/a/checkpoints",),
        says=("is a folder of checkpoints; its newest complete checkpoint is runs/a/checkpoints/iter_0000034",),
    ),
    "2 the folder of all runs": Case(
        words=("checkpoint.load_weights=runs",),
        says=("is a folder of runs (a); checkpoints of a run are in runs/a/checkpoints",),
    ),
    "2 a directory with something else": Case(
        words=("checkpoint.load=x",),
        says=("contains no checkpoint: it has no manifest.json and no .metadata",),
        prepare=lambda runs: (runs.parent / "x").mkdir(),
    ),
    "2 a window of snapshots": Case(
        words=("checkpoint.load=runs/a/windows/window_0000030",),
        says=("is a window of snapshots", "from-window"),
        prepare=_window,
    ),
    "2 a Hugging Face folder": Case(
        words=("checkpoint.load_weights=hf",), says=("is a Hugging Face folder", "from-hf"), prepare=_folder
    ),
    "2 a checkpoint of another project": Case(
        words=("checkpoint.load=foreign",),
        says=("has no manifest.json of this project", "If you trust their origin, set checkpoint.trust=true"),
        never=(),
        prepare=_foreign,
    ),
    "2 only weights": Case(
        words=("checkpoint.load=weights",),
        says=("contains only weights; set checkpoint.load_weights instead",),
        prepare=_weights,
    ),
    "3 another number of experts": Case(
        words=(LOAD, "model.num_moe_experts=16"), says=("other tensors", "model.num_moe_experts: was 8, now 16")
    ),
    "3 another number of experts, weights": Case(
        words=(LOAD.replace("load", "load_weights"), "model.num_moe_experts=16"),
        says=("belong to another model", "model.num_moe_experts: was 8, now 16"),
    ),
    "3 a dense model": Case(
        words=("checkpoint.load=dense",), says=("model.num_moe_experts: was null, now 8",), prepare=_dense
    ),
    "3 another width of a dense model": Case(
        words=(
            *("checkpoint.load=dense", "model.num_moe_experts=null", "model.moe_ffn_hidden_size=null"),
            "model.ffn_hidden_size=96",
        ),
        says=("model.ffn_hidden_size: was 64, now 96",),
        prepare=_dense,
    ),
    "3 another vocabulary": Case(words=(LOAD, "model.vocab_size=1000"), says=("model.vocab_size: was 320, now 1024",)),
    "4 another number of layers": Case(
        words=(LOAD, "model.num_layers=6"), says=("other tensors", "model.num_layers: was 4, now 6")
    ),
    "4 a resumed run with another number of layers": Case(
        words=(*RESUME, "model.num_layers=6"),
        says=("model.num_layers: 4 -> 6", "begin another run"),
        exit_code=ConfigError.exit_code,
    ),
    "4 a resumed run with another number of experts": Case(
        words=(*RESUME, "model.num_moe_experts=16"),
        says=("model.num_moe_experts: 8 -> 16",),
        exit_code=ConfigError.exit_code,
    ),
    "5 another sharding of the optimizer": Case(
        words=(LOAD, "parallel.use_distributed_optimizer=false"),
        says=(
            "other tensors than the optimizer of this job: parallel.use_distributed_optimizer: was true, now false",
            "checkpoint.load_weights instead of checkpoint.load",
        ),
    ),
    "5 another dtype without sharding": Case(
        words=("checkpoint.load=plain", "parallel.use_distributed_optimizer=false", "precision.params_dtype=bf16"),
        says=("precision.params_dtype: was fp32, now bf16",),
        prepare=_plain,
    ),
    "5 frozen parameters": Case(
        words=(LOAD, "training.frozen=experts"), says=("training.frozen: was null, now experts",)
    ),
    "5 a resumed run with another sharding of the optimizer": Case(
        words=(*RESUME, "parallel.use_distributed_optimizer=false"),
        says=("parallel.use_distributed_optimizer: true -> false",),
        exit_code=ConfigError.exit_code,
    ),
    "6 a resumed run with another dataset": Case(
        words=(*RESUME, "data.train=[other]"),
        says=("data.train:", "run.allow_change=[data.train]"),
        prepare=_other_text,
        exit_code=ConfigError.exit_code,
    ),
    "6 a resumed run whose dataset was written again": Case(
        words=RESUME,
        says=("data.fingerprint", "the files contain different tokens", "set checkpoint.allow_other_data=true"),
        prepare=_other_tokens,
        dry_run=False,
    ),
    "6 a resumed run with other data and another seed of the model": Case(
        words=(*RESUME, "data.train=[other]", "training.seed=5"),
        says=("training.seed: 1234 -> 5", "data.train"),
        never=("trust", "allow_other_data"),
        prepare=_other_text,
        exit_code=ConfigError.exit_code,
    ),
    "7 a checkpoint whose save was interrupted": Case(
        words=("checkpoint.load=runs/a/checkpoints/iter_0000040",),
        says=("its save was interrupted; its newest complete checkpoint is runs/a/checkpoints/iter_0000034",),
        prepare=_incomplete,
    ),
    "22 a dataset of another tokenizer whose ids are valid": Case(
        words=("data.tokenizer=huggingface", "data.tokenizer_file=tokenizer.json"),
        says=("data.train[0]=corpus: was written with another tokenizer", "fingerprint bytes", "preprocess_data"),
        prepare=_tokenizer,
        exit_code=DataError.exit_code,
    ),
    "22 a damaged record of the tokenizer": Case(
        words=(),
        says=("corpus.tokenizer.json: must contain the fingerprint of a tokenizer",),
        prepare=_damage_record,
        exit_code=DataError.exit_code,
    ),
    "a damaged manifest": Case(words=(LOAD,), says=("manifest is damaged",), prepare=_damaged),
    "a checkpoint of a later version": Case(words=(LOAD,), says=("format_version=9",), prepare=_newer_format),
}
"""Numbers are those of mistakes that users have made, which earlier versions reported late or with wrong advice."""


@pytest.mark.parametrize("name", CASES)
def test_the_launcher_names_the_reason(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    case.prepare(runs)
    before = sorted(runs.rglob("*"))
    words = [*JOB, "data.train=[corpus]", "run.dir=runs", *case.words, f"dry_run={str(case.dry_run).lower()}"]
    capsys.readouterr()
    with mock.patch("megatron_ft.control.launcher.launch", side_effect=AssertionError("ranks would start")):
        assert pretrain_moe.main(words) == case.exit_code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1
    for text in case.says:
        assert text in lines[0]
    for text in case.never:
        assert text not in lines[0]
    assert sorted(runs.rglob("*")) == before, "a failed start must not claim the name of a run"


RIGHT: dict[str, tuple[str, ...]] = {
    "the same job": (LOAD,),
    "other outputs of the same tensors": (LOAD, "model.moe_router_topk=3", "optimizer.lr=0.5", "training.seed=5"),
    "another dtype with a distributed optimizer": (LOAD, "precision.params_dtype=bf16"),
    "another layout": (LOAD, "launch.ranks_per_node=2", "parallel.expert_model_parallel_size=2"),
    "only the weights": (LOAD.replace("load", "load_weights"), "parallel.use_distributed_optimizer=false"),
    "a size without effect": (LOAD, "model.ffn_hidden_size=96"),
    "a resumed run": RESUME,
}


@pytest.mark.parametrize("name", RIGHT)
def test_jobs_that_can_start_are_not_refused(name: str, runs: Path) -> None:
    words = [*JOB, "data.train=[corpus]", "run.dir=runs", *RIGHT[name]]
    with mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch:
        assert pretrain_moe.main(words) == 0
    assert launch.called


def test_7_a_run_without_a_complete_save_is_not_continued_with_must(tmp_path: Path) -> None:
    """After two Ctrl-C within the first save, only an incomplete directory is there."""
    (tmp_path / "checkpoints" / directory_name(5)).mkdir(parents=True)
    (tmp_path / "checkpoints" / directory_name(5) / "__0_0.distcp").write_bytes(b"cut")
    advice = resume_advice(["python", "pretrain_moe.py"], tmp_path, has_checkpoint=has_complete_state(tmp_path))
    assert "run.resume=auto" in advice and "starts at iteration 0" in advice and "must" not in advice
