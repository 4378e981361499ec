"""Tests the errors for wrong keys, groups and flags."""

from pathlib import Path
from typing import Any

import pytest

import pretrain_moe
from megatron_ft.config.overrides import check_override, flag_error, group_options, override_words
from megatron_ft.config.serialize import to_dict
from megatron_ft.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("modle.num_layers", 3, "modle.num_layers=3.*did you mean 'model.num_layers'"),
        ("train_iterations", 3, "did you mean 'training.train_iterations'"),
        ("model", "mixtral", "must be one of.*did you mean 'mixtral_8x7b'"),
        ("hydra.run.dir", "x", "not a known key"),
    ],
)
def test_close_matches_are_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_override(key, value, CONF, deletes=False, sweeps=False)


def test_known_keys_and_options_pass() -> None:
    check_override("model.num_layers", 3, CONF, deletes=False, sweeps=False)
    check_override("model", "moe_micro", CONF, deletes=False, sweeps=False)
    check_override("experiment", None, CONF, deletes=False, sweeps=False)


def test_sweeps_and_deletions_are_refused() -> None:
    with pytest.raises(ConfigError, match="add --multirun"):
        check_override("model.num_layers", "1,2", CONF, deletes=False, sweeps=True)
    with pytest.raises(ConfigError, match="must not be deleted"):
        check_override("model.num_layers", None, CONF, deletes=True, sweeps=False)


def test_flags_are_translated() -> None:
    assert "model.num_layers=12" in str(flag_error("--num-layers=12"))
    assert "--help" in str(flag_error("--nonsense"))


def test_every_group_has_an_option() -> None:
    assert all(group_options(CONF).values())


TEXTS = (
    "",
    " ",
    *(
        "plain",
        "/a/b-c.d/e_f",
        "null",
        "True",
        "inf",
        "12",
        "1e5",
        "a,b",
        "[a]",
        "{a:b}",
        "a=b",
        "key:x",
        "x\ty",
        "é中",
    ),
    *("~x", "$x", "(x)", "#x", "%", "@", "*", "!"),
    *("a b", "'", '"', "it's", 'say "x"', "\\", '\\"', '\\\\"x\\'),
)


def test_a_configuration_can_be_written_as_words() -> None:
    default, wanted = (to_dict(pretrain_moe.compose([])[0]) for _ in range(2))
    changes = {
        "data": {"train": list(TEXTS), "train_weights": [0.1, 1e-7, 3.0], "mmap": False, "cache_dir": "x y"},
        "optimizer": {"lr": 1.2345678901234567e-05, "lr_warmup_iterations": 0, "min_lr": 0.0},
        "model": {"num_moe_experts": None, "name": "null"},
        "snapshot": {"policy": {"_target_": "a.b.C", "order": {"_target_": "a.D", "decay": 0.5}, "names": ["x", "1"]}},
        "run": {"dir": '/a b/"c"', "name": "first"},
    }
    for group, values in changes.items():
        wanted[group] |= values
    words = override_words(default, wanted, always=("launch.mode",))
    assert to_dict(pretrain_moe.compose(words)[0]) == wanted
    assert [word.partition("=")[0] for word in words].count("launch.mode") == 1
    assert override_words(default, default) == []
