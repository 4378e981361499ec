"""A window's manifest: what it refuses, and that it comes back as it was."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.stored_samples import sample_window
from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.window import (
    WINDOW_FORMAT_VERSION,
    PieceRecord,
    SliceRecord,
    WindowManifest,
)


def body() -> dict[str, Any]:
    """A sound manifest as JSON."""
    return json.loads(sample_window(20, 1)[0].to_bytes())  # type: ignore[no-any-return]


def piece(**changes: Any) -> PieceRecord:
    """A piece of ten values, changed."""
    good = PieceRecord(
        parameter="a.b",
        tensor_part=0,
        component="master",
        dtype="float32",
        start=10,
        stop=20,
        offset=0,
        num_bytes=40,
        xxh3_128="0" * 32,
    )
    return replace(good, **changes)


def record(*pieces: PieceRecord, num_bytes: int = 4096) -> SliceRecord:
    """A slice of these pieces."""
    return SliceRecord(iteration=3, offset=0, num_bytes=num_bytes, header={}, pieces=pieces)


def test_round_trip() -> None:
    manifest, _ = sample_window(20, 1)
    assert WindowManifest.from_bytes(manifest.to_bytes()) == manifest
    assert WindowManifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert "iterations 20 to 21, rank 1 of 2, 8 pieces" in manifest.summary()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stop": 9}, "stop=9: must be at least start=10"),
        ({"num_bytes": 39}, "num_bytes=39: must be 4 or 4 for each"),
        ({"dtype": "float31"}, "dtype='float31'"),
        ({"parameter": "../a"}, "parameter='../a'"),
        ({"component": "Master"}, "component='Master'"),
        ({"xxh3_128": "0" * 31}, "xxh3_128"),
        ({"offset": -1}, "offset=-1"),
        ({"start": True}, "start=True"),
        ({"stop": 2**63}, "stop=9223372036854775808"),
    ],
)
def test_a_bad_piece_is_refused_by_field(changes: dict[str, Any], says: str) -> None:
    piece().validate()
    with pytest.raises(CheckpointError) as caught:
        piece(**changes).validate()
    assert says in str(caught.value)


def test_one_value_for_all_elements() -> None:
    piece(num_bytes=4).validate()


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([piece(), piece(component="weight", offset=39)], "overlaps"),
        ([piece(offset=64), piece(component="weight")], "out of order"),
        ([piece(), piece(offset=64)], "element 10 of 'a.b' 'master' is there twice"),
        ([piece(), piece(offset=64, start=19, stop=29)], "element 19 of 'a.b' 'master' is there twice"),
        ([piece(offset=4057)], "ends at 4097, outside the slice"),
        ([piece(start=10, stop=10, num_bytes=4), piece(start=10, stop=10, num_bytes=4, offset=64)], "there twice"),
    ],
)
def test_pieces_that_do_not_fit_together(pieces: list[PieceRecord], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        record(*pieces).validate()


def test_pieces_side_by_side_are_sound() -> None:
    record(piece(), piece(start=20, stop=30, offset=40), piece(tensor_part=1, offset=80)).validate()


def test_extents_cover_every_byte() -> None:
    extents = list(record(piece(offset=64), piece(component="weight", offset=104)).extents())
    assert [extent[:2] for extent in extents] == [(0, 64), (64, 104), (104, 144), (144, 4096)]
    assert [extent[2] is not None for extent in extents] == [False, True, True, False]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.update(format_version=WINDOW_FORMAT_VERSION + 1), "needs a newer version of this project"),
        (lambda b: b.update(rank=2), "rank=2: must be less than world_size=2"),
        (lambda b: b.update(num_slices=3), "num_slices=3"),
        (lambda b: b["slices"][1].update(iteration=23), "must be consecutive"),
        (lambda b: b["slices"][1].update(offset=0), "slice 1: offset=0"),
        (lambda b: b["slices"][1].update(offset=16388), "slice 1: offset=16388"),
        (lambda b: b.update(extra=1), "missing or unknown: extra"),
        (lambda b: b.pop("plan"), "missing or unknown: plan"),
        (lambda b: b["topology"].update(data_parallel=1.5), "topology.data_parallel"),
        (lambda b: b["slices"][0]["header"].update(loss=float("nan")), "not strict JSON"),
        (lambda b: b.update(run_id="a/b"), "run_id='a/b'"),
    ],
)
def test_a_bad_manifest_is_refused(change: Callable[[dict[str, Any]], object], says: str) -> None:
    content = body()
    change(content)
    with pytest.raises(CheckpointError, match=says):
        WindowManifest.from_json(content)


def test_what_would_not_be_read_is_not_written() -> None:
    manifest, _ = sample_window(20, 1)
    first = replace(manifest.slices[0], header={"loss": float("inf")})
    with pytest.raises(CheckpointError, match="not strict JSON"):
        replace(manifest, slices=(first, *manifest.slices[1:])).to_bytes()
