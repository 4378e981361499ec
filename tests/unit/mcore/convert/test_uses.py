"""Tests which recovery strategies ``tools/inspect_checkpoint.py strategies`` names for a checkpoint or window."""

import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ft.config.identity import settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.corpus.samples import resolve_vocab_size
from megatron_ft.corpus.tokenizers import ByteTokenizer
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.planning.recovery.costs import STRATEGIES
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.run_settings import SETTINGS
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.snapshot.storage.window_folder import RejectedWindow, window_digest
from megatron_ft.snapshot.window import Window
from megatron_ft.testing import engines
from megatron_ft.testing.stored_samples import sample_name, sample_window
from tests.contract.test_convert import write_folder
from tests.helpers import dense_fixture
from tests.unit.snapshot.storage.test_partial_files import write_history
from tools import convert_checkpoint, inspect_checkpoint

RUN_ID = "ab" * 16
STARTS = ("checkpoint.load", "checkpoint.load_weights")


def config_of(**changes: Any) -> JobConfig:
    """Return the configuration of a run of two ranks, as ``config.yaml`` records it."""
    config = dense_fixture.config()
    config = replace(config, launch=replace(config.launch, num_nodes=2, ranks_per_node=1))
    for key, value in changes.items():
        group, _, name = key.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return config


def make_run(path: Path, config: JobConfig, *, of: JobConfig | None = None) -> Path:
    """Write a run with a checkpoint of iteration 2 and a window of iterations 30 and 31, saved by a job with ``of``."""
    saved = config if of is None else of
    settings = settings_of(saved, data_fingerprint="", vocab_size=resolve_vocab_size(saved))
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    (path / "run_id.json").write_text(json.dumps({"run_id": RUN_ID, "is_older": False}))
    with tarfile.open(dense_fixture.FOLDER / "dense.tar.xz") as archive:
        archive.extractall(path / "checkpoints", filter="data")
    directory = path / "checkpoints" / directory_name(2)
    manifest = Manifest.read(directory)
    (directory / "manifest.json").unlink()
    replace(manifest, run_id=RUN_ID, run_name=path.name, settings=settings).write(directory)
    for rank in range(2):
        window, payload = window_of(rank, settings)
        write_window(path / "windows", window, [memoryview(content) for content in payload])
    return path


def window_of(rank: int, settings: Any) -> tuple[Window, tuple[bytes, ...]]:
    window, payload = sample_window(30, rank)
    first, *others = window.slices
    header = {**first.header, SETTINGS: json.dumps(settings)}
    return replace(window, run_id=RUN_ID, slices=[replace(first, header=header), *others]), payload


@pytest.fixture(autouse=True)
def _vocabulary_of_the_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "vocab_size", engines.VOCAB_SIZE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "a", config_of())


def ask(capsys: pytest.CaptureFixture[str], path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Return the JSON of the tool, with the answers by name. The text must contain the same answers."""
    assert inspect_checkpoint.main(["strategies", str(path), *words]) == code
    text = capsys.readouterr().out
    assert inspect_checkpoint.main(["strategies", str(path), *words, "--json"]) == code
    shown = capsys.readouterr()
    found: dict[str, Any] = json.loads(shown.out)
    assert (found["damage"] is None) == (code == 0)
    assert shown.err == ("" if code == 0 else f"{found['damage']}\n")
    for use in found["uses"]:
        (line,) = (line for line in text.splitlines() if line.split()[0] == use["name"])
        assert line.split(maxsplit=2)[1:] == ["yes" if use["is_possible"] else "no", use["reason"]]
    found["uses"] = {use["name"]: use for use in found["uses"]}
    wanted = [*(each.name for each in STRATEGIES if each.name != "start_over"), *STARTS]
    assert list(found["uses"]) == wanted
    return found


def possible(found: dict[str, Any]) -> list[str]:
    return [name for name, use in found["uses"].items() if use["is_possible"]]


def test_a_checkpoint_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, run / "checkpoints" / directory_name(2))
    assert possible(found) == ["checkpoint", *STARTS]
    uses = found["uses"]
    assert uses["checkpoint"]["reason"] == "any number of ranks load it, and continue after iteration 2"
    assert uses["living_state"]["reason"] == "uses the state of running ranks, and loads no files"
    assert "loads windows in the memory of nodes, and this is a dense" in uses["localized_replay"]["reason"]
    assert "and this is a dense checkpoint" in uses["rollback"]["reason"]
    assert found["notes"] == [f"answers are for the next job of the run {run}"]


def test_a_whole_window(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved window can be loaded, even if the job captures no windows any more."""
    found = ask(capsys, run / "windows" / sample_name(30))
    assert possible(found) == ["rollback"]
    assert found["uses"]["rollback"]["reason"] == "2 ranks load it, and run iterations 31 to 31 again"
    assert "this is a window on storage" in found["uses"]["localized_replay"]["reason"]
    assert "convert_checkpoint from-window writes" in found["uses"]["checkpoint.load_weights"]["reason"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_without_the_part_of_a_node(rank: int, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = run / "windows" / sample_name(30) / f"rank-{rank:05d}.window"
    missing.unlink()
    found = ask(capsys, missing.parent, code=5)
    assert possible(found) == [] and str(missing) in found["damage"]
    assert found["uses"]["rollback"]["reason"].startswith(f"damaged: {missing}: ")
    assert found["uses"]["living_state"]["reason"] == "uses the state of running ranks, and loads no files"


def test_a_window_that_leaves_out_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a run, only the window itself counts."""
    for rank in range(2):
        write_history(tmp_path / "windows", rank)
    whole, partial = (ask(capsys, tmp_path / "windows" / f"window_00000{number}") for number in (10, 13))
    assert whole["uses"]["rollback"]["reason"] == "2 ranks load it, and continue after iteration 10"
    assert possible(partial) == ["rollback"] and partial["notes"] == []
    reason = partial["uses"]["rollback"]["reason"]
    assert reason.endswith("after iteration 13; the newest updates of experts that it leaves out are lost")
    (tmp_path / "windows" / "window_0000010" / "rank-00001.window").unlink()
    broken = ask(capsys, tmp_path / "windows" / "window_0000013", code=5)
    assert possible(broken) == [] and "window_0000010" in broken["damage"], "it has pieces of the newer window"


def other_job(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        shutil.rmtree(run)
        make_run(run, config_of(**changes), of=config_of())

    return change


def reject(run: Path) -> None:
    settings = settings_of(config_of(), data_fingerprint="", vocab_size=resolve_vocab_size(config_of()))
    parts = [window_digest([window_of(rank, settings)[0].to_bytes().decode()]) for rank in range(2)]
    window = RejectedWindow(start_iteration=30, generation=0, digest=window_digest(parts), reason="another loss")
    window.add_to(run)


def other_run(run: Path) -> None:
    (run / "run_id.json").write_text(json.dumps({"run_id": "cd" * 16, "is_older": False}))


DIFFERENT: dict[str, tuple[Callable[[Path], None], str | None, str | None]] = {
    "another learning rate": (other_job(**{"optimizer.lr": 0.5}), "optimizer.lr", "optimizer.lr"),
    "another model": (other_job(**{"model.hidden_size": 16}), "model.hidden_size", "model.hidden_size"),
    "three ranks": (other_job(**{"launch.num_nodes": 3}), None, "captured by 2 ranks, and the job has 3"),
    "another run": (other_run, "belongs to another run", "belongs to another run"),
    "a rejected window": (reject, None, "was rejected by an earlier start of the run: another loss"),
}
"""Change of a run; what the answers about its checkpoint and its window then name, or None if nothing changes."""


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_next_job_of_the_run_decides(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, of_checkpoint, of_window = DIFFERENT[name]
    change(run)
    dense = ask(capsys, run / "checkpoints" / directory_name(2))["uses"]["checkpoint"]
    window = ask(capsys, run / "windows" / sample_name(30))["uses"]["rollback"]
    for use, text in ((dense, of_checkpoint), (window, of_window)):
        assert use["is_possible"] == (text is None)
        assert text is None or text in use["reason"]


def test_the_run_can_be_another_one(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with other tensors can take neither the whole state nor the weights."""
    other = make_run(
        tmp_path / "runs" / "b", config_of(**{"model.ffn_hidden_size": 8, "model.moe_ffn_hidden_size": 16})
    )
    path = run / "checkpoints" / directory_name(2)
    assert possible(ask(capsys, path)) == ["checkpoint", *STARTS]
    found = ask(capsys, path, "--run", str(other))
    assert possible(found) == []
    for key in STARTS:
        assert "model.moe_ffn_hidden_size" in found["uses"][key]["reason"]
    assert inspect_checkpoint.main(["strategies", str(path), "--run", str(tmp_path)]) == 3
    assert "must contain the configuration of a run" in capsys.readouterr().err


def test_a_strategy_that_the_job_may_not_choose_is_left_to_the_user(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run)
    make_run(run, config_of(**{"recovery.strategies": ["checkpoint"]}))
    window = ask(capsys, run / "windows" / sample_name(30))["uses"]["rollback"]
    assert window["is_possible"]
    assert window["reason"].endswith("only if a user starts the job again (recovery.strategies=[checkpoint])")
    dense = ask(capsys, run / "checkpoints" / directory_name(2))["uses"]["checkpoint"]
    assert "only if" not in dense["reason"]


def test_weights_a_renamed_checkpoint_and_a_hugging_face_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / directory_name(2)
    write_folder(tmp_path / "hf")
    assert convert_checkpoint.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "weights")]) == 0
    capsys.readouterr()
    weights = ask(capsys, tmp_path / "weights")
    assert possible(weights) == ["checkpoint.load_weights"]
    assert weights["uses"]["checkpoint"]["reason"] == "contains only weights, without optimizer state"
    assert weights["uses"]["checkpoint.load"]["reason"].startswith("contains only weights; set checkpoint.load_weights")
    renamed = ask(capsys, path.rename(path.with_name(directory_name(7))))
    assert "contains iteration 2, not 7 as in its name" in renamed["uses"]["checkpoint"]["reason"]
    folder = ask(capsys, tmp_path / "hf")
    assert possible(folder) == []
    assert "convert_checkpoint from-hf writes a checkpoint" in folder["uses"]["checkpoint.load_weights"]["reason"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "manifest.json"])
def test_a_damaged_checkpoint(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / directory_name(2)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    found = ask(capsys, path, code=5)
    assert possible(found) == [] and name in found["damage"]
    for use in ("checkpoint", *STARTS):
        assert found["uses"][use]["reason"] == f"damaged: {found['damage']}"


def test_other_folders_have_no_answer(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / directory_name(2)
    (path / "manifest.json").unlink()
    for other, message in ((path, "is incomplete"), (run, "is the folder of a run"), (tmp_path / "no", "must be a")):
        assert inspect_checkpoint.main(["strategies", str(other)]) == 5
        shown = capsys.readouterr()
        assert message in shown.err and shown.out == ""
    assert DenseReader.open(path.rename(tmp_path / "theirs"), trust=True).manifest is None
    found = ask(capsys, tmp_path / "theirs", "--trust")
    assert "has no manifest of this project" in found["uses"]["checkpoint"]["reason"]
    assert possible(found) == list(STARTS)
    assert found["uses"]["checkpoint.load_weights"]["reason"].endswith("with checkpoint.trust=true")
