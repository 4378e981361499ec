"""Tests the experts of a rank with any set of experts: names, holders, and which copy is saved."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_ft.mcore import versions
from megatron_ft.mcore.model.transformer_config import build_transformer_config
from megatron_ft.mcore.moe.replica_layer import _ReplicaExperts
from megatron_ft.testing import engines
from tests.helpers import mixtures

METADATA = {"singleton_local_shards": True, "dp_cp_group": None}


@pytest.fixture
def parts() -> Iterator[tuple[Any, Any, Any]]:
    """Return (Megatron's configuration, the submodules of experts, process groups)."""
    job = engines.micro_config()
    with engines.groups_of(job) as groups:
        config = build_transformer_config(job, "local")
        yield config, versions.submodules_of(mixtures.submodules_of(config).experts), groups.pg_collection


def of_rank(parts: tuple[Any, Any, Any], rank: int) -> _ReplicaExperts:
    """Build experts 1 and 3. Ranks 0, 1 and 2 have expert 1, and only this rank has expert 3."""
    config, submodules, pg_collection = parts
    return _ReplicaExperts(
        config, submodules, expert_ids=[1, 3], holders=[[0, 1, 2], [rank]], rank=rank, pg_collection=pg_collection
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_expert_counts_on_its_first_holder(parts: tuple[Any, Any, Any], rank: int) -> None:
    shared, own = of_rank(parts, rank).local_experts
    assert {p.shared for p in shared.parameters()} == {rank > 0}
    assert {p.shared for p in own.parameters()} == {False}


@pytest.mark.parametrize("rank", [0, 2])
def test_copies_are_saved_as_replicas_of_one_tensor(parts: tuple[Any, Any, Any], rank: int) -> None:
    """Keys and shapes are those that Megatron gives experts 1 and 3. Only the first copy is written."""
    config, submodules, pg_collection = parts
    metadata = {**METADATA, "dp_cp_group": pg_collection.dp_cp}
    megatron = SequentialMLP(4, config, submodules, pg_collection=pg_collection)
    expected = megatron.sharded_state_dict("mlp.experts.", (), metadata)
    found = of_rank(parts, rank).sharded_state_dict("mlp.experts.", (), metadata)
    theirs = {tensor.key: tensor for tensor in expected.values()}
    mine = {tensor.key: tensor for tensor in found.values()}
    assert mine.keys() == {key for key in theirs if ".1." in key or ".3." in key} and len(mine) == 8
    for key, tensor in mine.items():
        for name in ("global_shape", "global_offset"):
            assert getattr(tensor, name, None) == getattr(theirs[key], name, None), key
        assert tensor.replica_id[:2] == theirs[key].replica_id[:2]
        assert tensor.replica_id[2] == (rank if ".1." in key else 0)


def test_experts_can_be_parts_of_one_tensor_as_in_checkpoints_of_megatron(parts: tuple[Any, Any, Any]) -> None:
    config, submodules, pg_collection = parts
    metadata = {**METADATA, "singleton_local_shards": False, "dp_cp_group": pg_collection.dp_cp}
    megatron = SequentialMLP(4, config, submodules, pg_collection=pg_collection)
    expected = megatron.sharded_state_dict("mlp.experts.", (), metadata)
    found = of_rank(parts, 0).sharded_state_dict("mlp.experts.", (), metadata)

    def places(state: Any) -> set[tuple[Any, ...]]:
        return {(part.key, part.global_shape, part.global_offset) for each in state.values() for part in _built(each)}

    assert places(found) < places(expected) and len(places(found)) == 10, "two of four experts"


def _built(shard: Any) -> list[Any]:
    return list(shard.build()) if hasattr(shard, "build") else [shard]


def test_an_expert_without_rows_gets_a_zero_gradient(parts: tuple[Any, Any, Any]) -> None:
    """The gradient must exist, because the gradients of other copies are added to it."""
    experts = of_rank(parts, 0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    outputs, bias = experts(torch.randn(5, 32).split([0, 5]), torch.tensor([0, 5]))
    torch.cat(outputs).sum().backward()
    assert bias is None
    idle, busy = experts.local_experts
    assert all(p.grad is not None and not p.grad.any() for p in idle.parameters())
    assert all(p.grad is not None and p.grad.any() for p in busy.parameters())


def test_eight_bit_types_get_whole_multiples_of_rows(parts: tuple[Any, Any, Any]) -> None:
    """The padding is removed again and has no gradient."""
    experts, seen = of_rank(parts, 0), []
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    rows = torch.randn(8, 32, requires_grad=True)
    plain = torch.cat(experts(rows.split([3, 5]), torch.tensor([3, 5]))[0])
    (expected,) = torch.autograd.grad(plain.sum(), rows)
    experts.config.fp8, experts.config.fp8_recipe = "hybrid", "delayed"
    for expert in experts.local_experts:
        expert.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    padded = torch.cat(experts(rows.split([3, 5]), torch.tensor([3, 5]))[0])
    (found,) = torch.autograd.grad(padded.sum(), rows)
    assert seen == [16, 16]
    torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
