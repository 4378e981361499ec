"""Tests how experts change places within a rank, and how an engine uses the tensors of another one."""

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ft.planning.placement.migration import Transfer
from megatron_ft.testing import engines


@pytest.mark.parametrize("order", list(permutations((1, 4, 6, 7))), ids=str)
def test_experts_are_sorted_in_place(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ft.mcore.state import tensors

    state: dict[str, Any] = {
        f"decoder.layers.2.mlp.experts.local_experts.{expert}.{kind}": torch.full((2, 3), 10.0 * expert + number)
        for expert in order
        for number, kind in enumerate(("weight", "weight/exp_avg"))
    }
    monkeypatch.setattr(tensors, "distinct_state", lambda *_: iter(state.items()))
    addresses = [tensor.data_ptr() for tensor in state.values()]
    tensors.ExpertPlaces([], None).sort(3, order)  # type: ignore[arg-type]
    assert [tensor.data_ptr() for tensor in state.values()] == addresses
    wanted = [10.0 * expert + number for expert in sorted(order) for number in range(2)]
    assert [tensor.unique().tolist() for tensor in state.values()] == [[value] for value in wanted]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_new_engine_continues_with_the_tensors_of_a_released_one(is_sharded: bool) -> None:
    """Master weights, moments and step counts are not copied, and gradients exist again when the engine is built."""
    from megatron_ft.mcore.state.tensors import held_state, put_state

    keys = {"precision.params_dtype": "bf16", "parallel.use_distributed_optimizer": is_sharded}
    config = engines.micro_config(keys)
    with engines.engine_of(config) as undisturbed:
        undisturbed.run_iteration(1)
        undisturbed.run_iteration(2)
        wanted = engines.digests(undisturbed)
    with engines.groups_of(config) as groups:
        engine = engines.new_engine(config)
        engine.build(groups)
        engine.run_iteration(1)
        host, before = engine.train_state(), engines.digests(engine)
        state = held_state(engine.model_chunks, engine.optimizer)
        adopted = {name: t.data_ptr() for name, t in state.items() if "/" in name}
        assert len(adopted) > 100
        engine.teardown()
        engine = engines.new_engine(config)
        engine.build(groups, state=state)
        assert {name: held.data_ptr() for name, held in held_of(engine).items() if name in adopted} == adopted
        for chunk in engine.model_chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                assert buffer.grad_data.untyped_storage().nbytes() >= 4 * buffer.numel
                assert not buffer.grad_data.any()
        put_state(engine.model_chunks, engine.optimizer, state)
        engine.restore(host)
        assert engines.digests(engine) == before
        engine.run_iteration(2)
        assert engines.digests(engine) == wanted
        engine.teardown()


def held_of(engine: Any) -> dict[str, torch.Tensor]:
    from megatron_ft.mcore.state.tensors import held_state

    return held_state(engine.model_chunks, engine.optimizer)


def test_a_rank_sends_and_receives_at_most_one_expert_in_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends two experts and receives two; ranks 1 and 2 also exchange one with each other at the same time."""
    from megatron_ft.mcore.state import tensors

    moves = [(1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 2, 0), (5, 1, 2)]  # expert, from, to
    transfers = [
        Transfer(layer_number=1, expert=expert, source_rank=source, target_rank=target, num_bytes=4)
        for expert, source, target in moves
    ]
    sent, exchanges = [], []

    def exchange(outgoing: Any, incoming: Any, _: Any) -> None:
        exchanges.append((sum(map(len, outgoing)), sum(map(len, incoming))))
        sent.extend(float(tensor) for of_rank in outgoing for tensor in of_rank)

    monkeypatch.setattr(tensors, "exchange_tensors", exchange)
    name = "decoder.layers.0.mlp.experts.local_experts.{}.weight"
    state = {name.format(expert): torch.tensor(float(expert)) for expert in (0, 1, 2)}
    tensors.move_experts(state, transfers, SimpleNamespace(rank=lambda: 0), range(3))  # type: ignore[arg-type]
    assert sent == [1.0, 2.0]
    assert all(max(count) <= 1 for count in exchanges)
    assert {name.format(expert) for expert in (3, 4)} <= set(state)
    others = []
    for rank in (1, 2):
        exchanges.clear()
        held = {name.format(expert): torch.tensor(float(expert)) for expert in ((3, 5), (4, 6))[rank - 1]}
        tensors.move_experts(held, transfers, SimpleNamespace(rank=lambda rank=rank: rank), range(3))  # type: ignore[arg-type]
        others.append(len(exchanges))
    assert others == [len(exchanges)] * 2, "all ranks make the same number of exchanges"
