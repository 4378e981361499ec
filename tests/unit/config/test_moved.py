"""Tests moved keys: the error for an old key names the new one, and a recorded ``config.yaml`` with old keys can be
read."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain_moe
from megatron_ft.config.job import JobConfig
from megatron_ft.config.moved import MOVED, with_present_keys
from megatron_ft.config.overrides import _known_keys, flag_error
from megatron_ft.config.requirements import value_of
from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError
from tools import inject_failures
from tools.can_recover import read_config

RECORDED = Path(__file__).parents[2] / "fixtures" / "configurations" / "launch_group.yaml"
"""``config.yaml`` of a run of the version before keys of ``launch`` were moved."""


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        pretrain_moe.compose(list(overrides))
    return str(caught.value)


def test_present_keys_exist_and_old_ones_do_not() -> None:
    assert set(MOVED.values()) <= _known_keys().keys() and not MOVED.keys() & _known_keys().keys()
    assert len(set(MOVED.values())) == len(MOVED)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_key_is_answered_with_the_present_one(old: str, new: str) -> None:
    assert refusal("training.train_iterations=3", f"{old}=7") == f"{old}=7: is now {new}; write {new}=7"
    assert refusal(f"+{old}=7") == refusal(f"++{old}=7") == refusal(f"{old}=7")


def test_the_command_names_all_old_keys_and_quotes_for_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    fault = 'launch.failpoints=["kill(rank=1)"]'
    assert pretrain_moe.main(["launch.interface=lo", fault, "dry_run=true"]) == ConfigError.exit_code
    assert capsys.readouterr().err.splitlines() == [
        "error: launch.interface=lo: is now control.interface; write control.interface=lo",
        f"error: {fault}: is now testing.failpoints; write 'testing.failpoints=[\"kill(rank=1)\"]'",
    ]


def test_old_keys_in_files_and_mappings_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "launch.min_nodes=2: is now recovery.min_nodes"
    assert refusal("launch={min_nodes: 2}") == answer
    experiment = tmp_path / "conf" / "experiment" / "mine.yaml"
    (tmp_path / "conf").mkdir()
    for path in pretrain_moe.CONF.rglob("*.yaml"):
        copy = tmp_path / "conf" / path.relative_to(pretrain_moe.CONF)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    experiment.write_text("# @package _global_\nlaunch:\n  min_nodes: 2\n")
    monkeypatch.setattr(pretrain_moe, "CONF", tmp_path / "conf")
    assert refusal("experiment=mine") == answer.replace("=2", "=(in a file under conf/)")


def test_flags_with_old_names_are_translated() -> None:
    assert "recovery.min_nodes=2" in str(flag_error("--min-nodes=2"))
    assert "recovery.reconfigure_timeout_seconds=9" in str(flag_error("--reform-timeout-seconds=9"))


@pytest.mark.parametrize(("key", "match"), [("launch.min_node", "recovery.min_nodes"), ("launch.modes", "launch.mode")])
def test_unknown_keys_get_close_matches(key: str, match: str) -> None:
    assert re.search(rf"{key}=2: is not a known key; did you mean .*'{match}'", refusal(f"{key}=2"))


def test_a_recorded_configuration_is_read() -> None:
    recorded = yaml.safe_load(RECORDED.read_text())
    former = {old: recorded["launch"][old.partition(".")[2]] for old in MOVED}
    config, default = read_config(RECORDED), JobConfig()
    assert {old: value_of(config, new) for old, new in MOVED.items()} == former
    unchanged = {old for old, new in MOVED.items() if value_of(default, new) == former[old]}
    assert unchanged == {
        "launch.interface",
        "launch.tls_dir",
        "launch.keep_layout",
        "launch.failure_domain_source",
        "launch.gpu_memory_bytes",
        "launch.membership_schedule",
    }, "all other keys have values that no default hides"


def test_a_recorded_configuration_gives_the_injector_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(RECORDED.read_text())
    expected = {"ranks_per_node": 1, "num_nodes": 2, "num_spare_nodes": 1, "max_nodes": 4}
    assert inject_failures._launch(tmp_path) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"launch": {"min_nodes": 1}, "recovery": {"min_nodes": 2}}, "launch.min_nodes=1: is now recovery.min_nodes, "),
        ({"launch": {"min_nodes": 1}, "recovery": 3}, "launch.min_nodes=1: is now recovery.min_nodes, "),
        ({"launch": {"min_node": 1}}, "launch.min_node=1: is not a known key"),
        ({"launch": 3}, "launch=3: must be a mapping"),
        ("text", "must be a mapping"),
    ],
)
def test_a_file_that_no_version_wrote_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_dict(with_present_keys(values))


def test_present_keys_stay_and_the_input_is_not_changed() -> None:
    values = {"launch": {"num_nodes": 2, "min_nodes": 1}, "dry_run": True}
    assert with_present_keys(values) == {"launch": {"num_nodes": 2}, "recovery": {"min_nodes": 1}, "dry_run": True}
    assert values["launch"] == {"num_nodes": 2, "min_nodes": 1}
