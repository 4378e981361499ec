"""Tests how the pieces of a slice are cut into batches."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.planning.snapshot.plan import PIECE_ALIGNMENT_BYTES, Piece, batch_bytes

COUNTS = st.integers(1, 3_000)
ITEM_BYTES = st.sampled_from((1, 2, 4, 8))
ALIGNED = st.integers(0, 100).map(lambda number: number * PIECE_ALIGNMENT_BYTES)
SIZES = st.integers(1, 20).map(lambda number: number * PIECE_ALIGNMENT_BYTES)


def piece(start: int, stop: int, offset: int, num_bytes: int) -> Piece:
    about = {"parameter": "weight", "tensor_part": 0, "component": "master", "dtype": "float32"}
    return Piece(**about, start=start, stop=stop, offset=offset, num_bytes=num_bytes)  # type: ignore[arg-type]


@given(start=st.integers(0, 50), count=COUNTS, item_bytes=ITEM_BYTES, offset=ALIGNED, at_a_time=SIZES)
def test_parts_have_all_elements_in_order_and_none_is_in_two_batches(
    start: int, count: int, item_bytes: int, offset: int, at_a_time: int
) -> None:
    whole = piece(start, start + count, offset, count * item_bytes)
    parts = list(whole.in_batches(at_a_time))
    position, first = offset, start
    for batch, part in parts:
        assert (part.start, part.offset) == (first, position)
        assert part.num_bytes == (part.stop - part.start) * item_bytes > 0
        assert batch * at_a_time <= part.offset and part.end <= (batch + 1) * at_a_time
        position, first = part.end, part.stop
    assert (position, first) == (whole.end, whole.stop)


def test_a_value_for_all_elements_is_not_cut() -> None:
    step = piece(0, 1_000_000, 2 * PIECE_ALIGNMENT_BYTES, 4)
    assert list(step.in_batches(PIECE_ALIGNMENT_BYTES)) == [(2, step)]


def test_batches_are_few_and_aligned() -> None:
    for size in (0, 5, 10**7, 10**11 + 1):
        assert batch_bytes(size) % PIECE_ALIGNMENT_BYTES == 0
        assert -(-size // batch_bytes(size)) <= 128
