"""Tests recorded loads: real files, and files that must be refused."""

import io
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from megatron_ft.errors import DataError
from megatron_ft.expert_loads import ExpertLoads

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "expert_load"
HEADER = "batch_id,dataset_name,stage,router_layer_index,expert_id,assigned_tokens,total_tokens\n"


@pytest.mark.skipif(not REAL.exists(), reason="needs the recorded loads in ../shared/data/expert_load")
@pytest.mark.parametrize(
    ("name", "shape", "tokens_per_layer"),
    [
        ("smartmoe_gate_counts.npz", (251, 16, 24, 4, 32), 251 * 16 * 4 * 4096),
        ("deepseek_v3_prefill_in1024.json", (1, 1, 61, 1, 256), 2**26),
        ("mixtral_top2_ids.npy", (1, 1, 32, 1, 8), 2 * 16470),
        ("switch8_load.csv", (8, 1, 12, 1, 8), 4096),
    ],
)
def test_real_files(name: str, shape: tuple[int, ...], tokens_per_layer: int) -> None:
    loads = ExpertLoads.read(REAL / name)
    assert loads.tokens.shape == shape
    assert loads.tokens.dtype == np.int64
    assert loads.per_layer()[-1].sum() == tokens_per_layer


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_lists_of_loads(tmp_path: Path) -> None:
    loads = ExpertLoads.read(write(tmp_path, "loads.json", "[[1, 2.0, 0], [4, 5, 6]]"))
    assert loads.per_layer().tolist() == [[1, 2, 0], [4, 5, 6]]
    assert loads.per_layer().dtype == np.int64
    assert ExpertLoads.read(write(tmp_path, "f.json", "[[0.5, 1]]")).per_layer().tolist() == [[0.5, 1.0]]


def test_records_by_iteration(tmp_path: Path) -> None:
    counts = np.arange(2 * 2 * 1 * 1 * 3).reshape(2, 2, 1, 1, 3)
    np.savez(tmp_path / "x.npz", counts=counts, iters=np.array([1, 11]))
    loads = ExpertLoads.read(tmp_path / "x.npz")
    assert loads.per_layer(loads.record_of(11)).tolist() == [[6 + 9, 7 + 10, 8 + 11]]
    with pytest.raises(DataError, match="iteration=12"):
        loads.record_of(12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1, 2], [3", "is not JSON"),
        ("[[1, 2], [3]]", "layer 1 has 1 loads"),
        ("[1, 2]", "must be a list of loads per layer"),
        ("[]", "must be a list of loads per layer"),
        ("[[]]", "layer 0 has 0 loads"),
        ('{"other": [[1]]}', "must be a list of loads per layer"),
        ("[[1, NaN]]", "expert 1 is nan"),
        ("[[1, -2]]", "expert 1 is -2"),
        ("[[1, Infinity]]", "expert 1 is inf"),
        ('[[1, "2"]]', "expert 1 is '2'"),
        ("[[1, true]]", "expert 1 is True"),
        ("[[1, null]]", "expert 1 is None"),
    ],
)
def test_json_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ExpertLoads.read(write(tmp_path, "x.json", content))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,a,encoder,1,0,5,9\n0,a,encoder,1,1", "line 3: has no value for assigned_tokens"),
        ("0,a,encoder,1,0,5,9\n0,a,encoder,1,0,5,9\n", "line 3: has the same batch"),
        ("0,a,encoder,1,0,5,9\n1,a,encoder,1,1,5,9\n", "has 2 rows: must have 4, one for each"),
        ("0,a,middle,1,0,5,9\n", "stage=middle"),
        ("0,a,encoder,1,0,-5,9\n", "assigned_tokens=-5"),
        ("0,a,encoder,1,0,x,9\n", "line 2"),
        ("", "all above 0"),
    ],
)
def test_csv_refused(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ExpertLoads.read(write(tmp_path, "x.csv", HEADER + rows))


def test_arrays_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "lacks.npz", counts=np.zeros((1, 1, 1, 1, 2)))
    np.savez(tmp_path / "shape.npz", counts=np.zeros((1, 1, 2)), iters=np.array([1]))
    np.savez(tmp_path / "order.npz", counts=np.zeros((2, 1, 1, 1, 2)), iters=np.array([2, 2]))
    np.save(tmp_path / "ids.npy", np.zeros((3, 2)))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    write(tmp_path, "damaged.npz", b"PK\x03\x04 and then nothing")
    write(tmp_path, "x.txt", "")
    for name, message in [
        ("lacks.npz", "must contain the array 'iters'"),
        ("shape.npz", "shape"),
        ("order.npz", "must be ascending"),
        ("ids.npy", "must be integers"),
        ("object.npy", "not a readable npy"),
        ("damaged.npz", "not a readable npz"),
        ("x.txt", "unknown suffix"),
        ("missing.json", "cannot be read"),
    ]:
        with pytest.raises(DataError, match=message):
            ExpertLoads.read(tmp_path / name)


def test_truncated_archive_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", counts=np.ones((1, 1, 1, 1, 2)), iters=np.array([1]))
    whole = (tmp_path / "x.npz").read_bytes()
    for length in range(0, len(whole), 37):
        with pytest.raises(DataError):
            ExpertLoads.read(write(tmp_path, "cut.npz", whole[:length]))


def test_json_file_of_one_thousand_layers(tmp_path: Path) -> None:
    layers = [[layer, 1] for layer in range(1000)]
    assert ExpertLoads.read(write(tmp_path, "x.json", json.dumps(layers))).num_layers == 1000


def _npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _npz_bytes(compression: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


_IDS = _npy_bytes(np.zeros((4, 2, 2), dtype=np.int64))
_SOUND = {"counts": _npy_bytes(np.ones((1, 1, 1, 1, 4), dtype=np.int64)), "iters": _npy_bytes(np.array([1]))}


def _ids(value: int) -> bytes:
    return _npy_bytes(np.full((4, 2, 2), value, dtype=np.int64))


def _broken_zip(offset: int, value: bytes) -> bytes:
    content = bytearray(_npz_bytes(**_SOUND))
    content[offset : offset + len(value)] = value
    return bytes(content)


def _other_method() -> bytes:
    """Change both headers of the first member to an unknown compression method."""
    content = bytearray(_npz_bytes(**_SOUND))
    struct.pack_into("<H", content, 8, 99)
    struct.pack_into("<H", content, content.index(b"PK\x01\x02") + 10, 99)
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", _ids(1 << 29)),
        ("a.npy", _ids(1 << 62)),
        ("a.npy", _ids(1 << 16)),
        ("a.npy", _npy_bytes(np.full((1, 3000, 1), 40_000))),
        ("a.npy", _IDS.replace(b"(4, 2, 2)", b"(9999999999, 2, 2)".ljust(9))),
        ("a.npy", _IDS.replace(b"(4, 2, 2)", b"(4, 2, 3)")),
        ("a.npy", _IDS.replace(b"(4, 2, 2)", b"(4, 2, 2 ")),
        ("a.npy", _IDS.replace(b"'shape'", b"'sh\x00pe'")),
        ("a.npy", _IDS[:20]),
        ("a.npy", b""),
        ("a.npz", _other_method()),
        ("a.npz", _broken_zip(60, b"\xff" * 40)),
        ("a.npz", _npz_bytes(**{**_SOUND, "counts": _SOUND["counts"][:100]})),
        ("a.npz", _npz_bytes(**{**_SOUND, "counts": b"\x80\x04K\x01."})),
        ("a.csv", HEADER + "\n".join(f"{n},x,encoder,{n},{n},1,1" for n in range(1500))),
        ("a.csv", HEADER + f"0,x,encoder,0,0,{'9' * 5000},1\n"),
        ("a.csv", HEADER + f"0,x,encoder,0,0,{'9' * 30},1\n"),
        ("a.csv", HEADER + f'0,"{"x" * 200_000}",encoder,0,0,1,1\n'),
        ("a.csv", HEADER + "0,x\0,encoder,0,0,1,1\n"),
        ("a.json", b"[" * 100_000),
        ("a.json", b"[[1" + b"0" * 400 + b"]]"),
        ("a.json", b"[[1" + b"0" * 5000 + b"]]"),
    ],
)
def test_no_damage_is_anything_but_one_error_that_names_the_file(
    tmp_path: Path, name: str, content: str | bytes
) -> None:
    path = write(tmp_path, name, content)
    try:
        loads = ExpertLoads.read(path)
    except DataError as error:
        assert name in str(error), error
    else:  # a field of no interest may hold anything
        assert name == "a.csv" and loads.num_records == 1


def test_an_archive_that_unpacks_to_more_than_memory_is_refused_by_its_sizes(tmp_path: Path) -> None:
    """10 MB contain 10 GB of zeros, for which the shape in the header is valid."""
    shape = (10, 1, 1, 1, 134_217_728)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
    content = bytearray(_npz_bytes(**{**_SOUND, "counts": header.getvalue()}))
    size = struct.pack("<I", (1 << 32) - 2)
    where = content.index(b"PK\x01\x02") + 24
    content[where : where + 4] = size
    content[22:26] = size
    path = write(tmp_path, "a.npz", bytes(content))
    with pytest.raises(DataError, match=r"counts\.npy: 4294967294 bytes: must be at most"):
        ExpertLoads.read(path)


def test_a_sparse_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = write(tmp_path, "a.npy", _IDS)
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"a\.npy: 1099511627776 bytes"):
        ExpertLoads.read(path)
