"""Tests live views of a rank's operators: no copies, a fixed layout, and the same bits after a restore."""

from typing import Any

import pytest

from megatron_ft.errors import RecoveryError
from megatron_ft.operators import Component, OperatorId, check_shards
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.testing import engines

pytestmark = pytest.mark.slow  # trains

PRECISIONS = {
    "fp32": {"precision.params_dtype": "fp32"},
    "fp32_plain": {"precision.params_dtype": "fp32", "parallel.use_distributed_optimizer": False},
    "bf16": {"precision.params_dtype": "bf16"},
    "bf16_plain": {"precision.params_dtype": "bf16", "parallel.use_distributed_optimizer": False},
}


def dense_plan(view: Any) -> WindowPlan:
    operators = sorted({shard.operator for shard in view.shards}, key=str)
    return WindowPlan(slices=(tuple(Unit(operator=operator) for operator in operators),), interval_iterations=1)


@pytest.mark.parametrize("name", PRECISIONS)
def test_views_are_live_and_layouts_do_not_depend_on_what_ran_before(name: str) -> None:
    """A window outlives the process that captured it, so an engine that never trained must have the same pieces."""
    from tests.helpers.replay_scenarios import view_of

    with engines.engine_of(engines.micro_config(PRECISIONS[name])) as engine:
        fresh = view_of(engine)
        plan = dense_plan(fresh)
        before = fresh.pieces(plan, 0)
        engine.run_iteration(1)
        view = view_of(engine)
        assert view.pieces(plan, 0) == before
        state = engines.digests(engine)
        for piece in view.pieces(plan, 0):
            source = view.source(piece)
            assert source.dim() == 1
            assert source.numel() * source.element_size() == piece.num_bytes
            assert str(source.dtype) == f"torch.{piece.dtype}"
            source.add_(1)
        changed = {key for key, digest in engines.digests(engine).items() if digest != state[key]}
        weights = {key for key in state if "/" not in key and not key.startswith("buffer")}
        # An FP32 weight is its own master; elsewhere weights follow with the next update.
        assert changed >= {key for key in state if "/" in key}
        assert (changed >= weights) == name.startswith("fp32")


@pytest.mark.parametrize("name", PRECISIONS)
def test_weights_come_from_masters(name: str) -> None:
    """A full capture contains no weights. They are rounded from the master weights with the same bits as in the
    update."""
    from tests.helpers.replay_scenarios import capture, scramble, sources_of, view_of

    with engines.engine_of(engines.micro_config(PRECISIONS[name])) as engine:
        engine.run_iteration(1)
        view = view_of(engine)
        plan = dense_plan(view)
        assert {piece.component for piece in view.pieces(plan, 0)} == {"master", "exp_avg", "exp_avg_sq", "step"}
        expected = engines.digests(engine)
        payload = capture(engine, view, sources_of(view, plan)[0], 0).payload
        scramble(engine)
        named = {key for key in expected if not key.startswith("buffer")}
        assert all(engines.digests(engine)[key] != expected[key] for key in named)
        view.restore(plan, 0, payload)
        assert {key: engines.digests(engine)[key] for key in named} == {key: expected[key] for key in named}


def test_every_shard_belongs_to_an_operator_of_the_model() -> None:
    from tests.helpers.replay_scenarios import view_of

    with engines.engine_of(engines.micro_config()) as engine:
        view = view_of(engine)
        operators = {shard.operator for shard in view.shards}
        experts = {OperatorId(layer=layer, kind="expert", expert=e) for layer in (1, 2) for e in range(4)}
        assert experts < operators
        assert {str(operator) for operator in operators - experts} == {
            "0.embedding",
            "1.gate",
            "1.non_expert",
            "2.gate",
            "2.non_expert",
            "3.head",
        }
        elements = sum(parameter.numel() for chunk in engine.model_chunks for parameter in chunk.parameters())
        assert sum(shard.num_elements for shard in view.shards) == elements
        with pytest.raises(KeyError, match="rank 0 does not have"):
            view.live((view.shards[0].parameter, 0), "master", 0, 10**9)


def test_a_payload_of_another_layout_is_refused() -> None:
    from tests.helpers.replay_scenarios import view_of

    with engines.engine_of(engines.micro_config()) as engine:
        view = view_of(engine)
        with pytest.raises(RecoveryError, match="slice 0 has 10 captured bytes"):
            view.restore(dense_plan(view), 0, bytes(10))


def test_cuts_are_between_blocks_if_the_first_rank_has_no_optimizer_state() -> None:
    from megatron_ft.mcore.state.operator_view import _cut_shards, _PartHolding

    part = ("decoder.final_layernorm.weight", 0)
    weight = Component(name="weight", dtype="float32", item_bytes=4)
    codes = Component(name="master", dtype="float8_e4m3fn", item_bytes=1)
    scales = Component(name="master_scales", dtype="uint8", item_bytes=1, per_block=True)
    without = _PartHolding(part=part, num_elements=200, ranges=(), full=(), frozen=(weight,))
    having = _PartHolding(part=part, num_elements=200, ranges=((0, 200),), full=(codes, scales), frozen=(weight,))
    shards = _cut_shards([(without,), (having,), (having,)], 2)
    check_shards(shards, {part: 200})
    assert [[(shard.start, shard.stop) for shard in of_rank] for of_rank in shards] == [[], [(0, 64)], [(64, 200)]]
