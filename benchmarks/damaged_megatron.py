"""Damaged folders of Megatron-LM: checkpoints in the format ``torch_dist`` without a manifest of this project.

Such folders have no checksums, so the damages are those that a reader can find. Megatron-Core's own
``dist_checkpointing.save`` writes the intact folder: a weight of all layers or experts is one tensor, and the arguments
are in ``common.pt``.
"""

import argparse
import io
import os
import pickle
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.damaged_inputs import (
    COMMON,
    DTYPE,
    METADATA,
    METADATA_CHANGES,
    NAMES,
    SHAPES,
    VALUES,
    Damage,
    tear_file,
)
from benchmarks.hostile_files import ODD_FILES, Payload
from megatron_ft.config.job import JobConfig
from megatron_ft.snapshot.storage.checkpoints import MEGATRON_LATEST_NAME, directory_name
from megatron_ft.testing.stored_samples import NEW

ARGUMENTS, TRACKER, FORMAT = "arguments", "tracker", "format"
"""Parts of a folder: arguments of Megatron-LM in ``common.pt``, the file that names the newest checkpoint, and
``metadata.json``."""
FOLDER, SOUND = "theirs", "sound"
"""Folders of Megatron-LM that a case gets: one that is damaged, and one that is not."""
_FORMAT_NAME = "metadata.json"


def write_folder(folder: Path, config: JobConfig, vocab_size: int) -> None:
    """Save random weights as Megatron-LM does, with its arguments. ``folder`` is a new directory, and its tracker names
    the checkpoint of iteration ``NEW``."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_ft.config.identity import settings_of
    from megatron_ft.mcore.convert.megatron_arguments import megatron_arguments
    from megatron_ft.mcore.convert.weights import weights_manifest
    from megatron_ft.mcore.device.install import install
    from megatron_ft.mcore.model.build import build_bare_model
    from megatron_ft.mcore.model.transformer_config import build_transformer_config
    from megatron_ft.testing import engines

    directory = folder / directory_name(NEW)
    directory.mkdir(parents=True)
    _, implementation = install(config)
    settings = settings_of(config, data_fingerprint="", vocab_size=vocab_size)
    manifest = replace(weights_manifest("theirs", settings["model"], {}), iteration=NEW)
    model = replace(config.model, vocab_size=vocab_size)
    # Megatron would start a process that serves a queue, and outlives the save.
    with engines.groups_of(config) as groups, mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        built = build_bare_model(
            config,
            build_transformer_config(config, implementation),
            vocab_size=vocab_size,
            device=torch.device("cpu"),
            pg_collection=groups.pg_collection,
        )
        arguments = megatron_arguments(model, manifest, weights_only=True)
        state = {"args": arguments, "iteration": NEW, "checkpoint_version": 3.0, "model": built.sharded_state_dict()}
        del groups
        dist_checkpointing.save(state, str(directory))
    (folder / MEGATRON_LATEST_NAME).write_text(str(NEW))


def damaged_megatron() -> list[Damage]:
    """Return damages of the folder ``FOLDER``. ``Damage.apply`` gets the parent directory of this folder."""
    return [*_trackers(), *_torn(), *_contents(), *_metadata(), *_arguments(), *_odd_files(), *_odd_directories()]


def _checkpoint(folder: Path) -> Path:
    return folder / FOLDER / directory_name(NEW)


def _data(folder: Path) -> list[Path]:
    return sorted(_checkpoint(folder).glob("*.distcp"))


def _trackers() -> Iterator[Damage]:
    names = {
        "of a checkpoint that is missing": b"31",
        "of a release that is missing": b"release",
        "in a parent": b"../../../etc",
        "of an absolute path": b"/etc",
        "below 0": b"-30",
        "in another notation": b"3e1",
        "of two lines": b"30\n31",
        "of 5000 digits": b"3" * 5000,
        "with a terminal sequence": b"\x1b[2J",
        "of invalid bytes": b"\xff\xfe",
        "in UTF-16": "30".encode("utf-16"),
        "without a content": b"",
        "of a line": b"\n",
        "of zeros": bytes(2),
        "of a pickle": pickle.dumps(Payload()),
    }
    for what, content in names.items():
        yield Damage(name=f"tracker {what}", apply=partial(_put_tracker, content), part=TRACKER)
    yield Damage(name="tracker missing", apply=_remove_tracker, part=TRACKER)
    yield Damage(name="tracker of another format", apply=_name_other_format, part=TRACKER)
    for what, make in ODD_FILES.items():
        yield Damage(name=f"tracker: {what}", apply=partial(_odd, MEGATRON_LATEST_NAME, make), part=TRACKER)


def _put_tracker(content: bytes, folder: Path) -> Path:
    (folder / FOLDER / MEGATRON_LATEST_NAME).write_bytes(content)
    return folder / FOLDER / MEGATRON_LATEST_NAME


def _remove_tracker(folder: Path) -> Path:
    (folder / FOLDER / MEGATRON_LATEST_NAME).unlink()
    return folder / FOLDER


def _name_other_format(folder: Path) -> Path:
    """Make the tracker name a checkpoint in Megatron's format ``torch``, which has one file for each rank."""
    path = folder / FOLDER / directory_name(10) / "mp_rank_00"
    path.mkdir(parents=True)
    (path / "model_optim_rng.pt").write_bytes(pickle.dumps(Payload()))
    _put_tracker(b"10", folder)
    return path.parent


def _torn() -> Iterator[Damage]:
    parts = {METADATA: METADATA, COMMON: COMMON, _FORMAT_NAME: FORMAT}
    for name, part in parts.items():
        for what in ("cut to a half", "cut by one byte", "without bytes", "zeros", "missing"):
            yield Damage(name=f"{name}: {what}", apply=partial(_tear, name, what), part=part)
    for what, part in (("cut to a half", METADATA), ("cut by one byte", METADATA), ("without bytes", METADATA)):
        yield Damage(name=f"last shard: {what}", apply=partial(_tear_shard, what), part=part)
    yield Damage(name="last shard: zeros", apply=partial(_tear_shard, "zeros"), part=VALUES)
    yield Damage(name="last shard: missing", apply=partial(_tear_shard, "missing"), part=METADATA)
    yield Damage(name="all shards: missing", apply=_remove_shards, part=METADATA)
    yield Damage(name="shards exchanged", apply=_exchange_shards, part=METADATA)


def _tear(name: str, what: str, folder: Path) -> Path:
    return tear_file(_checkpoint(folder) / name, what)


def _tear_shard(what: str, folder: Path) -> Path:
    return tear_file(_data(folder)[-1], what)


def _remove_shards(folder: Path) -> Path:
    for path in _data(folder):
        path.unlink()
    return _checkpoint(folder)


def _exchange_shards(folder: Path) -> Path:
    first, *_, last = _data(folder)
    one, other = first.read_bytes(), last.read_bytes()
    assert len(one) != len(other), "positions in both files would be valid"
    first.write_bytes(other)
    last.write_bytes(one)
    return first.parent


def _archive(content: object) -> bytes:
    """Return what ``torch.save`` writes; its pickle can run code."""
    import torch

    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _contents() -> Iterator[Damage]:
    contents = {
        "pickle with code": pickle.dumps(Payload()),
        "pickle with code, protocol 0": pickle.dumps(Payload(), protocol=0),
        "archive with code": _archive({"args": Payload(), "iteration": NEW}),
        "archive with code in place of all": _archive(Payload()),
        "text": b"not a checkpoint",
        "pickle of a list": pickle.dumps([1, 2]),
        "archive of a list": _archive([1, 2]),
        "archive of None": _archive(None),
        "archive header": b"PK\x03\x04" + bytes(200),
        "deep pickle": b"(" * 200_000,
    }
    for name in (METADATA, COMMON):
        for what, content in contents.items():
            yield Damage(name=f"{name}: {what}", apply=partial(_put, name, content), part=name)
    for what, content in {
        "a list": b"[]",
        "null": b"null",
        "nested lists": b"[" * 100_000,
        "invalid UTF-8": b"\xff",
        "another backend": b'{"sharded_backend": "zarr", "sharded_backend_version": 1}',
        "a backend that is a number": b'{"sharded_backend": 3, "sharded_backend_version": 1}',
        "an unknown version": b'{"sharded_backend": "torch_dist", "sharded_backend_version": 99}',
        "an unknown key": b'{"sharded_backend": "torch_dist", "code": "import os"}',
        "pickle": pickle.dumps(Payload()),
    }.items():
        yield Damage(name=f"{_FORMAT_NAME}: {what}", apply=partial(_put, _FORMAT_NAME, content), part=FORMAT)


def _put(name: str, content: bytes, folder: Path) -> Path:
    path = _checkpoint(folder) / name
    path.write_bytes(content)
    return path.parent


_PARTS: Mapping[str, str] = {"another dtype": DTYPE, "a tensor is missing": NAMES, "offset 0": VALUES}
"""Changes of the metadata that can be found only with the values of tensors, or with the names of all tensors."""
_SHAPES = ("another shape", "0 elements", "no dimension")


def _metadata() -> Iterator[Damage]:
    for name, change in METADATA_CHANGES.items():
        part = SHAPES if name in _SHAPES else VALUES if name == "the metadata" else _PARTS.get(name, METADATA)
        yield Damage(name=f"metadata: {name}", apply=partial(_change_metadata, change), part=part)
    yield Damage(name="metadata: another number of layers", apply=partial(_change_metadata, _one_layer), part=NAMES)


def _change_metadata(change: Callable[[Any], None], folder: Path) -> Path:
    path = _checkpoint(folder) / METADATA
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this process wrote it
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return path.parent


def _one_layer(metadata: Any) -> None:
    """Leave out the second layer of every stacked tensor, and its parts."""
    import torch

    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith("decoder.layers.") and hasattr(entry, "chunks"):
            entry.size = torch.Size((1, *entry.size[1:]))
            entry.chunks = [chunk for chunk in entry.chunks if chunk.offsets[0] == 0]


def _arguments() -> Iterator[Damage]:
    values: dict[str, tuple[Any, ...]] = {
        "num_layers": (0, -1, 10**9, 2**70, "2", None, [2], 2.5),
        "hidden_size": (0, -1, 10**9, "16", None),
        "num_attention_heads": (0, 3, None),
        "padded_vocab_size": (0, 10**9, "x", None),
        "num_experts": (-1, 0, 10**9, "2", 1.5),
        "moe_layer_freq": ("x", 0, [5], [1, 0, 1]),
        "swiglu": (False,),
        "squared_relu": (True,),
    }
    for key, bad in values.items():
        for value in bad:
            yield Damage(name=f"args: {key}={value!r}", apply=partial(_set_arguments, {key: value}), part=ARGUMENTS)
    for key in ("num_layers", "padded_vocab_size", "position_embedding_type"):
        yield Damage(name=f"args: without {key}", apply=partial(_drop_argument, key), part=ARGUMENTS)
    for what, replaced in {"missing": None, "a dictionary": {"num_layers": 2}, "empty": argparse.Namespace()}.items():
        yield Damage(name=f"args: {what}", apply=partial(_replace_arguments, replaced), part=ARGUMENTS)


def _change_common(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    import torch

    path = _checkpoint(folder) / COMMON
    common = torch.load(path, weights_only=False)  # this process wrote it
    change(common)
    torch.save(common, path)
    return path.parent


def _set_arguments(values: dict[str, Any], folder: Path) -> Path:
    return _change_common(lambda common: vars(common["args"]).update(values), folder)


def _drop_argument(key: str, folder: Path) -> Path:
    return _change_common(lambda common: delattr(common["args"], key), folder)


def _replace_arguments(replaced: Any, folder: Path) -> Path:
    return _change_common(
        lambda common: common.pop("args") if replaced is None else common.update(args=replaced), folder
    )


def _odd_files() -> Iterator[Damage]:
    parts = {METADATA: METADATA, COMMON: COMMON, _FORMAT_NAME: FORMAT}
    for name, part in parts.items():
        for what, make in ODD_FILES.items():
            apply = partial(_odd, f"{directory_name(NEW)}/{name}", make)
            yield Damage(name=f"{name}: {what}", apply=apply, part=part)
    for what, make in ODD_FILES.items():
        part = VALUES if what.startswith("sparse") else METADATA
        yield Damage(name=f"last shard: {what}", apply=partial(_odd_shard, make), part=part)


def _odd(name: str, make: Callable[[Path], object], folder: Path) -> Path:
    path = folder / FOLDER / name
    path.unlink()
    make(path)
    return path.parent


def _odd_shard(make: Callable[[Path], object], folder: Path) -> Path:
    path = _data(folder)[-1]
    path.unlink()
    make(path)
    return path.parent


def _odd_directories() -> Iterator[Damage]:
    makers: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: None,
        "empty": lambda path: path.mkdir(),
        "a file": lambda path: path.write_bytes(b"x"),
        "a link to nothing": lambda path: path.symlink_to("nowhere"),
        "a pipe": os.mkfifo,
    }
    for what, make in makers.items():
        yield Damage(name=f"checkpoint {what}", apply=partial(_instead, make))


def _instead(make: Callable[[Path], object], folder: Path) -> Path:
    path = _checkpoint(folder)
    path.rename(folder / "kept")
    make(path)
    return path.parent
