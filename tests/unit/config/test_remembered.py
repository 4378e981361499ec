"""Tests the configuration with which a run continues."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import yaml

import pretrain_moe
from megatron_ft.config.job import JobConfig
from megatron_ft.config.remembered import (
    changes,
    check_allowed,
    check_names,
    continued,
    given_values,
    with_given_values,
)
from megatron_ft.config.serialize import to_dict
from megatron_ft.control import rundir
from megatron_ft.control.rundir import RunDir, RunId, read_run_config
from megatron_ft.errors import ConfigError


def composed(*overrides: str) -> JobConfig:
    return pretrain_moe.compose(list(overrides))[0]


def go_on(recorded: tuple[str, ...], *overrides: str) -> JobConfig:
    """Return the configuration of a job with ``overrides`` in a run whose newest job had ``recorded``."""
    named = [word.partition("=")[0].lstrip("+") for word in overrides]
    return continued(composed(*recorded), composed(*overrides), composed(), named)


def test_keys_that_are_not_given_are_remembered() -> None:
    recorded = ("model=moe_micro", "optimizer.lr=0.5", "launch.num_nodes=3", "snapshot=sparse_window")
    now = go_on(recorded, "run.name=a", "run.resume=must")
    assert dataclasses.replace(now, run=JobConfig().run) == composed(*recorded)
    assert (now.run.name, now.run.resume) == ("a", "must")


def test_given_keys_and_groups_replace_remembered_ones() -> None:
    recorded = ("model=moe_micro", "optimizer.lr=0.5", "snapshot=sparse_window", "parallel=ep2", "precision=bf16")
    now = go_on(recorded, "snapshot=none", "optimizer.lr=0.001", "parallel.expert_model_parallel_size=1")
    assert now.snapshot == JobConfig().snapshot, "the option of a group replaces the whole group"
    assert now.optimizer.lr == JobConfig().optimizer.lr, "a key can be set to its default"
    assert now.parallel.expert_model_parallel_size == 1
    assert now.precision.params_dtype == "bf16" and now.model.name == "moe_micro"


def test_an_experiment_and_entries_of_mappings_are_applied_on_top() -> None:
    now = go_on(("snapshot=sparse_window", "optimizer.lr=0.5"), "experiment=mixtral_dry_run")
    assert (now.launch.num_nodes, now.model.name, now.optimizer.lr) == (8, "mixtral_8x7b", 0.5)
    before = composed("snapshot=sparse_window").snapshot.policy
    now = go_on(("snapshot=sparse_window",), "snapshot.policy.extra.depth=3")
    assert now.snapshot.policy == {**(before or {}), "extra": {"depth": 3}}


def test_keys_of_one_job_are_not_remembered() -> None:
    recorded = ("training.exit_at_iteration=5", 'testing.failpoints=["kill(rank=0,at_iteration=3)"]', "dry_run=true")
    now = go_on(recorded, "run.name=a")
    assert now.training.exit_at_iteration is None and now.testing.failpoints == [] and not now.dry_run


@pytest.mark.parametrize(
    ("override", "concern"),
    [
        ("optimizer.lr=0.5", "schedule"),
        ("optimizer.weight_decay=0.5", "optimizer"),
        ("data.seed=2", "data"),
        ("model.hidden_dropout=0.5", "model"),
        ("launch.num_nodes=4", None),
        ("parallel=pp2_ep2", None),
        ("training.micro_batch_size=1", None),
    ],
)
def test_changes_have_a_concern(override: str, concern: str | None) -> None:
    found = changes(composed(), composed(override))
    assert found and {change.concern for change in found} == {concern}
    if concern is None:
        assert check_allowed(found, []) == []
        return
    with pytest.raises(ConfigError, match=rf"would change {concern} of the run.*allow_change=\[{found[0].key}\]"):
        check_allowed(found, [])
    assert check_allowed(found, [found[0].key]) == [found[0].key]


@pytest.mark.parametrize(
    "override", ["model.num_layers=6", "parallel.use_distributed_optimizer=false", "precision=bf16"]
)
def test_some_changes_cannot_be_allowed(override: str) -> None:
    found = changes(composed(), composed(override))
    with pytest.raises(ConfigError, match="fits only the earlier value"):
        check_allowed(found, [change.key for change in found])


@pytest.mark.parametrize(
    "override", ["training.global_batch_size=32", "training.rampup_batch_size=[8,8,64]", "training.global_batch_size=8"]
)
def test_the_batch_size_cannot_change_because_samples_would_be_skipped_or_repeated(override: str) -> None:
    found = changes(composed("training.train_samples=960"), composed("training.train_samples=960", override))
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}: .* would skip or repeat samples\. Leave the key out"):
        check_allowed(found, [change.key for change in found])


def test_a_longer_run_keeps_its_schedule_only_if_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.lr_decay_iterations: 60 -> 90.*optimizer.lr_decay_iterations=60"):
        check_allowed(changes(composed(), composed("training.train_iterations=90")), [])
    given = ("optimizer.lr_decay_iterations=60",)
    assert check_allowed(changes(composed(*given), composed(*given, "training.train_iterations=90")), []) == []


def test_keys_that_cease_to_have_an_effect_need_no_permission() -> None:
    found = changes(composed(), composed("optimizer.lr_decay_style=constant"))
    allowed = check_allowed(found, ["optimizer.lr_decay_style"])
    assert set(allowed) == {"optimizer.lr_decay_style", "optimizer.min_lr", "optimizer.lr_decay_iterations"}


def test_only_keys_that_need_permission_can_get_it() -> None:
    check_names(["optimizer.lr", "data.seed", "optimizer.min_lr"], composed("optimizer.lr_decay_style=constant"))
    for key in ("optimizer.lrr", "launch.num_nodes"):
        with pytest.raises(ConfigError, match=f"run.allow_change={key}: must contain only keys"):
            check_names([key], composed())


def test_derived_values_are_derived_again() -> None:
    given, used = composed("optimizer.lr=0.5"), composed("optimizer.lr=0.5", "training.device=cpu")
    text = with_given_values(yaml.safe_dump(to_dict(used)), given, used)
    assert yaml.safe_load(text) == to_dict(used)
    assert given_values(text) == {"training.device": "auto"}
    assert with_given_values("x", given, given) == "x" and given_values("x") == {}


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Create the folder of a run without a checkpoint. Return the overrides that name it."""
    monkeypatch.setattr(pretrain_moe, "_check_resume", lambda *_: None)
    monkeypatch.setattr(rundir, "_has_state", lambda _: True)
    here = [f"run.dir={tmp_path}", "run.name=a"]
    given = composed(*here, "optimizer.lr=0.5", "model=moe_micro")
    used = dataclasses.replace(given, training=dataclasses.replace(given.training, device="cpu"))
    text = with_given_values(yaml.safe_dump(to_dict(used)), given, used)
    RunDir.claim(given.run, model_name="moe_micro", config_yaml=text).release()
    RunId.make(tmp_path / "a", is_older=False)
    return [*here, "run.resume=must"]


def test_a_name_is_enough_to_resume(stopped: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch:
        assert pretrain_moe.main([*stopped, "launch.ranks_per_node=2"]) == 0
    config, text = launch.call_args.args
    assert (config.optimizer.lr, config.model.name, config.launch.ranks_per_node) == (0.5, "moe_micro", 2)
    assert yaml.safe_load(text) == to_dict(config)
    assert (
        "continues with its configuration (config.yaml); changed: launch.ranks_per_node: 1 -> 2"
        in capsys.readouterr().err
    )
    assert read_run_config(tmp_path / "a").training.device == "cpu"
    assert read_run_config(tmp_path / "a", as_given=True).training.device == "auto"


def test_a_change_of_meaning_needs_permission(stopped: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch:
        assert pretrain_moe.main([*stopped, "optimizer.lr=0.25"]) == ConfigError.exit_code
        assert not launch.called
        assert "optimizer.lr: 0.5 -> 0.25" in capsys.readouterr().err
        assert pretrain_moe.main([*stopped, "optimizer.lr=0.25", "run.allow_change=[optimizer.lr]"]) == 0
    config = launch.call_args.args[0]
    assert (config.optimizer.lr, config.run.allow_change) == (0.25, ["optimizer.lr"])


def test_the_launcher_need_not_be_the_same(stopped: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a" / "config.yaml"
    path.write_text(path.read_text().replace("mode: local", "mode: torchrun"))
    with mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch:
        assert pretrain_moe.main(stopped) == 0
    assert launch.call_args.args[0].launch.mode == "local"


def test_a_damaged_configuration_is_refused(
    stopped: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a" / "config.yaml").write_text("model: [")
    assert pretrain_moe.main(stopped) == 3
    assert "must contain the configuration of a run" in capsys.readouterr().err


def test_a_finished_run_has_nothing_to_do(
    stopped: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "a" / "checkpoints" / "iter_0000060"
    saved.mkdir()
    (saved / "manifest.json").write_text("{}")
    with mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch:
        assert pretrain_moe.main(stopped) == 0
        assert not launch.called
        assert "nothing to do: a has trained 60 of 60 iterations" in capsys.readouterr().err
        more = ["training.train_iterations=90", "optimizer.lr_decay_iterations=60"]
        assert pretrain_moe.main([*stopped, *more]) == 0
        assert launch.called
