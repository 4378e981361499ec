"""Tests the order of passes, sends and receives of Megatron's pipeline schedules."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.pipeline import Direction, LogKey, PipelineShape, order, receives, sends

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    """Draw any small shape that Megatron can run."""
    num_stages = draw(st.integers(1, 6))
    num_chunks = draw(st.integers(1, 4)) if num_stages > 1 else 1
    if num_chunks == 1:
        return PipelineShape(num_stages=num_stages, num_microbatches=draw(st.integers(1, 14)))
    size = draw(st.integers(num_stages, num_stages + 4))
    rest = draw(st.sampled_from([0, *range(num_stages, size)]))
    return PipelineShape(
        num_stages=num_stages,
        num_microbatches=draw(st.integers(1, 3)) * size + rest,
        num_chunks=num_chunks,
        microbatch_group_size=draw(st.sampled_from([size, None])) if size == num_stages else size,
    )


@given(shape=shapes())
def test_every_stage_computes_each_microbatch_of_each_chunk_once(shape: PipelineShape) -> None:
    pairs = {(m, c) for m in range(shape.num_microbatches) for c in range(shape.num_chunks)}
    for stage in range(shape.num_stages):
        for direction in DIRECTIONS:
            computed = [(m, c) for kind, m, c in order(shape, stage) if kind == direction]
            assert len(computed) == len(pairs) and set(computed) == pairs


@given(shape=shapes())
def test_accumulation_is_in_the_order_of_microbatches(shape: PipelineShape) -> None:
    """Each chunk processes its microbatches in ascending order, and no gradient before its activation."""
    for stage in range(shape.num_stages):
        passes = order(shape, stage)
        for chunk in range(shape.num_chunks):
            for direction in DIRECTIONS:
                numbers = [m for kind, m, c in passes if (kind, c) == (direction, chunk)]
                assert numbers == list(range(shape.num_microbatches))
            for microbatch in range(shape.num_microbatches):
                there = passes.index(("forward", microbatch, chunk))
                assert there < passes.index(("backward", microbatch, chunk))


@given(shape=shapes())
def test_what_a_stage_receives_is_what_its_neighbour_sends(shape: PipelineShape) -> None:
    for stage in range(shape.num_stages):
        for direction in DIRECTIONS:
            own = [
                (microbatch, chunk)
                for kind, microbatch, chunk in order(shape, stage)
                if kind == direction and shape.origin(stage, chunk, direction) is not None
            ]
            assert receives(shape, stage, direction) == tuple(own), "received in another order than it is needed"
            sent = []
            for microbatch, chunk in own:
                place = shape.origin(stage, chunk, direction)
                assert place is not None and shape.destination(*place, direction) == (stage, chunk)
                assert place[0] == (stage - 1 if direction == "forward" else stage + 1) % shape.num_stages
                sent.append((microbatch, place[1]))
            neighbour = (stage - 1 if direction == "forward" else stage + 1) % shape.num_stages
            assert sends(shape, neighbour, direction) == tuple(sent)


@given(shape=shapes())
def test_only_the_ends_of_the_model_do_not_send(shape: PipelineShape) -> None:
    all_passes = shape.num_microbatches * shape.num_chunks
    for direction, end in (("forward", shape.num_stages - 1), ("backward", 0)):
        counts = [len(sends(shape, stage, direction)) for stage in range(shape.num_stages)]
        expected = [all_passes - (stage == end) * shape.num_microbatches for stage in range(shape.num_stages)]
        assert counts == expected


@given(shape=shapes())
def test_the_stages_of_a_pipeline_finish_together(shape: PipelineShape) -> None:
    """The orders are executed with tensors that arrive in the order of sending. No stage blocks."""
    waiting = [deque(order(shape, stage)) for stage in range(shape.num_stages)]
    there: set[tuple[str, int, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for stage, passes in enumerate(waiting):
            while passes:
                direction, microbatch, chunk = passes[0]
                needed = shape.origin(stage, chunk, direction)
                if needed is not None and (direction, microbatch, *needed) not in there:
                    break
                there.add((direction, microbatch, stage, chunk))
                passes.popleft()
                moved = True
    assert not any(waiting), "the pipeline is stuck"


def test_1f1b_by_hand() -> None:
    """The middle stage is one pass ahead with three stages and four microbatches."""
    shape = PipelineShape(num_stages=3, num_microbatches=4)
    names = ["".join((kind[0], str(m))) for kind, m, _ in order(shape, 1)]
    assert names == ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]
    assert sends(shape, 1, "forward") == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert sends(shape, 2, "forward") == () and sends(shape, 0, "backward") == ()
    assert receives(shape, 0, "forward") == () and receives(shape, 2, "backward") == ()


def test_fewer_microbatches_than_stages_are_all_warm_up() -> None:
    shape = PipelineShape(num_stages=4, num_microbatches=2)
    assert [kind for kind, _, _ in order(shape, 0)] == ["forward"] * 2 + ["backward"] * 2


def test_interleaved_by_hand() -> None:
    """Megatron's own example: two stages of two chunks, five microbatches in groups of three."""
    shape = PipelineShape(num_stages=2, num_microbatches=5, num_chunks=2, microbatch_group_size=3)
    forward = [(m, c) for kind, m, c in order(shape, 0) if kind == "forward"]
    assert [m for m, _ in forward] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [c for _, c in forward] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert sends(shape, 1, "forward") == ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0))
    assert receives(shape, 0, "forward") == ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))
    assert [kind for kind, _, _ in order(shape, 0)[:8]] == ["forward"] * 6 + ["backward", "forward"]
    assert [kind for kind, _, _ in order(shape, 1)[:6]] == ["forward"] * 4 + ["backward", "forward"]


def test_one_stage_sends_nothing() -> None:
    shape = PipelineShape(num_stages=1, num_microbatches=2)
    assert [kind for kind, _, _ in order(shape, 0)] == ["forward", "backward"] * 2
    assert not any(call(shape, 0, direction) for call in (sends, receives) for direction in DIRECTIONS)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"num_stages": 0, "num_microbatches": 1}, "pipeline_model_parallel_size"),
        ({"num_stages": 2, "num_microbatches": 0}, "global_batch_size"),
        ({"num_stages": 1, "num_microbatches": 2, "num_chunks": 2}, "virtual_pipeline_model_parallel_size=2"),
        ({"num_stages": 4, "num_microbatches": 2, "num_chunks": 2}, "microbatches per rank .*=2"),
        ({"num_stages": 4, "num_microbatches": 6, "num_chunks": 2}, "microbatches per rank .*=6"),
        ({"num_stages": 4, "num_microbatches": 6, "num_chunks": 2, "microbatch_group_size": 3}, "groups of 3"),
    ],
)
def test_shapes_that_megatron_refuses_are_refused(values: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        PipelineShape(**values).validate()


def test_log_keys_sort_by_iteration_first() -> None:
    late = LogKey(iteration=2, microbatch=0, chunk=0, direction="backward", generation=0)
    early = LogKey(iteration=1, microbatch=5, chunk=1, direction="forward", generation=3)
    assert sorted([late, early]) == [early, late]
