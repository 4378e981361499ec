"""Tests limits of the upstream log, and jobs whose stages cannot replay with the same bits."""

from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError

KEEP = {
    "recovery.keep_layout": True,
    "nodes.num_spare_nodes": 1,
    "snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"},
}
PP2 = {"parallel.pipeline_model_parallel_size": 2}
TIED = {"model.untie_embeddings_and_output_weights": False}
DELAYED = {"precision.fp8": "hybrid", "precision.fp8_recipe": "delayed"}


def job(changes: dict[str, Any]) -> JobConfig:
    """Return four nodes of one rank, with dotted keys changed."""
    values: dict[str, Any] = {"launch": {"num_nodes": 4, "ranks_per_node": 1}}
    for key, value in changes.items():
        group, name = key.split(".")
        values.setdefault(group, {})[name] = value
    return from_dict(values)


@pytest.mark.parametrize(
    "changes",
    [
        {"upstream_log.commit_lag_iterations": 0, "upstream_log.memory_limit_bytes": 1},
        KEEP | PP2,
        KEEP | TIED,
        PP2 | TIED,
        {"training.deterministic": False},
        KEEP | PP2 | {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
        KEEP | PP2 | {"precision.params_dtype": "fp16"},
        KEEP | PP2 | DELAYED,
        KEEP | PP2 | TIED | {"recovery.keep_processes": False, "recovery.max_restarts": 1},
    ],
    ids=str,
)
def test_what_can_be_repeated_passes(changes: dict[str, Any]) -> None:
    """Dropout and delayed scaling are accepted because windows contain the generators and the histories; so are tied
    embeddings on one stage."""
    validate(job(changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"upstream_log.commit_lag_iterations": -1}, r"upstream_log\.commit_lag_iterations=-1: must be at least 0"),
        ({"upstream_log.memory_limit_bytes": 0}, r"upstream_log\.memory_limit_bytes=0: must be at least 1"),
        (KEEP | PP2 | TIED, r"model\.untie_embeddings_and_output_weights=false: must be true.*parallel_size=2"),
        (KEEP | {"training.deterministic": False}, r"training\.deterministic=false: must be true.*keep_layout"),
    ],
    ids=["lag", "limit", "tied", "not deterministic"],
)
def test_what_cannot_be_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        validate(job(changes))
