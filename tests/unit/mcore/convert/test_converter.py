"""Tests conversions of whole folders: interrupted ones continue, and damaged or hostile input is refused by name."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pretrain_moe
from megatron_ft.config.identity import settings_of
from megatron_ft.errors import CheckpointError, ConfigError, MegatronFtError
from megatron_ft.mcore.convert import converter
from megatron_ft.mcore.convert.converter import FAMILIES, Export, export_checkpoint, import_folder
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.convert.folder import CONFIG, INDEX, ONLY_FILE
from megatron_ft.mcore.convert.resume import RECORD
from megatron_ft.mcore.convert.streams import StoredValues
from megatron_ft.snapshot.storage.run_settings import other_model
from tests.contract.test_convert import SMALL, write_folder
from tests.helpers.sharing import chosen
from tools import convert_checkpoint

FAMILY = FAMILIES["mixtral"]
FILE_BYTES = 3_000


def mute(line: str) -> None:
    return


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of one file with random weights, as other projects write it."""
    path = tmp_path_factory.mktemp("theirs")
    write_folder(path, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def dense(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of several files with the weights of ``source``."""
    path = tmp_path_factory.mktemp("dense") / "weights"
    import_folder(source, path, vocab_multiple=64, most_file_bytes=FILE_BYTES, progress=mute)
    assert len(list(path.glob("*.distcp"))) > 2
    return path


@pytest.fixture
def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copied"))


def export(dense: Path, out: Path, **options: Any) -> list[str]:
    """Export ``dense`` to files of bounded size. Return the lines of the progress."""
    reader, lines = DenseReader.open(dense), list[str]()
    plan = Export.of(reader, FAMILY, vocab_size=SMALL.vocab_size, most_file_bytes=FILE_BYTES)
    export_checkpoint(reader, plan, out, progress=lines.append, **options)
    return lines


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_rows_are_padded_and_the_padding_is_removed(source: Path, dense: Path, tmp_path: Path) -> None:
    padded = DenseReader.open(dense).read("output_layer.weight")
    assert padded.shape[0] == 64 and not padded[SMALL.vocab_size :].any() and padded.dtype == torch.bfloat16
    export(dense, tmp_path / "out")
    before, after = contents(source), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]) == len(before)


def test_an_interrupted_conversion_continues(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, written = tmp_path / "out", []
    write = converter.FolderWriter.write

    def interrupted(self: Any, file: Any, *rest: Any) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(file.name)
        write(self, file, *rest)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(converter.FolderWriter, "write", interrupted)
        export(dense, out)
    assert not (out / CONFIG).exists(), "an incomplete folder must not look complete"
    kept = {name: (out / name).stat().st_mtime_ns for name in written}
    (out / written[1]).write_bytes(b"damaged meanwhile")
    lines = export(dense, out)
    assert ["complete already" in line for line in lines[:3]] == [True, False, False]
    assert (out / written[0]).stat().st_mtime_ns == kept[written[0]]
    converter.verify_folder(out)


KILLED = """
import os, signal, sys
from megatron_ft.mcore.convert import streams
from tools import convert_checkpoint

complete, names = streams.VerifiedFiles._complete, []

def killed(self, file, name):
    if len(names) == 2:  # the third file has its bytes, but not its name
        os.kill(os.getpid(), signal.SIGKILL)
    names.append(name)
    complete(self, file, name)

streams.VerifiedFiles._complete = killed
sys.exit(convert_checkpoint.main(sys.argv[1:]))
"""
"""Program of a conversion that is killed after two files are complete."""


@pytest.mark.parametrize("way", chosen(["to-hf", "from-hf"], ["to-hf"]))
def test_a_killed_conversion_continues(
    way: str, source: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(out: Path) -> list[str]:
        own = ["--family", "mixtral"] if way == "to-hf" else ["--vocab-multiple", "64"]
        return [way, str(dense if way == "to-hf" else source), str(out), *own, "--file-bytes", str(FILE_BYTES)]

    assert convert_checkpoint.main(words(tmp_path / "whole")) == 0
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "out"
    code = subprocess.run([sys.executable, "-c", KILLED, *words(out)], check=False, capture_output=True).returncode
    assert code == -signal.SIGKILL
    partial = out if way == "to-hf" else out.parent / ".out.partial" / "weights"
    assert out.exists() == (way == "to-hf") and list(partial.glob(".*.tmp"))
    first, second = sorted(path for path in partial.iterdir() if path.suffix in (".distcp", ".safetensors"))
    record = json.loads(((out if way == "to-hf" else partial.parent) / RECORD).read_text())
    assert record.keys() == {"source", "files"}
    assert [file["entry"]["name"] for file in record["files"]] == [first.name, second.name]
    kept = first.stat().st_ino, first.stat().st_mtime_ns
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)

    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in partial.iterdir()}
    assert convert_checkpoint.main([*words(out), "--dtype", "fp32"]) == 2
    assert "begun by the same conversion" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == before, "another conversion has changed it"

    assert convert_checkpoint.main(words(out)) == 0
    assert "complete already" in capsys.readouterr().out
    assert ((out / first.name).stat().st_ino, (out / first.name).stat().st_mtime_ns) == kept
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    found = {path.name: path.read_bytes() for path in out.iterdir()}
    random = {"manifest.json", ".metadata"}  # with ids; both are verified at the end
    assert found.keys() == wanted.keys()
    assert [name for name in found if found[name] != wanted[name] and name not in random] == []
    if way == "from-hf":
        one, other = DenseReader.open(out), DenseReader.open(tmp_path / "whole")
        assert one.metadata.storage_data == other.metadata.storage_data


def test_two_processes_do_not_write_one_checkpoint(source: Path, tmp_path: Path) -> None:
    def convert_twice(line: str) -> None:
        with pytest.raises(ConfigError, match="is being written by another process"):
            import_folder(source, tmp_path / "out", vocab_multiple=64, progress=mute)

    import_folder(source, tmp_path / "out", vocab_multiple=64, progress=convert_twice)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_processes_do_not_write_one_folder(dense: Path, tmp_path: Path) -> None:
    refused = list[str]()

    def convert_twice(line: str) -> None:
        with pytest.raises(ConfigError, match="is being written by another process"):
            export(dense, tmp_path / "out")
        refused.append(line)

    reader = DenseReader.open(dense)
    plan = Export.of(reader, FAMILY, vocab_size=SMALL.vocab_size, most_file_bytes=FILE_BYTES)
    export_checkpoint(reader, plan, tmp_path / "out", progress=convert_twice)
    assert len(refused) == len(plan.plan.files)
    converter.verify_folder(tmp_path / "out")


def test_a_foreign_folder_with_the_name_of_the_partial_result_is_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="begun by the same conversion, but .*partial contains notes"):
        import_folder(source, tmp_path / "out", progress=mute)
    assert (tmp_path / ".out.partial" / "notes").read_text() == "mine"


def test_only_tensors_that_change_are_loaded(
    source: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[int, ...]] = []
    load = StoredValues.load

    def counted(self: StoredValues) -> torch.Tensor:
        loaded.append(self.shape)
        return load(self)

    monkeypatch.setattr(StoredValues, "load", counted)
    export(dense, tmp_path / "out")
    rules = [rule for rule in FAMILY.tensors(SMALL) if len(rule.theirs) == 3]  # queries, keys and values
    # Such a tensor is loaded again for each file that has a part of it.
    assert set(loaded) == {rule.shape(SMALL) for rule in rules} and len(loaded) <= 3 * len(rules)


def test_a_folder_of_another_conversion_is_not_touched(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(dense, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    reader = DenseReader.open(dense)
    other = Export.of(reader, FAMILY, dtype=torch.float32)
    with pytest.raises(ConfigError, match="begun by the same conversion, but .* was begun by another conversion;"):
        export_checkpoint(reader, other, out, progress=mute)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"contains notes\.txt"):
        export(dense, tmp_path / "notes")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(ConfigError, match="must not exist"):
        import_folder(out, dense, progress=mute)


def test_too_little_space_is_reported_first(
    source: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ft.mcore.convert.folder.free_bytes", lambda path: 1000)
    with pytest.raises(ConfigError, match="only 1,000 free bytes"):
        export(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="only 1,000 free bytes"):
        export(dense, tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir()), "only an empty folder was there before"
    with pytest.raises(ConfigError, match="only 1,000 free bytes"):
        import_folder(source, tmp_path / "weights", progress=mute)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_tokenizer_files_are_copied(source: Path, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    export(dense, tmp_path / "out", tokenizer=tmp_path)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="--tokenizer"):
        export(dense, tmp_path / "other", tokenizer=source)


def _cut(folder: Path) -> None:
    path = folder / ONLY_FILE
    path.write_bytes(path.read_bytes()[:-100])


def _header(folder: Path) -> None:
    path = folder / ONLY_FILE
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def _link(folder: Path) -> None:
    path = folder / ONLY_FILE
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def _index(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))

    return change


def _edit(**entries: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, **entries}))

    return change


def _tensor(change: Any) -> Any:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / ONLY_FILE)
        change(tensors)
        save_file(tensors, folder / ONLY_FILE)

    return apply


HOSTILE = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "cannot be read"),
    "config is a list": (lambda folder: (folder / CONFIG).write_text("[]"), "must contain an object"),
    "config is nested": (
        lambda folder: (folder / CONFIG).write_text("[" * 100_000),
        "the JSON text is nested too deeply",
    ),
    "another family": (_edit(model_type="llama"), "model_type='llama'"),
    "family is a list": (_edit(model_type=["mixtral"]), "model_type"),
    "huge number of layers": (_edit(num_hidden_layers=10**9), "too few for 1000000000 layers"),
    "huge number of experts": (_edit(num_local_experts=10**9), "too few for 3 layers"),
    "other width": (_edit(hidden_size=16), "and the shape"),
    "cut file": (_cut, "is not a complete safetensors file"),
    "header longer than the file": (_header, "is not a complete safetensors file"),
    "a link": (_link, "must be a regular file"),
    "path in the index": (_index("../theirs/model.safetensors"), "must be a regular file with a plain name"),
    "absolute path": (_index("/etc/passwd"), "must be a regular file with a plain name"),
    "index of a missing file": (_index("other.safetensors"), "must be a regular file"),
    "index without some tensors": (_index(ONLY_FILE), "but the index names none"),
    "index of numbers": (_index(3), "weight_map must be an object of file names"),  # type: ignore[arg-type]
    "missing tensor": (_tensor(lambda tensors: tensors.pop("model.norm.weight")), "missing tensors: ['model.norm"),
    "unknown tensor": (_tensor(lambda tensors: tensors.update(extra=torch.zeros(1))), "unexpected tensors: ['extra']"),
    "other dtype": (_tensor(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(8).int()})), "I32"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_folders_are_refused_and_nothing_is_written(
    name: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = HOSTILE[name]
    change(copied)
    assert convert_checkpoint.main(["from-hf", str(copied), str(tmp_path / "out")]) in (2, 3, 4, 5)
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("part", ["data", "metadata", "manifest"])
def test_damaged_checkpoints_are_refused_and_nothing_is_written(
    part: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(dense, tmp_path / "copy"))
    path = {"data": copy / "__1_0.distcp", "metadata": copy / ".metadata", "manifest": copy / "manifest.json"}[part]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    words = ["to-hf", str(copy), str(tmp_path / "out"), "--family", "mixtral"]
    assert convert_checkpoint.main(words) != 0
    assert path.name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    path.unlink()
    assert convert_checkpoint.main(words) != 0
    assert not (tmp_path / "out").exists()


def test_a_damaged_export_is_found(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(dense, out)
    path = next(out.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # of a value: the header stays valid
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path.name}: damaged"):
        converter.verify_folder(out)
    record = json.loads((out / RECORD).read_text())
    for name, message in (("../x", "names of files in this folder"), (None, "files")):
        record["files"][0]["entry"]["name"] = name
        (out / RECORD).write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match=f"{RECORD}: cannot be read: .*{message}"):
            converter.verify_folder(out)
        with pytest.raises(CheckpointError, match=f"delete {out} to begin again"):
            export(dense, out)


def test_other_models_and_values_are_refused(dense: Path) -> None:
    reader = DenseReader.open(dense)
    for options in ({"vocab_size": 0}, {"vocab_size": 65}, {"most_file_bytes": 0}):
        with pytest.raises(MegatronFtError, match="must be"):
            Export.of(reader, FAMILY, **options)
    with pytest.raises(CheckpointError, match="must be True"):
        Export.of(reader, FAMILIES["qwen3_moe"])
    reader.manifest = replace(
        reader.manifest,
        settings={"model": {**reader.manifest.settings["model"], "model.num_layers": 2}},  # type: ignore[type-var,union-attr]
    )
    with pytest.raises(CheckpointError, match="3 layers are stored, but model.num_layers=2"):
        Export.of(reader, FAMILY)


def test_the_published_mixtral_is_the_model_of_its_configuration() -> None:
    published = {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
    }
    theirs = FAMILY.read_model(published, CONFIG)
    config, _ = pretrain_moe.compose(["model=mixtral_8x7b"])
    stored = {"model": {f"model.{name}": value for name, value in vars(theirs).items()}}
    present = settings_of(config, data_fingerprint="", vocab_size=32000)
    assert [found.key for found in other_model(stored, present)] == []
    assert theirs.vocab_size is not None and theirs.vocab_size % config.model.make_vocab_size_divisible_by == 0


def test_the_tool_converts_there_and_back(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, out = tmp_path / "weights", tmp_path / "out"
    assert convert_checkpoint.main(["from-hf", str(source), str(weights), "--vocab-multiple", "8"]) == 0
    assert "checkpoint.load_weights" in capsys.readouterr().out
    words = ["to-hf", str(weights), str(out), "--family", "mixtral", "--dtype", "fp32"]
    assert convert_checkpoint.main(words) == 0
    before, after = contents(source), contents(out)
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    for family in (["--family", "gpt"], []):
        assert convert_checkpoint.main([*words[:3], *family]) == 2
        assert f"must be one of {', '.join(FAMILIES)}" in capsys.readouterr().err


def test_a_log_gets_few_lines_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = 0.0
    with convert_checkpoint.Progress(is_terminal=False, clock=lambda: seconds) as progress:
        for number in range(1000):
            seconds = number / 40
            progress(f"{number}/1000")
    assert capsys.readouterr().out.split() == ["0/1000", "400/1000", "800/1000", "999/1000"]
    with pytest.raises(KeyboardInterrupt), convert_checkpoint.Progress(is_terminal=False) as progress:
        for line in ("first", "last"):
            progress(line)
        raise KeyboardInterrupt
    assert capsys.readouterr().out.split() == ["first", "last"]
    with convert_checkpoint.Progress(is_terminal=True, clock=lambda: 0.0) as progress:
        for number in range(100):
            progress(str(number))
    assert capsys.readouterr().out.split() == [str(number) for number in range(100)]
