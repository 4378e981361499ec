"""What a rank finds out only when it knows its device."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.loop import elastic

LOSE = "lose(nodes=[1],before_iteration=5)"


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ({"min_nodes": 1}, r"launch\.min_nodes=1"),
        ({"max_nodes": 3}, r"launch\.max_nodes=3"),
        ({"num_spare_nodes": 1}, r"launch\.num_spare_nodes=1"),
        ({"keep_layout": True}, r"launch\.keep_layout=true"),
        ({"membership_schedule": [LOSE]}, r"launch\.membership_schedule=\['lose"),
    ],
    ids=str,
)
def test_no_rank_is_lost_on_a_device_whose_connections_stay(launch: dict[str, Any], why: str) -> None:
    job = from_dict({"launch": {"num_nodes": 2, **launch}})
    trainer = SimpleNamespace(job=job, engine=SimpleNamespace(iteration=0), device=SimpleNamespace(type="cuda"))
    with pytest.raises(ConfigError, match=rf"^{why}.*: must be left out on cuda"):
        elastic._check(trainer, SimpleNamespace(next=None))  # type: ignore[arg-type]
