"""Damaged inputs of the tools: checkpoints whose manifest is valid but whose content is not, and Hugging Face folders.

Every case changes a copy of an intact input, and writes the manifest again, as an attacker or a faulty program would.
"""

import copy
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hostile_files import HUGE, ODD_FILES, Payload, hostile_checkpoints, hostile_windows
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.files import entry_of
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.window_file import rank_name
from megatron_ft.testing.stored_samples import NEW, WORLD_SIZE, sample_name

CONFIG, INDEX, SAFETENSORS = "config.json", "model.safetensors.index.json", "model.safetensors"
METADATA, COMMON, DATA = ".metadata", "common.pt", "__0_0.distcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Damage to one input."""

    name: str
    apply: Callable[[Path], Path]
    """Damages an input: a checkpoint, the window of iteration ``NEW`` or a Hugging Face folder. The argument is its
    parent directory. The result is a path that the error must contain."""
    part: str = "all"
    """Part that was changed. Commands that do not read the part may accept the input."""


# -- dense checkpoints ------------------------------------------------------------------------------------------


def damaged_checkpoints() -> list[Damage]:
    """Return damages of a dense checkpoint, the directory ``iter_0000030``."""
    hostile = [Damage(name=case.name, apply=case.put) for case in hostile_checkpoints()]
    return [*hostile, *_torn_checkpoints(), *_sealed_files(), *_sealed_metadata(), *_sealed_models(), *_other_things()]


def _checkpoint(folder: Path) -> Path:
    return folder / directory_name(NEW)


def _torn_checkpoints() -> Iterator[Damage]:
    for name in (DATA, METADATA, COMMON, "metadata.json", MANIFEST_NAME):
        for what in ("cut to a half", "cut by one byte", "without bytes", "one byte more", "zeros", "missing"):
            # The last byte of a manifest is the end of the line, which has no meaning.
            if (name, what) != (MANIFEST_NAME, "cut by one byte"):
                yield Damage(name=f"{name}: {what}", apply=partial(_tear, name, what))
    yield Damage(name="a file more", apply=lambda folder: _write(_checkpoint(folder) / "extra.distcp", b"x"))


def _tear(name: str, what: str, folder: Path) -> Path:
    return tear_file(_checkpoint(folder) / name, what)


def tear_file(path: Path, what: str) -> Path:
    content = path.read_bytes()
    changed = {"cut to a half": content[: len(content) // 2], "cut by one byte": content[:-1], "without bytes": b""}
    changed |= {"one byte more": content + b"\0", "zeros": bytes(len(content))}
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(changed[what])
    return path.parent


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path.parent


def seal(checkpoint: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> Path:
    """Write the manifest again, so that it lists the present files. ``change`` changes its fields."""
    body = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    body.pop("manifest_xxh3_128")
    change(body)
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != MANIFEST_NAME)
    entries = [entry_of(checkpoint, name) for name in names]
    manifest = Manifest(**{**body, "files": tuple(entries)})
    (checkpoint / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return checkpoint


def _sealed_files() -> Iterator[Damage]:
    contents: dict[str, bytes] = {
        "empty": b"",
        "pickle with code": pickle.dumps(Payload()),
        "pickle with code, protocol 0": pickle.dumps(Payload(), protocol=0),
        "zeros": bytes(5000),
        "text": b"not a checkpoint",
        "pickle of a list": pickle.dumps([1, 2]),
        "pickle of None": pickle.dumps(None),
        "archive header": b"PK\x03\x04" + bytes(200),
        "deep pickle": b"(" * 200_000,
    }
    for name in (DATA, METADATA, COMMON):
        for what, content in contents.items():
            part = VALUES if name == DATA else name
            yield Damage(name=f"sealed {name}: {what}", apply=partial(_seal_file, name, content), part=part)
        for length in (1, 100, -1, -100):
            part = METADATA if name == DATA else name  # the metadata then has positions beyond the end
            yield Damage(name=f"sealed {name}: cut at {length}", apply=partial(_seal_cut, name, length), part=part)


def _seal_file(name: str, content: bytes, folder: Path) -> Path:
    (_checkpoint(folder) / name).write_bytes(content)
    return seal(_checkpoint(folder))


def _seal_cut(name: str, length: int, folder: Path) -> Path:
    content = (_checkpoint(folder) / name).read_bytes()
    return _seal_file(name, content[:length], folder)


def _sealed_metadata() -> Iterator[Damage]:
    for name, change in METADATA_CHANGES.items():
        part = _PARTS.get(name, METADATA)
        yield Damage(name=f"sealed metadata: {name}", apply=partial(_seal_metadata, change), part=part)


VALUES, DTYPE, SHAPES = "values", "dtype", "shapes"
"""Parts of a checkpoint: values of tensors; dtypes and shapes that are only checked when values are read."""
NAMES, EXPERTS, MLP, SETTINGS, RUN = "names", "experts", "mlp", "settings", "run"
"""Parts of a checkpoint: list of tensors, keys of MoE layers, keys of other MLPs, settings, identity of the run."""
_PARTS = {
    "another dtype": DTYPE,
    "another shape": SHAPES,
    "0 elements": SHAPES,
    "no dimension": SHAPES,
    "offset 0": VALUES,
    "the metadata": VALUES,
    "a tensor is missing": NAMES,
}
"""Parts of those changes of the metadata that only a check of the values or of all names can find."""


def _seal_metadata(change: Callable[[Any], None], folder: Path) -> Path:
    path = _checkpoint(folder) / METADATA
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this process wrote it
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return seal(path.parent)


def _victim(metadata: Any) -> tuple[str, Any]:
    """Return name and entry of the tensor that the changes below damage, the first weight with two dimensions."""
    return next(
        (name, entry)
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if "norm" not in name and len(getattr(entry, "size", ())) == 2
    )


def _entry(**changes: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        name, entry = _victim(metadata)
        metadata.state_dict_metadata[name] = copy.deepcopy(entry)
        for field, value in changes.items():
            object.__setattr__(metadata.state_dict_metadata[name], field, value)

    return change


def _sizes(*sizes: int, chunk: bool = True) -> Callable[[Any], None]:
    """Declare other sizes of the tensor, and with ``chunk`` also of its part."""
    import torch

    def change(metadata: Any) -> None:
        name, entry = _victim(metadata)
        entry = copy.deepcopy(entry)
        entry.size = torch.Size(sizes)
        if chunk:
            object.__setattr__(entry.chunks[0], "sizes", torch.Size(sizes))
        metadata.state_dict_metadata[name] = entry

    return change


def _place(**changes: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        name, _ = _victim(metadata)
        for index, place in metadata.storage_data.items():
            if index.fqn == name:
                for field, value in changes.items():
                    object.__setattr__(place, field, value)

    return change


def _twice(metadata: Any) -> None:
    """Declare a tensor of two parts with the same position, so that a half of the tensor is stored nowhere."""
    import torch

    name, entry = _victim(metadata)
    entry = copy.deepcopy(entry)
    entry.size = torch.Size((entry.size[0] * 2, *entry.size[1:]))
    entry.chunks.append(copy.deepcopy(entry.chunks[0]))
    metadata.state_dict_metadata[name] = entry


def _other_dtype(metadata: Any) -> None:
    import torch

    _, entry = _victim(metadata)
    entry.properties.dtype = torch.int64


def _rename(to: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        name, _ = _victim(metadata)
        metadata.state_dict_metadata[to] = metadata.state_dict_metadata.pop(name)

    return change


def _pop(metadata: Any) -> None:
    metadata.state_dict_metadata.pop(_victim(metadata)[0])


def _drop_place(metadata: Any) -> None:
    name, _ = _victim(metadata)
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]


def _attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata, name, value)


METADATA_CHANGES: dict[str, Callable[[Any], None]] = {
    "no tensors": _attribute("state_dict_metadata", {}),
    "tensors are a list": _attribute("state_dict_metadata", []),
    "tensors are None": _attribute("state_dict_metadata", None),
    "no places": _attribute("storage_data", None),
    "places are a list": _attribute("storage_data", [1]),
    "a tensor is a number": lambda metadata: metadata.state_dict_metadata.update({_victim(metadata)[0]: 3}),
    "a tensor is missing": _pop,
    "a name that is a number": lambda metadata: metadata.state_dict_metadata.update({3: _victim(metadata)[1]}),
    "a name with a terminal sequence": _rename("\x1b[2Jdecoder"),
    "a name of two lines": _rename("decoder.\nweight"),
    "2**60 elements": _sizes(1 << 30, 1 << 30),
    "2**40 elements, one part": _sizes(1 << 20, 1 << 20),
    "2**40 elements, the part unchanged": _sizes(1 << 20, 1 << 20, chunk=False),
    "2**70 elements": _sizes(1 << 35, 1 << 35),
    "no dimension": _sizes(),
    "another shape": _sizes(1, 3),
    "0 elements": _sizes(0, 4),
    "a size below 0": _entry(size=(-1, 4)),
    "a size that is a text": _entry(size="abc"),
    "a size that is None": _entry(size=None),
    "no parts": _entry(chunks=[]),
    "parts are None": _entry(chunks=None),
    "parts are numbers": _entry(chunks=[1, 2]),
    "no properties": _entry(properties=None),
    "a part twice": _twice,
    "another dtype": _other_dtype,
    "no place for a part": _drop_place,
    "offset beyond the file": _place(offset=HUGE),
    "offset below 0": _place(offset=-5),
    "offset 0": _place(offset=0),
    "an offset that is a text": _place(offset="0"),
    "length 0": _place(length=0),
    "length below 0": _place(length=-1),
    "length beyond the file": _place(length=HUGE),
    "length of one byte less": _place(length=10),
    "file in a parent": _place(relative_path="../x"),
    "absolute file": _place(relative_path="/etc/passwd"),
    "device": _place(relative_path="/dev/zero"),
    "the directory": _place(relative_path="."),
    "the metadata": _place(relative_path=METADATA),
    "a file that is missing": _place(relative_path="__9_9.distcp"),
    "a file that is None": _place(relative_path=None),
}


def _sealed_models() -> Iterator[Damage]:
    values = {
        "model.num_layers": (0, -1, 10**9, 2**70, "2", None, [2], 2.5, True),
        "model.hidden_size": (0, -1, 10**9, 2**70, "8", None, {}),
        "model.num_attention_heads": (0, -4, "4", None, 3),
        "model.num_moe_experts": (-1, 0, 10**9, "8", 1.5),
        "model.vocab_size": (0, -1, 2**70, "x"),
        "model.ffn_hidden_size": (-1, "x"),
        "model.moe_router_topk": (0, -1, 10**6, "x", None),
        "model.kv_channels": (0, -1, "x"),
        "model.num_query_groups": (0, -1, 10**6, "x"),
        "model.normalization": ("", 3, None),
        "model.moe_layer_freq": ([], "x", 0, [5]),
    }
    for key, bad in values.items():
        for value in bad:
            part = EXPERTS if "moe" in key and key != "model.num_moe_experts" else "model"
            part = MLP if key == "model.ffn_hidden_size" else part
            yield Damage(name=f"sealed {key}={value!r}", apply=partial(_seal_model, {key: value}), part=part)
    yield Damage(name="sealed model with an unknown key", apply=partial(_seal_model, {"model.x": 1}), part=SETTINGS)
    for name, settings in {"no settings": {}, "no model": {"optimizer": {}}, "an empty model": {"model": {}}}.items():
        yield Damage(name=f"sealed {name}", apply=partial(_seal_settings, settings), part=SETTINGS)


def _seal_model(values: dict[str, Any], folder: Path) -> Path:
    return seal(_checkpoint(folder), lambda body: body["settings"]["model"].update(values))


def _seal_settings(settings: dict[str, Any], folder: Path) -> Path:
    return seal(_checkpoint(folder), lambda body: body.update(settings=settings))


def _other_things() -> Iterator[Damage]:
    """Yield damages that replace a checkpoint by something that is no checkpoint, under the same name."""
    for name, make in {
        "nothing": lambda path: None,
        "an empty directory": lambda path: path.mkdir(),
        "a file": lambda path: path.write_bytes(b"x"),
        "a link to nothing": lambda path: path.symlink_to("nowhere"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a pipe": os.mkfifo,
        "a folder of checkpoints": _folder_of_checkpoints,
        "the folder of a run": _folder_of_run,
        "a folder with a tracker of Megatron-LM": _folder_of_megatron,
    }.items():
        yield Damage(name=name, apply=partial(_instead, make), part=RUN if name == "the folder of a run" else "all")


def _instead(make: Callable[[Path], object], folder: Path) -> Path:
    path = _checkpoint(folder)
    path.rename(folder / "kept")
    make(path)
    return path


def _folder_of_checkpoints(path: Path) -> None:
    path.mkdir()
    shutil.copytree(path.parent / "kept", path / directory_name(NEW))


def _folder_of_run(path: Path) -> None:
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text("{}")
    shutil.copytree(path.parent / "kept", path / "checkpoints" / directory_name(NEW))


def _folder_of_megatron(path: Path) -> None:
    path.mkdir()
    (path / "latest_checkpointed_iteration.txt").write_text("../../../x")


# -- windows ----------------------------------------------------------------------------------------------------


def damaged_windows() -> list[Damage]:
    """Return damages of the window ``window_0000030``."""
    return [*(Damage(name=case.name, apply=case.put) for case in hostile_windows()), *_torn_windows()]


def _torn_windows() -> Iterator[Damage]:
    for rank in range(WORLD_SIZE):
        for what in ("cut to a half", "cut by one byte", "without bytes", "one byte more", "zeros", "missing"):
            yield Damage(name=f"rank {rank}: {what}", apply=partial(_tear_window, rank, what))
    yield Damage(name="files of two windows", apply=_mix_windows)
    yield Damage(name="rank files exchanged", apply=_exchange_ranks)


def _tear_window(rank: int, what: str, folder: Path) -> Path:
    return tear_file(folder / sample_name(NEW) / rank_name(rank), what)


def _mix_windows(folder: Path) -> Path:
    path = folder / sample_name(NEW) / rank_name(1)
    other = next(each for each in sorted(folder.glob("window_*")) if each.name != sample_name(NEW))
    shutil.copyfile(other / rank_name(1), path)
    return path.parent


def _exchange_ranks(folder: Path) -> Path:
    one, two = (folder / sample_name(NEW) / rank_name(rank) for rank in range(2))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return one.parent


# -- Hugging Face folders ---------------------------------------------------------------------------------------


def damaged_folders() -> list[Damage]:
    """Return damages of the Hugging Face folder ``hf`` that a reader can find without checksums."""
    return [*_torn_folders(), *_headers(), *_indexes(), *_configs(), *_odd_folder_files()]


def _hf(folder: Path) -> Path:
    return folder / "hf"


def _torn_folders() -> Iterator[Damage]:
    for length in (0, 1, 7, 8, 9, 100, -1, -100, -4096):
        yield Damage(name=f"safetensors cut at {length}", apply=partial(_cut_safetensors, length))
    yield Damage(name="bytes after the tensors", apply=lambda folder: _append(folder, b"\0" * 10))
    for name in (CONFIG, SAFETENSORS):
        yield Damage(name=f"without {name}", apply=partial(_remove, name))


def _cut_safetensors(length: int, folder: Path) -> Path:
    path = _hf(folder) / SAFETENSORS
    return _write(path, path.read_bytes()[:length])


def _append(folder: Path, content: bytes) -> Path:
    path = _hf(folder) / SAFETENSORS
    return _write(path, path.read_bytes() + content)


def _remove(name: str, folder: Path) -> Path:
    (_hf(folder) / name).unlink()
    return _hf(folder)


def _split(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (_hf(folder) / SAFETENSORS).read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(folder: Path, header: bytes, payload: bytes, length: int | None = None) -> Path:
    head = struct.pack("<Q", len(header) if length is None else length)
    return _write(_hf(folder) / SAFETENSORS, head + header + payload)


def _set_header(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    header, payload = _split(folder)
    change(header)
    return _join(folder, json.dumps(header).encode(), payload)


def _raw_header(content: Callable[[bytes], bytes], length: int | None, folder: Path) -> Path:
    header, payload = _split(folder)
    return _join(folder, content(json.dumps(header).encode()), payload, length)


def _one(header: dict[str, Any]) -> dict[str, Any]:
    return header["model.norm.weight"]  # type: ignore[no-any-return]


def _name_changes() -> Iterator[tuple[str, Callable[[dict[str, Any]], object]]]:
    for text in ("../x", "/etc/passwd", "", "\0", "a\nb", "\x1b[2J", "a" * 5000, "\u202e", "\ud800", "__proto__"):
        yield (
            f"a tensor named {text[:12]!r}",
            lambda header, text=text: header.update({text: header.pop("model.norm.weight")}),
        )


def _headers() -> Iterator[Damage]:
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        **dict(_name_changes()),
        "overlapping offsets": lambda header: _one(header).update(
            data_offsets=next(each["data_offsets"] for name, each in header.items() if name == "lm_head.weight")
        ),
        "offsets beyond the file": lambda header: _one(header).update(data_offsets=[HUGE, HUGE + 32]),
        "offsets in reverse": lambda header: _one(header)["data_offsets"].reverse(),
        "offsets below 0": lambda header: _one(header).update(data_offsets=[-32, 0]),
        "offsets of 2**64": lambda header: _one(header).update(data_offsets=[2**64 - 32, 2**64]),
        "one offset": lambda header: _one(header).update(data_offsets=[0]),
        "no offsets": lambda header: _one(header).pop("data_offsets"),
        "offsets that are texts": lambda header: _one(header).update(data_offsets=["0", "32"]),
        "unknown dtype": lambda header: _one(header).update(dtype="F31"),
        "dtype that is null": lambda header: _one(header).update(dtype=None),
        "integers": lambda header: _one(header).update(dtype="I32"),
        "shape of one more": lambda header: _one(header).update(shape=[9]),
        "shape below 0": lambda header: _one(header).update(shape=[-8]),
        "shape of 2**64": lambda header: _one(header).update(shape=[2**33, 2**33]),
        "shape of 2**40": lambda header: _one(header).update(shape=[2**40]),
        "shape of floats": lambda header: _one(header).update(shape=[8.0]),
        "another shape": lambda header: _one(header).update(shape=[2, 4]),
        "no shape": lambda header: _one(header).pop("shape"),
        "a tensor that is null": lambda header: header.update({"model.norm.weight": None}),
        "a tensor missing": lambda header: header.pop("model.norm.weight"),
        "no tensors": lambda header: header.clear(),
    }
    for name, change in changes.items():
        yield Damage(name=f"header: {name}", apply=partial(_set_header, change))
    raw: dict[str, Callable[[bytes], bytes]] = {
        "not JSON": lambda header: b"x" * len(header),
        "a list": lambda header: b"[]",
        "null": lambda header: b"null",
        "nested lists": lambda header: b"[" * 100_000,
        "invalid UTF-8": lambda header: b"\xff" + header[1:],
        "cut JSON": lambda header: header[:-1],
        "pickle": lambda header: pickle.dumps(Payload()),
        "a name twice": lambda header: header[:-1] + b',"model.norm.weight":' + b"null}",
    }
    for name, content in raw.items():
        yield Damage(name=f"header: {name}", apply=partial(_raw_header, content, None))
    for length in (0, 1, 2, 50, 10**6, HUGE, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8):
        yield Damage(name=f"header of {length} bytes", apply=partial(_raw_header, lambda header: header, length))


def _indexes() -> Iterator[Damage]:
    names = ("../hf/model.safetensors", "/etc/passwd", "missing.safetensors", "", ".", "..", "config.json", "a\0b")
    names += ("a\nb.safetensors", "\x1b[2J.safetensors", "a" * 5000, "file:///etc/passwd", "\ud800.safetensors")
    for text in names:
        content = {"weight_map": {"model.norm.weight": text}}
        yield Damage(name=f"index names {text[:20]!r}", apply=partial(_put_index, json.dumps(content).encode()))
    for name, content in {
        "only some tensors": json.dumps({"weight_map": {"model.norm.weight": SAFETENSORS}}).encode(),
        "an unknown tensor": json.dumps({"weight_map": {"x": SAFETENSORS}}).encode(),
        "a tensor with a terminal sequence": json.dumps({"weight_map": {"\x1b[2J": SAFETENSORS}}).encode(),
        "numbers": b'{"weight_map": {"model.norm.weight": 3}}',
        "a list": b'{"weight_map": []}',
        "no map": b"{}",
        "no object": b"[]",
        "nested lists": b"[" * 100_000,
        "not JSON": b"x",
        "invalid UTF-8": b"\xff\xfe",
        "pickle": pickle.dumps(Payload()),
        "empty": b"",
    }.items():
        yield Damage(name=f"index: {name}", apply=partial(_put_index, content))


def _put_index(content: bytes, folder: Path) -> Path:
    return _write(_hf(folder) / INDEX, content)


def _configs() -> Iterator[Damage]:
    values: dict[str, tuple[Any, ...]] = {
        "model_type": (None, 3, "", "llama", "../x", "\x1b[2J", ["mixtral"]),
        "hidden_size": (None, 0, -8, 16, 10**12, 2**70, "8", 8.0, [8], True),
        "num_hidden_layers": (None, 0, -1, 2, 10**9, 2**70, "3", 3.5, {}),
        "num_attention_heads": (None, 0, -1, 3, "4", 10**9),
        "num_key_value_heads": (0, -1, 3, "2", 10**9),
        "head_dim": (0, -1, 7, "6", 10**12, None, 2.5),
        "num_local_experts": (None, 0, -1, 2, 10**9, "3"),
        "num_experts_per_tok": (None, 0, -1, "2", 10**9),
        "intermediate_size": (None, 0, -1, 13, "12"),
        "vocab_size": (None, 0, -1, 41, "40", 2**70),
        "rope_theta": (None, "x", [], float("nan"), float("inf"), -1, 0),
        "rms_norm_eps": (None, "x", [], float("nan"), -1.0),
        "tie_word_embeddings": (3, "x", None, []),
        "hidden_act": (3, "relu", None),
        "rope_scaling": ({"type": "linear", "factor": 2}, "x", [1]),
        "rope_parameters": ({"rope_type": "linear"}, "x"),
        "sliding_window": (4, -1, "x", [1]),
        "max_position_embeddings": (None, 0, -1, "x"),
    }
    for key, bad in values.items():
        for value in bad:
            yield Damage(name=f"config: {key}={value!r}", apply=partial(_put_config, {key: value}))
    for name, content in {
        "a list": b"[]",
        "nested lists": b"[" * 100_000,
        "not JSON": b"x",
        "empty": b"",
        "null": b"null",
        "invalid UTF-8": b'{"model_type": "\xff"}',
        "pickle": pickle.dumps(Payload()),
        "a number of 1,000,000 digits": b'{"hidden_size": ' + b"9" * 1_000_000 + b"}",
    }.items():
        yield Damage(name=f"config: {name}", apply=partial(_raw_config, content))


def _put_config(values: dict[str, Any], folder: Path) -> Path:
    path = _hf(folder) / CONFIG
    return _write(path, json.dumps({**json.loads(path.read_text()), **values}).encode())


def _raw_config(content: bytes, folder: Path) -> Path:
    return _write(_hf(folder) / CONFIG, content)


def _odd_folder_files() -> Iterator[Damage]:
    for name in (SAFETENSORS, INDEX, CONFIG):
        for what, make in ODD_FILES.items():
            yield Damage(name=f"{name}: {what}", apply=partial(_odd, name, make))


def _odd(name: str, make: Callable[[Path], object], folder: Path) -> Path:
    path = _hf(folder) / name
    path.unlink(missing_ok=True)
    make(path)
    return path.parent
