"""Writes checkpoints that contain only weights: of one dense checkpoint, or the mean of several checkpoints."""

import math
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.formatting import unlike_tensors
from megatron_ft.mcore.convert.dense_files import WEIGHTS_ONLY, DenseReader, WeightsWriter
from megatron_ft.mcore.convert.folder import check_space
from megatron_ft.mcore.convert.model_tensors import check_tensors
from megatron_ft.mcore.convert.resume import continued
from megatron_ft.mcore.convert.streams import Values, tensor_of
from megatron_ft.snapshot.storage.files import fsync_directory
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.run_settings import other_model

MOST_FILE_BYTES = 5_000_000_000
"""Default limit for the size of a file in bytes, as in Hugging Face folders."""
_SUM_TOLERANCE = 1e-6
"""Largest accepted difference between 1 and the sum of a mean's factors, because users write rounded decimals."""
_PROGRESS_TENSORS = 100
_PARTIAL = "weights"
Tensors = Iterator[tuple[str, Values]]
Progress = Callable[[str], None]


def check_new(out: Path) -> None:
    """Create the parent folders of ``out``. Raise ConfigError if ``out`` exists."""
    if out.exists() or out.is_symlink():
        raise ConfigError.of("out", str(out), "must not exist")
    out.parent.mkdir(parents=True, exist_ok=True)


def write_weights(
    out: Path, tensors: Tensors, manifest: Manifest, *, num_bytes: int, most_file_bytes: int = MOST_FILE_BYTES
) -> Manifest:
    """Write a checkpoint of weights, and verify it. The directory gets the name ``out`` only when it is complete.

    Args:
        manifest: result of ``weights_manifest``.
        num_bytes: size of all tensors together, for which the disk must have space.
        most_file_bytes: a new file begins when a file has reached this size.

    Raises:
        CheckpointError: a tensor cannot be read, or the files do not contain what was written.
        ConfigError: ``out`` exists, or the disk has too little space.
        OSError: a file cannot be written.
    """
    check_new(out)
    check_space(out.parent, num_bytes)
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        return _complete(WeightsWriter(directory=partial, most_file_bytes=most_file_bytes), tensors, manifest, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def continue_weights(
    out: Path,
    tensors: Callable[[Collection[str]], Tensors],
    manifest: Manifest,
    *,
    source: Mapping[str, Any],
    num_bytes: int,
    most_file_bytes: int = MOST_FILE_BYTES,
) -> Manifest:
    """Write a checkpoint of weights like ``write_weights``. If an earlier call with the same ``source`` was
    interrupted, verify and keep its complete files. Until the end, files are in the folder ``.NAME.partial``.

    Args:
        tensors: function that is called with the names of the complete tensors, and returns all other tensors.
        source: JSON object that determines the content of all files, including ``most_file_bytes``.

    Raises:
        CheckpointError: a tensor cannot be read, or the files do not contain what was written.
        ConfigError: ``out`` exists, another conversion to ``out`` is running or was interrupted, or the disk has too
            little space.
        OSError: a file cannot be read or written.
    """
    check_new(out)
    work = out.parent / f".{out.name}.partial"
    with continued(work, source, files=work / _PARTIAL, out=out) as record:
        writer = WeightsWriter(directory=work / _PARTIAL, most_file_bytes=most_file_bytes, record=record)
        for path in writer.directory.iterdir():
            if path.name not in record.names():
                path.unlink()
        present = sum(file.entry.num_bytes for file in record.files)
        check_space(out.parent, max(0, num_bytes - present))
        names = {tensor.name for file in record.files for tensor in file.tensors}
        written = _complete(writer, tensors(names), manifest, out)
        shutil.rmtree(work)
    return written


def _complete(writer: WeightsWriter, tensors: Tensors, manifest: Manifest, out: Path) -> Manifest:
    writer.write(tensors)
    written = writer.finish(manifest)
    writer.directory.rename(out)
    fsync_directory(out.parent)
    return written


def weights_manifest(run_name: str, model: Mapping[str, Any], origin: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a checkpoint of weights, with an empty list of files.

    Args:
        run_name: name that tools print.
        model: settings of the model, by dotted key, e.g. ``model.num_layers``.
        origin: description of where the weights come from.
    """
    return Manifest(
        run_id=secrets.token_hex(16),
        run_name=run_name,
        generation=0,
        topology={"world_size": 1},
        iteration=0,
        consumed_samples=0,
        settings={"model": dict(model), WEIGHTS_ONLY: dict(origin)},
        software={"torch": torch.__version__},
        files=(),
    )


def extract_weights(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    most_file_bytes: int = MOST_FILE_BYTES,
    progress: Progress = print,
) -> Manifest:
    """Write the weights and buffers of a dense checkpoint, without its optimizer state.

    Args:
        dtype: dtype of the written weights; None to keep the dtypes. Integer and boolean buffers are never changed.
        progress: receives a line for every hundred tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or its manifest does not describe the model.
        ConfigError: ``out`` exists, or the disk has too little space.
        OSError: a file cannot be written.
    """
    reader = open_weights(checkpoint)

    def read(name: str) -> Values:
        found = reader.values(name)
        if dtype in (None, found.dtype) or not found.dtype.is_floating_point:
            return found
        return tensor_of(found).to(dtype)

    return write_weights(
        out,
        _counted(sorted(reader.weights), read, progress),
        weights_manifest(manifest_of(reader).run_name, model_keys(reader), {"from": origin_of(reader)}),
        num_bytes=_num_bytes(reader, dtype),
        most_file_bytes=most_file_bytes,
    )


def average_weights(
    checkpoints: Sequence[Path],
    out: Path,
    *,
    factors: Sequence[float] | None = None,
    most_file_bytes: int = MOST_FILE_BYTES,
    progress: Progress = print,
) -> Manifest:
    """Write the mean of the weights of several dense checkpoints of one model.

    Means are computed in FP32, or in FP64 if the weights are FP64, in the order of ``checkpoints``. They are rounded
    once, to the dtype of the checkpoints. Only a few tensors are in memory at a time.

    Args:
        checkpoints: at least two checkpoints, of any parallel layouts, with or without optimizer state.
        factors: factor of each checkpoint, from 0 to 1; their sum must be 1. None for equal factors.
        progress: receives a line for every hundred tensors.

    Raises:
        CheckpointError: a checkpoint is damaged; its manifest does not describe the model; or it differs from the first
            checkpoint in its model, in a tensor's name, shape or dtype, or in an integer or boolean buffer.
        ConfigError: the factors are not valid, ``out`` exists, or the disk has too little space.
        OSError: a file cannot be written.
    """
    if len(checkpoints) < 2:
        raise ConfigError.of("checkpoint", len(checkpoints), "must be at least 2 checkpoints")
    _check_factors(factors, len(checkpoints))
    readers = [open_weights(path) for path in checkpoints]
    for reader in readers[1:]:
        _check_same(readers[0], reader)
    used = [1.0 / len(readers)] * len(readers) if factors is None else list(factors)
    origin = {"mean_of": [{**origin_of(reader), "factor": used[number]} for number, reader in enumerate(readers)]}
    return write_weights(
        out,
        _counted(sorted(readers[0].weights), lambda name: _mean(readers, factors, name), progress),
        weights_manifest(manifest_of(readers[0]).run_name, model_keys(readers[0]), origin),
        num_bytes=_num_bytes(readers[0], None),
        most_file_bytes=most_file_bytes,
    )


def _check_factors(factors: Sequence[float] | None, count: int) -> None:
    if factors is None:
        return
    if len(factors) != count:
        raise ConfigError.of("--weights", _words(factors), f"must be {count} numbers, one for each checkpoint")
    if not all(0 <= factor <= 1 for factor in factors) or abs(math.fsum(factors) - 1) > _SUM_TOLERANCE:
        raise ConfigError.of(
            "--weights", _words(factors), f"must be from 0 to 1 with the sum 1; the sum is {math.fsum(factors):g}"
        )


def _words(factors: Sequence[float]) -> str:
    return " ".join(f"{factor:g}" for factor in factors)


def _check_same(first: DenseReader, other: DenseReader) -> None:
    found = other_model(manifest_of(first).settings, manifest_of(other).settings)
    if found:
        differences = "; ".join(f"{each.key} is {each.stored} in the first and {each.present} here" for each in found)
        raise CheckpointError(f"{other.directory}: has another model than {first.directory}: {differences}")
    lacks, adds = (sorted(one.keys() - two.keys()) for one, two in _both(first.weights, other.weights))
    if lacks or adds:
        raise CheckpointError(
            f"{other.directory}: has other tensors than {first.directory}: {unlike_tensors(lacks, adds)}"
        )
    for name, entry in sorted(first.weights.items()):
        kinds = [(tuple(each.size), str(each.properties.dtype)) for each in (entry, other.weights[name])]
        if kinds[0] != kinds[1]:
            (shape, dtype), (here, dtype_here) = kinds
            raise CheckpointError(
                f"{other.directory}: {name} is {dtype_here} {list(here)}, but in {first.directory} it is {dtype} "
                f"{list(shape)}"
            )


def _both(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]:
    return (one, two), (two, one)


def _mean(readers: Sequence[DenseReader], factors: Sequence[float] | None, name: str) -> torch.Tensor:
    first = readers[0].read(name)
    if not first.is_floating_point():
        for reader in readers[1:]:
            if not torch.equal(first, reader.read(name)):
                raise CheckpointError(
                    f"{reader.directory}: {name} differs from the same tensor in {readers[0].directory}; tensors of "
                    f"{first.dtype} cannot be averaged, so they must be equal"
                )
        return first
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = first.to(wide) if factors is None else first.to(wide) * factors[0]
    for number, reader in enumerate(readers[1:], 1):
        value = reader.read(name).to(wide)
        total = total + (value if factors is None else value * factors[number])
    # Divide once at the end: this is more exact than to multiply each term by a rounded factor 1/n.
    return (total / len(readers) if factors is None else total).to(first.dtype)


def open_weights(checkpoint: Path) -> DenseReader:
    """Open and verify a checkpoint. Raise CheckpointError if its manifest does not describe the model, or if a tensor
    of the model is missing."""
    reader = DenseReader.open(checkpoint)
    check_tensors(reader.weights, reader.model(), str(checkpoint))
    return reader


def manifest_of(reader: DenseReader) -> Manifest:
    """Return the manifest of a checkpoint that ``open_weights`` has opened."""
    assert reader.manifest is not None, "a checkpoint without a manifest was opened"
    return reader.manifest


def model_keys(reader: DenseReader) -> dict[str, Any]:
    """Return the settings of the checkpoint's model, from the manifest, by dotted key."""
    # Leave out the seed of the initial weights, because the weights have been trained since.
    found = manifest_of(reader).settings["model"].items()
    return {key: value for key, value in found if key.startswith("model.")}


def origin_of(reader: DenseReader) -> dict[str, Any]:
    """Return a description of the checkpoint, for the manifest of a checkpoint that is made from it."""
    manifest = manifest_of(reader)
    return {"run_name": manifest.run_name, "run_id": manifest.run_id, "iteration": manifest.iteration}


def size_of(reader: DenseReader, name: str) -> int:
    """Return the number of bytes of a tensor."""
    entry = reader.weights[name]
    return prod(entry.size) * int(entry.properties.dtype.itemsize)


def _num_bytes(reader: DenseReader, dtype: torch.dtype | None) -> int:
    stored = [(prod(entry.size), entry.properties.dtype) for entry in reader.weights.values()]
    return sum(count * (dtype if dtype and old.is_floating_point else old).itemsize for count, old in stored)


def _counted(names: Sequence[str], read: Callable[[str], Values], progress: Progress) -> Tensors:
    for number, name in enumerate(names, 1):
        yield name, read(name)
        if number % _PROGRESS_TENSORS == 0 or number == len(names):
            progress(f"{number}/{len(names)} tensors")
