"""Tests that all independent errors of a command are found, and that consequences of an error are left out."""

from pathlib import Path
from unittest import mock

import pytest

import pretrain_moe
from megatron_ft.config.checks.primitives import at_least, require
from megatron_ft.config.findings import Findings, find_errors, keys_in
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import validate
from megatron_ft.errors import CheckpointError, ConfigError, DataError, SeveralErrors

MODEL = ("model=moe_micro", "training.device=cpu")


def test_keys_are_those_of_the_configuration() -> None:
    error = ConfigError(
        "model.num_layers=3: must fit parallel.pipeline_model_parallel_size=2 (model.bin, data.train[0])"
    )
    assert keys_in(error) == ["model.num_layers", "parallel.pipeline_model_parallel_size", "data.train"]


def test_an_error_about_a_key_at_fault_is_left_out() -> None:
    found = Findings()
    found.add(ConfigError.of("model.num_moe_experts", 0, "must be at least 1"))
    found.add(ConfigError.of("model.moe_router_topk", 2, "must be from 1 to model.num_moe_experts=0"))
    found.add(ConfigError.of("optimizer.lr", 0, "must be greater than 0"))
    assert [keys_in(error)[0] for error in found.errors] == ["model.num_moe_experts", "optimizer.lr"]


def test_a_group_at_fault_covers_its_keys() -> None:
    found = Findings()
    found.blame(["model"])
    found.add(ConfigError.of("model.num_layers", 0, "must be at least 1"))
    assert not found


def test_one_error_is_raised_as_it_is_and_several_with_the_code_of_the_first() -> None:
    found = Findings()
    found.raise_errors()
    found.add(DataError("data.train[0]=a: no such file"), at_fault=())
    with pytest.raises(DataError) as single:
        found.raise_errors()
    assert single.value.exit_code == 3
    found.add(CheckpointError("checkpoint.load=b: no such file"))
    found.add(DataError("data.train[0]=a: no such file"), at_fault=())  # the same error once more
    with pytest.raises(SeveralErrors) as several:
        found.raise_errors()
    assert several.value.exit_code == 3 and len(several.value.errors) == 2
    assert str(several.value).splitlines() == ["data.train[0]=a: no such file", "checkpoint.load=b: no such file"]


def test_errors_of_one_check_are_all_found() -> None:
    def check(config: JobConfig) -> None:
        at_least(1, "model.num_layers", config.model.num_layers)
        at_least(1, "model.seq_length", config.model.seq_length)
        require(1000 % config.model.num_layers == 0, "training.seed", 1234, "must not divide by 0")

    found = Findings()
    repaired = find_errors(from_dict({"model": {"num_layers": 0, "seq_length": 0}}), [check], found)
    assert [str(error) for error in found.errors] == [
        "model.num_layers=0: must be at least 1",
        "model.seq_length=0: must be at least 1",
    ]
    assert (repaired.model.num_layers, repaired.model.seq_length) == (4, 128)


def test_the_key_that_is_blamed_is_the_one_whose_default_helps() -> None:
    """EP=3 does not divide 16 experts. The number of experts stays, so that the other error names it correctly."""
    values = {"model": {"num_moe_experts": 16, "moe_router_topk": 17}, "launch": {"ranks_per_node": 3}}
    with pytest.raises(SeveralErrors) as caught:
        validate(from_dict({**values, "parallel": {"expert_model_parallel_size": 3}}))
    assert str(caught.value).splitlines() == [
        "model.moe_router_topk=17: must be from 1 to model.num_moe_experts=16",
        "parallel.expert_model_parallel_size=3: must divide model.num_moe_experts=16",
    ]


COMBINATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "misspelled keys and values of wrong types": (
        ("modle.num_layers=3", "training.seed=abc", "data.tran=[x]", "optimizer.lr=fast"),
        ("modle.num_layers=3", "training.seed=abc", "data.tran=", "optimizer.lr=fast"),
    ),
    "values of three groups": (
        ("model.num_layers=0", "training.micro_batch_size=0", "optimizer.lr=-1"),
        ("model.num_layers=0", "training.micro_batch_size=0", "optimizer.lr=-1"),
    ),
    "a value, data, a checkpoint, an address and certificates": (
        (
            *("model.moe_router_topk=9", "data.train=[/nope,/gone]", "checkpoint.load=/nope"),
            *("control.interface=203.0.113.7", "control.tls_dir=/x"),
        ),
        (
            *("model.moe_router_topk=9", "data.train[0]=/nope", "data.train[1]=/gone", "checkpoint.load=/nope"),
            *("control.interface=203.0.113.7", "control.tls_dir=/x"),
        ),
    ),
    "an unknown option does not hide the rest": (
        ("model=mixtrl", "data.train=[/nope]", "optimizer.lr=0"),
        ("model=mixtrl", "optimizer.lr=0", "data.train[0]=/nope"),
    ),
    "an unknown experiment hides what it may have set": (
        ("experiment=gone", "optimizer.lr=0", "modle.x=3"),
        ("experiment=gone", "modle.x=3"),
    ),
    "a device that refuses a recovery makes its other requirements pointless": (
        ("dry_run=true", "experiment=mixtral_slurm", "training.device=cuda", "recovery.min_nodes=6"),
        ("training.device=cuda: must be cpu with recovery.min_nodes=6",),
    ),
    "flags and misspelled keys": (
        ("--num-layers=3", "model.hidden_sizee=4"),
        ("--num-layers=3", "model.hidden_sizee=4"),
    ),
    "a root cause without what follows from it": (
        ("model.num_moe_experts=0", "placement=overlap_search", "launch.num_nodes=2"),
        ("model.num_moe_experts=0",),
    ),
    "a misspelled key without what follows from it": (
        ("model.num_moe_expert=16", "launch.ranks_per_node=16", "parallel.expert_model_parallel_size=16"),
        ("model.num_moe_expert=16",),
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_command_lists_all_its_errors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, beginnings = COMBINATIONS[name]
    with mock.patch("megatron_ft.control.launcher.launch", side_effect=AssertionError("ranks would start")):
        assert pretrain_moe.main([*(() if "experiment=mixtral_slurm" in words else MODEL), *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == len(beginnings), lines
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"error: {beginning}"), line
    assert list(tmp_path.iterdir()) == []


def test_memory_is_stated_in_readable_units_without_advice_that_is_followed_already(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["dry_run=true", "model=mixtral_8x7b", "training.device=cuda", "limits.gpu_memory_bytes=80000000000"]
    assert pretrain_moe.main(words) == 2
    assert "(1.1 TiB instead of 74.5 GiB)" in (text := capsys.readouterr().err)
    assert "training.recompute_granularity=full" in text and "micro_batch_size" in text
    assert pretrain_moe.main([*words, "training.recompute_granularity=full", "training.micro_batch_size=1"]) == 2
    text = capsys.readouterr().err
    assert "recompute" not in text and "micro_batch_size" not in text and "parallel.pipeline" in text
