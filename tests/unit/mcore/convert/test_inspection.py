"""Tests the list and the comparison of tensors of checkpoints and folders."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.convert.converter import import_folder
from megatron_ft.mcore.convert.folder import CONFIG, ONLY_FILE
from megatron_ft.mcore.device.install import ignore_missing_packages
from tests.contract.test_convert import SMALL
from tests.helpers.sharing import chosen
from tests.unit.mcore.convert.test_converter import FAMILY, mute
from tests.unit.snapshot.storage.test_partial_files import write_history
from tools import convert_checkpoint, inspect_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a Hugging Face folder in which every value is 1, except the final norm."""
    path = tmp_path / "theirs"
    path.mkdir()
    tensors = {
        name: torch.ones(shape)
        for rule in FAMILY.tensors(SMALL)
        for name, shape in zip(rule.theirs, rule.their_shapes(SMALL), strict=True)
    }
    tensors["model.norm.weight"] = torch.arange(8.0)
    save_file(tensors, path / ONLY_FILE)
    (path / CONFIG).write_text(json.dumps({"model_type": "mixtral", **FAMILY.settings(SMALL)}))
    return path


def changed(folder: Path, to: Path, name: str, value: torch.Tensor) -> Path:
    copy = Path(shutil.copytree(folder, to))
    save_file({**load_file(copy / ONLY_FILE), name: value}, copy / ONLY_FILE)
    return copy


def test_tensors_are_listed_with_norms(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_folder(folder, tmp_path / "dense", vocab_multiple=8, progress=mute)
    for path, name in ((folder, "model.norm.weight"), (tmp_path / "dense", "decoder.final_layernorm.weight")):
        assert inspect_checkpoint.main(["list", str(path), "--norms", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
        row = rows[name]
        assert (row["dtype"], row["shape"], row["num_bytes"]) == ("float32", [8], 32)
        assert row["norm"] == pytest.approx(140**0.5)
        assert inspect_checkpoint.main(["list", str(path)]) == 0
        assert f"{name}  float32  [8]  32 bytes" in capsys.readouterr().out
        assert inspect_checkpoint.main(["verify", str(path)]) == 0
        assert "no damage found" in capsys.readouterr().out


def test_differences_are_named_the_worst_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = torch.arange(8.0)
    values[7] += 0.7
    one = changed(folder, tmp_path / "one", "model.norm.weight", values)
    both = changed(one, tmp_path / "both", "lm_head.weight", torch.full((40, 8), 1.5))
    assert inspect_checkpoint.main(["diff", str(folder), str(folder)]) == 0
    assert capsys.readouterr().out == "0 tensors differ\n"
    assert inspect_checkpoint.main(["diff", str(folder), str(both)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("lm_head.weight: has other values, by at most 0.333")
    assert (
        lines[1].startswith("model.norm.weight: has other values, by at most 0.0909") and lines[2] == "2 tensors differ"
    )
    assert inspect_checkpoint.main(["diff", str(folder), str(one), "--tolerance", "0.1"]) == 0
    assert inspect_checkpoint.main(["diff", str(folder), str(both), "--tolerance", "0.1", "--most", "0"]) == 1
    assert "1 tensors differ (0 shown)" in capsys.readouterr().out
    assert inspect_checkpoint.main(["diff", str(folder), str(both), "--tolerance", "nan"]) == 2


@pytest.mark.parametrize("tool", ["inspect_checkpoint", "convert_checkpoint"])
def test_the_folder_of_a_run_is_refused_and_its_newest_states_are_named(
    tool: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    module = {"inspect_checkpoint": inspect_checkpoint, "convert_checkpoint": convert_checkpoint}[tool]
    words = ["list", str(run)] if tool == "inspect_checkpoint" else ["weights", str(run), str(tmp_path / "out")]
    assert module.main(words) == CheckpointError.exit_code
    assert "is the folder of a run; its checkpoints/ and windows/ contain none yet" in capsys.readouterr().err
    for iteration in (9, 10):
        import_folder(folder, run / "checkpoints" / f"iter_{iteration:07d}", vocab_multiple=8, progress=mute)
        (run / "windows" / f"window_{iteration:07d}").mkdir(parents=True)
    assert module.main(words) == CheckpointError.exit_code
    error = capsys.readouterr().err
    assert f"the newest is {run / 'checkpoints' / 'iter_0000010'}; its windows" in error
    assert f"the newest is {run / 'windows' / 'window_0000010'}" in error and "--trust" not in error


def test_only_warnings_about_missing_packages_are_hidden() -> None:
    ignore_missing_packages()
    for name, text, is_hidden in (
        ("megatron.core.optimizer", "Transformer Engine and Apex are not installed. Falling back.", True),
        ("megatron.core.optimizer", "something else", False),
        ("other", "Apex is not installed", False),
    ):
        with warnings.catch_warnings(record=True) as shown:
            warnings.warn_explicit(text, UserWarning, "file.py", 1, module=name)
        assert bool(shown) != is_hidden, (name, text)


def test_bits_are_compared_not_values(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.arange(8.0)
    values[0] = -0.0
    other = changed(folder, tmp_path / "other", "model.norm.weight", values)
    assert inspect_checkpoint.main(["diff", str(folder), str(other)]) == 1
    rounded = changed(folder, tmp_path / "rounded", "model.norm.weight", torch.arange(8.0).to(torch.bfloat16))
    assert inspect_checkpoint.main(["diff", str(folder), str(rounded), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["differences"]
    assert found == [{"name": "model.norm.weight", "reason": "has the dtypes float32 and bfloat16", "largest": 0.0}]


def test_other_folders_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "none", "must be a directory"), (tmp_path / "empty", "has no manifest.json")):
        assert inspect_checkpoint.main(["list", str(path)]) not in (0, 1)
        assert message in capsys.readouterr().err
    assert inspect_checkpoint.main(["diff", str(folder), str(tmp_path / "empty")]) not in (0, 1)


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    """Return a folder of windows of two ranks. The newest one lacks pieces that an earlier file has."""
    for rank in range(2):
        write_history(tmp_path / "windows", rank)
    return tmp_path / "windows"


def test_pieces_of_a_window_are_listed_with_their_iterations(
    windows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(windows)
    assert inspect_checkpoint.main(["list", "window_0000013"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "window of iterations 13 to 13, 2 ranks"
    # Ranks write the same names in this test, so each name is listed twice.
    assert lines[1:3] == ["w0[0:40].master  uint8  [40]  40 bytes  iteration 12"] * 2
    assert "w3[0:5000].master  uint8  [5000]  5,000 bytes  iteration 10" in lines
    assert inspect_checkpoint.main(["verify", "window_0000013"]) == 0


def test_windows_are_compared_piece_by_piece(windows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = windows / "window_0000012", windows / "window_0000013"
    assert inspect_checkpoint.main(["diff", str(one), str(one)]) == 0
    capsys.readouterr()
    assert inspect_checkpoint.main(["diff", str(one), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert sorted(each["name"] for each in found) == ["w1[0:36].master", "w2[0:4].master", "w4[0:64].master"]


def test_damage_to_an_earlier_file_of_a_window_is_found(windows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = windows / "window_0000010" / "rank-00001.window"
    content = bytearray(path.read_bytes())
    content[-4000] ^= 1
    path.write_bytes(content)
    assert inspect_checkpoint.main(["verify", str(windows / "window_0000013")]) == CheckpointError.exit_code
    assert "damaged: 'master' of 'w3'" in capsys.readouterr().err


def test_a_directory_with_another_name_is_no_window(
    windows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (windows / "window_0000010").rename(tmp_path / "mine")
    assert inspect_checkpoint.main(["list", str(tmp_path / "mine")]) == CheckpointError.exit_code
    assert "must be the directory of a window" in capsys.readouterr().err


@pytest.mark.parametrize("tool", chosen(["inspect_checkpoint", "convert_checkpoint"], ["inspect_checkpoint"]))
def test_commands_print_no_warning(tool: str, tmp_path: Path) -> None:
    words = ["list", "missing"] if tool == "inspect_checkpoint" else ["weights", "missing", str(tmp_path / "out")]
    command = [sys.executable, "-m", f"tools.{tool}", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.stderr == "missing: must be a directory\n"
