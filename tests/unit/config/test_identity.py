"""Tests the identity of a job, and messages about differences."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_ft.config.identity import Difference, JobIdentity, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.serde import parse_json


def settings(fingerprint: str = "f", vocab_size: int = 384, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of the default job with some keys changed, by group."""
    config = JobConfig()
    for group, values in changes.items():
        config = replace(config, **{group: replace(getattr(config, group), **values)})
    return settings_of(config, data_fingerprint=fingerprint, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("group", "key", "value", "concern"),
    [
        ("model", "hidden_size", 256, "model"),
        ("model", "moe_router_topk", 1, "model"),
        ("model", "hidden_dropout", 0.1, "model"),
        ("model", "moe_aux_loss_coeff", 0.02, "model"),
        ("training", "seed", 2, "model"),
        ("optimizer", "adam_beta2", 0.99, "optimizer"),
        ("optimizer", "weight_decay", 0.0, "optimizer"),
        ("precision", "params_dtype", "bf16", "optimizer"),
        ("parallel", "use_distributed_optimizer", False, "optimizer"),
        ("optimizer", "lr", 0.002, "schedule"),
        ("optimizer", "min_lr", 0.0, "schedule"),
        ("optimizer", "lr_decay_style", "linear", "schedule"),
        ("training", "global_batch_size", 32, "schedule"),
    ],
)
def test_what_changes_what_is_computed_is_named(group: str, key: str, value: object, concern: str) -> None:
    (found,) = Difference.between(settings(), settings(**{group: {key: value}}))
    assert (found.concern, found.key, found.present) == (concern, f"{group}.{key}", value)
    assert str(found).startswith(f"{group}.{key}: was ") and ", now " in str(found)


@pytest.mark.parametrize(
    ("group", "values"),
    [
        ("parallel", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
        ("parallel", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        ("launch", {"num_nodes": 3, "ranks_per_node": 2}),
        ("placement", {"num_slots_per_rank": 4, "algorithm": {"_target_": "x.Y"}}),
        ("snapshot", {"num_peer_copies": 0}),
        ("checkpoint", {"save_interval_iterations": 7}),
        ("telemetry", {"log_interval_iterations": 7}),
        ("training", {"micro_batch_size": 1, "exit_at_iteration": 3, "eval_iterations": 1, "num_threads": 2}),
        ("training", {"loss_spike_policy": "skip", "non_finite_policy": "skip", "max_consecutive_skips": 3}),
        ("training", {"device": "cpu", "transformer_impl": "local", "recompute_granularity": "full"}),
        ("model", {"name": "other", "published_parameters": 3}),
        ("data", {"cache_dir": "elsewhere", "mmap": False, "train": ["moved"]}),
    ],
)
def test_layout_reports_and_places_may_differ(group: str, values: dict[str, Any]) -> None:
    assert Difference.between(settings(), settings(**{group: values})) == []


def test_other_data_is_named_by_its_keys_or_by_its_tokens() -> None:
    (seed,) = Difference.between(settings(), settings("other", data={"seed": 9}))
    assert (seed.concern, seed.key, seed.stored, seed.present) == ("data", "data.seed", 1234, 9)
    (tokens,) = Difference.between(settings(), settings("other"))
    assert tokens.key == "data.fingerprint" and "the files contain different tokens" in str(tokens)
    length = Difference.between(settings(), settings("other", model={"seq_length": 64}))
    assert {(found.concern, found.key) for found in length} == {
        ("data", "model.seq_length"),
        ("model", "model.seq_length"),
    }


def test_a_longer_run_keeps_its_schedule_only_if_the_key_is_set() -> None:
    """By default the learning rate decays until the end of the run, so a longer run would have another learning rate in
    every iteration."""
    (found,) = Difference.between(settings(), settings(training={"train_iterations": 100}))
    assert (found.key, found.stored, found.present) == ("optimizer.lr_decay_iterations", 60, 100)
    assert "set optimizer.lr_decay_iterations=60 to keep the earlier value" in str(found)
    kept = settings(training={"train_iterations": 100}, optimizer={"lr_decay_iterations": 60})
    assert Difference.between(settings(), kept) == []
    constant = {"lr_decay_style": "constant"}
    longer = settings(training={"train_iterations": 100}, optimizer=constant)
    assert Difference.between(settings(optimizer=constant), longer) == []


def test_a_key_that_came_later_counts_as_null() -> None:
    older = settings()
    del older["model"]["model.kv_channels"], older["model"]["model.hidden_size"]
    (found,) = Difference.between(older, settings())
    assert (found.key, found.stored, found.present) == ("model.hidden_size", None, 128)


def test_settings_survive_json() -> None:
    import json

    assert Difference.between(parse_json(json.dumps(settings())), settings()) == []


def test_files_belong_to_the_run_with_their_id() -> None:
    job = JobIdentity(run_id="a" * 32, run_name="first", settings={})
    assert job.not_of_run(run_id="a" * 32, run_name="renamed", format_version=2) is None
    other = job.not_of_run(run_id="b" * 32, run_name="first", format_version=2)
    assert other is not None and other.startswith("belongs to another run, first (b")
    assert "format 1" in str(job.not_of_run(run_id="first", run_name="first", format_version=1))
    older = replace(job, takes_format_1=True)
    assert older.not_of_run(run_id="first", run_name="first", format_version=1) is None
    assert "another run, second" in str(older.not_of_run(run_id="second", run_name="second", format_version=1))
