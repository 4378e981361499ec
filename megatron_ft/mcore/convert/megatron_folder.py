"""Exports a dense checkpoint as a folder of checkpoints in the layout of Megatron-LM."""

import errno
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.mcore.checkpoint.metadata import COMMON_NAME, read_common
from megatron_ft.mcore.convert.dense_files import WEIGHTS_ONLY, DenseReader
from megatron_ft.mcore.convert.folder import check_space
from megatron_ft.mcore.convert.megatron_arguments import megatron_arguments
from megatron_ft.mcore.convert.weights import check_new, manifest_of, open_weights
from megatron_ft.snapshot.storage.checkpoints import MEGATRON_LATEST_NAME, RELEASE_NAME, directory_name
from megatron_ft.snapshot.storage.files import fsync_directory, write_atomically, write_file
from megatron_ft.snapshot.storage.manifest import Manifest

_WEIGHTS_METADATA = {"singleton_local_shards": True, "non_homogeneous_layers": True}
"""Entry of ``common.pt`` that Megatron-LM needs (how tensors are stored), but checkpoints of only weights lack."""


def export_to_megatron(checkpoint: Path, out: Path, *, progress: Callable[[str], None] = print) -> Path:
    """Write the folder ``out``, from which Megatron-LM loads ``checkpoint`` with ``--load``.

    The data files are links to the files of ``checkpoint``, or copies if ``out`` is on another file system.
    ``common.pt`` is new, because Megatron-LM expects its arguments there as ``args``. A checkpoint that contains only
    weights is exported as a *release*, which belongs to no iteration. The exported checkpoint has a manifest, and is
    verified at the end. The folder gets the name ``out`` only when it is complete.

    Args:
        progress: receives a line that states whether the files were linked or copied.

    Returns:
        The exported checkpoint, a directory in ``out``.

    Raises:
        CheckpointError: the checkpoint is damaged, its manifest does not describe the model, or the files do not
            contain what was written.
        ConfigError: ``out`` exists, the disk has too little space, or the checkpoint has quantized optimizer state.
        OSError: a file cannot be written.
    """
    check_new(out)
    reader = open_weights(checkpoint)
    model, manifest = reader.model(), manifest_of(reader)
    regime = manifest.settings.get("optimizer", {}).get("precision.regime")
    if regime is not None:
        raise ConfigError.of(
            "checkpoint",
            str(checkpoint),
            f"has optimizer state of precision.regime={regime}, which Megatron-LM cannot load; write only its weights "
            "with `tools/convert_checkpoint.py weights`, then export this new checkpoint",
        )
    is_release = WEIGHTS_ONLY in manifest.settings
    name = RELEASE_NAME if is_release else directory_name(manifest.iteration)
    common = {"content_metadata": _WEIGHTS_METADATA, **read_common(checkpoint)}
    common["args"] = megatron_arguments(model, manifest, weights_only=is_release)
    if "opt_param_scheduler" in common:
        # Earlier versions of this project stored the position at the beginning of the iteration.
        common["opt_param_scheduler"]["num_steps"] = manifest.consumed_samples
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    target = partial / name
    target.mkdir(parents=True)
    try:
        how = _link_files(checkpoint, target, manifest)
        content = io.BytesIO()
        torch.save(common, content)
        entries = [entry for entry in manifest.files if entry.name != COMMON_NAME]
        entries.append(write_file(target, COMMON_NAME, content.getvalue()))
        fsync_directory(target)
        replace(manifest, files=tuple(sorted(entries, key=lambda entry: entry.name))).write(target)
        tracker = RELEASE_NAME if is_release else str(manifest.iteration)
        write_atomically(partial, MEGATRON_LATEST_NAME, tracker.encode())
        _verify(target, common)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_directory(out.parent)
    progress(f"{len(entries)} files, of which {len(entries) - 1} are {how}")
    return out / name


def _link_files(checkpoint: Path, target: Path, manifest: Manifest) -> str:
    """Link or copy the files of ``checkpoint`` except ``common.pt``. Return ``links`` or ``copies``."""
    names = [entry.name for entry in manifest.files if entry.name != COMMON_NAME]
    try:
        for name in names:
            # The data files of a checkpoint never change, so both directories may share them.
            os.link(checkpoint / name, target / name, follow_symlinks=False)
        return "links"
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
    check_space(target, sum(entry.num_bytes for entry in manifest.files))
    for name in names:
        (target / name).unlink(missing_ok=True)
        shutil.copyfile(checkpoint / name, target / name)
        with (target / name).open("rb") as file:
            os.fsync(file.fileno())
    return "copies"


def _verify(target: Path, common: dict[str, Any]) -> None:
    DenseReader.open(target)
    stored = read_common(target)
    if stored.get("args") != common["args"] or stored.keys() != common.keys():
        raise CheckpointError(f"{target / COMMON_NAME}: does not contain what was written")
