"""Tests the manifest of a window: what it refuses, and that it is read unchanged."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import Piece
from megatron_ft.snapshot.window import WINDOW_FORMAT_VERSION, Slice, Window, _check_piece
from megatron_ft.testing.stored_samples import sample_window


def body() -> dict[str, Any]:
    """Return a valid manifest as JSON."""
    return json.loads(sample_window(20, 1)[0].to_bytes())  # type: ignore[no-any-return]


def piece(**changes: Any) -> Piece:
    """Return a piece of ten values, with changes."""
    good = Piece("a.b", tensor_part=0, component="master", dtype="float32", start=10, stop=20, offset=0, num_bytes=40)
    return good._replace(**changes)


def part(*pieces: Piece, num_bytes: int = 4096, hashes: tuple[str, ...] | None = None) -> Slice:
    """Return a slice with these pieces."""
    return Slice(iteration=3, offset=0, num_bytes=num_bytes, header={}, pieces=pieces, hashes=hashes)


def test_round_trip() -> None:
    window, _ = sample_window(20, 1)
    assert Window.from_json(json.loads(window.to_bytes())) == window
    assert Window.from_json(json.loads(json.dumps(window.to_json()))) == window
    assert Window.from_json(json.loads(json.dumps(window.describe())), whole=False) == replace(window, slices=[])
    assert "iterations 20 to 21, rank 1 of 2, 8 pieces" in window.summary()


def test_a_slice_is_described_before_its_hashes_are_known() -> None:
    known = sample_window(20, 1)[0].slices[0]
    announced = replace(known, hashes=None)
    content = json.loads(json.dumps(announced.to_json()))
    assert Slice.from_json(content, hashed=False) == announced
    with pytest.raises(CheckpointError, match="must be a list of .*xxh3_128"):
        Slice.from_json(content, hashed=True)
    with pytest.raises(CheckpointError, match="must be a list of .*num_bytes$"):
        Slice.from_json(json.loads(json.dumps(known.to_json())), hashed=False)


def test_the_hashes_of_a_slice_are_those_of_its_bytes() -> None:
    window, payload = sample_window(20, 1)
    for known, content in zip(window.slices, payload, strict=True):
        assert replace(known, hashes=None).hash_pieces(memoryview(content)) == known.hashes


@pytest.mark.parametrize("num_slices", [0, 1])
def test_a_window_without_all_slices_is_not_whole(num_slices: int) -> None:
    content = body()
    del content["slices"][num_slices:]
    with pytest.raises(CheckpointError, match=f"num_slices=2: expected 2 slices, got {num_slices}"):
        Window.from_json(content)
    with pytest.raises(CheckpointError, match="num_slices=2: expected 0 slices, got 2"):
        Window.from_json(body(), whole=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stop": 9}, "stop=9: must be at least start=10"),
        ({"num_bytes": 39}, "num_bytes=39: must be 4 or 4 times"),
        ({"dtype": "float31"}, "dtype='float31'"),
        ({"parameter": "../a"}, "parameter='../a'"),
        ({"component": "Master"}, "component='Master'"),
        ({"offset": -1}, "offset=-1"),
        ({"start": True}, "start=True"),
        ({"stop": 2**63}, "stop=9223372036854775808"),
    ],
)
def test_a_bad_piece_is_refused_by_field(changes: dict[str, Any], says: str) -> None:
    _check_piece(piece())
    with pytest.raises(CheckpointError) as caught:
        _check_piece(piece(**changes))
    assert says in str(caught.value)


def test_one_value_for_all_elements() -> None:
    _check_piece(piece(num_bytes=4))


@pytest.mark.parametrize("digest", ["0" * 31, "G" * 32, None, 7])
def test_a_bad_hash_is_refused(digest: Any) -> None:
    with pytest.raises(CheckpointError, match="xxh3_128"):
        part(piece(), hashes=(digest,)).validate()


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([piece(), piece(component="weight", offset=39)], "after the previous piece, which ends at 40"),
        ([piece(offset=64), piece(component="weight")], "after the previous piece"),
        ([piece(), piece(offset=64)], "element 10 of 'a.b' 'master' is captured twice"),
        ([piece(), piece(offset=64, start=19, stop=29)], "element 19 of 'a.b' 'master' is captured twice"),
        ([piece(offset=4057)], "ends at 4097, beyond the slice"),
        (
            [piece(start=10, stop=10, num_bytes=4), piece(start=10, stop=10, num_bytes=4, offset=64)],
            "is captured twice",
        ),
    ],
)
def test_pieces_that_do_not_fit_together(pieces: list[Piece], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        part(*pieces).validate()


def test_pieces_side_by_side_are_sound() -> None:
    part(piece(), piece(start=20, stop=30, offset=40), piece(tensor_part=1, offset=80)).validate()


def test_extents_cover_every_byte() -> None:
    extents = list(part(piece(offset=64), piece(component="weight", offset=104)).extents())
    assert [extent[:2] for extent in extents] == [(0, 64), (64, 104), (104, 144), (144, 4096)]
    assert [extent[2] is not None for extent in extents] == [False, True, True, False]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.update(format_version=WINDOW_FORMAT_VERSION + 1), "install a newer version of this project"),
        (lambda b: b.update(rank=2), "rank=2: must be less than world_size=2"),
        (lambda b: b.update(num_slices=3), "num_slices=3"),
        (lambda b: b["slices"][1].update(iteration=23), "iteration=23: must be"),
        (lambda b: b["slices"][1].update(offset=0), "slice 1: offset=0"),
        (lambda b: b["slices"][1].update(offset=16388), "slice 1: offset=16388"),
        (lambda b: b.update(extra=1), "missing or unknown fields: extra"),
        (lambda b: b.pop("plan"), "missing or unknown fields: plan"),
        (lambda b: b["topology"].update(data_parallel=1.5), "topology.data_parallel"),
        (lambda b: b["slices"][0]["header"].update(loss=float("nan")), "not strict JSON"),
        (lambda b: b.update(run_id="a/b"), "run_id='a/b'"),
    ],
)
def test_a_bad_manifest_is_refused(change: Callable[[dict[str, Any]], object], says: str) -> None:
    content = body()
    change(content)
    with pytest.raises(CheckpointError, match=says):
        Window.from_json(content)


def test_what_would_not_be_read_is_not_written() -> None:
    window, _ = sample_window(20, 1)
    first = replace(window.slices[0], header={"loss": float("inf")})
    with pytest.raises(CheckpointError, match="not strict JSON"):
        replace(window, slices=[first, *window.slices[1:]]).to_bytes()
