"""Tests conversions of whole folders: interrupted ones continue, and damaged or hostile input is refused by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ft.errors import CheckpointError, ConfigError, MegatronFtError
from megatron_ft.mcore.convert import converter
from megatron_ft.mcore.convert.converter import FAMILIES, RECORD, Export, export_checkpoint, import_folder
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.convert.folder import CONFIG, INDEX, ONLY_FILE
from tests.contract.test_convert import SMALL, write_folder
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

    def interrupted(self: Any, file: Any, tensors: Any) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(file.name)
        write(self, file, tensors)

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


def test_a_folder_of_another_conversion_is_not_touched(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(dense, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    reader = DenseReader.open(dense)
    other = Export.of(reader, FAMILY, dtype=torch.float32)
    with pytest.raises(ConfigError, match="must be empty, or have been begun by the same conversion"):
        export_checkpoint(reader, other, out, progress=mute)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"it contains notes\.txt"):
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
    assert not list((tmp_path / "out").glob("*.safetensors"))
    with pytest.raises(ConfigError, match="only 1,000 free bytes"):
        import_folder(source, tmp_path / "weights", progress=mute)
    assert not (tmp_path / "weights").exists()


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
    "config is nested": (lambda folder: (folder / CONFIG).write_text("[" * 100_000), "nested too deep"),
    "another family": (_edit(model_type="llama"), "model_type='llama'"),
    "family is a list": (_edit(model_type=["mixtral"]), "model_type"),
    "huge number of layers": (_edit(num_hidden_layers=10**9), "too few for 1000000000 layers"),
    "huge number of experts": (_edit(num_local_experts=10**9), "too few for 3 layers"),
    "other width": (_edit(hidden_size=16), "with the shape"),
    "cut file": (_cut, "is not a complete safetensors file"),
    "header longer than the file": (_header, "is not a complete safetensors file"),
    "a link": (_link, "must be a regular file"),
    "path in the index": (_index("../theirs/model.safetensors"), "must be a regular file with a plain name"),
    "absolute path": (_index("/etc/passwd"), "must be a regular file with a plain name"),
    "index of a missing file": (_index("other.safetensors"), "must be a regular file"),
    "index without some tensors": (_index(ONLY_FILE), "but the index names none"),
    "index of numbers": (_index(3), "weight_map must be an object of file names"),  # type: ignore[arg-type]
    "missing tensor": (_tensor(lambda tensors: tensors.pop("model.norm.weight")), "it lacks"),
    "unknown tensor": (_tensor(lambda tensors: tensors.update(extra=torch.zeros(1))), "the model lacks"),
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
    (out / RECORD).write_text('{"files": {"../x": "y"}}')
    with pytest.raises(CheckpointError, match="must list the files of the folder"):
        converter.verify_folder(out)


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
    with pytest.raises(CheckpointError, match="does not have the tensors of this family"):
        Export.of(reader, FAMILY)


def test_the_tool_converts_there_and_back(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, out = tmp_path / "weights", tmp_path / "out"
    assert convert_checkpoint.main(["from-hf", str(source), str(weights), "--vocab-multiple", "8"]) == 0
    assert "checkpoint.load_weights" in capsys.readouterr().out
    words = ["to-hf", str(weights), str(out), "--family", "mixtral", "--dtype", "fp32"]
    assert convert_checkpoint.main(words) == 0
    before, after = contents(source), contents(out)
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    assert convert_checkpoint.main([*words[:3], "--family", "gpt"]) == 2
