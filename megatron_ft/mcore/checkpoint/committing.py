"""Adds the files of rank 0 to those of all ranks, which completes a checkpoint; the manifest is last."""

import importlib.metadata
import io
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig

from megatron_ft.mcore.checkpoint.writer import BACKEND, BACKEND_VERSION, PlannedWrite, metadata_bytes
from megatron_ft.snapshot.storage.files import FileEntry, fsync_directory, write_file
from megatron_ft.snapshot.storage.manifest import Manifest, write_manifest

COMMON_NAME, METADATA_NAME, FORMAT_NAME = "common.pt", ".metadata", "metadata.json"


def commit_files(
    directory: Path,
    planned: PlannedWrite,
    written: list[dict[str, Any]],
    make_manifest: Callable[[tuple[FileEntry, ...]], Manifest],
) -> int:
    """Write Megatron's metadata and the manifest; return the bytes of the checkpoint.

    ``written`` has the ``results`` and ``entries`` of every rank, in rank order. After an OSError the directory is not
    a checkpoint.
    """
    entries = [FileEntry(**entry) for of_rank in written for entry in of_rank["entries"]]
    content = metadata_bytes(planned, [of_rank["results"] for of_rank in written])
    entries.append(write_file(directory, METADATA_NAME, content))
    form = json.dumps(asdict(CheckpointingConfig(BACKEND, BACKEND_VERSION))).encode()
    entries.append(write_file(directory, FORMAT_NAME, form))
    # The names of all files are durable before the manifest, whose existence makes the directory a checkpoint.
    fsync_directory(directory)
    write_manifest(directory, make_manifest(tuple(sorted(entries, key=lambda entry: entry.name))))
    return sum(entry.num_bytes for entry in entries)


def torch_bytes(content: dict[str, Any]) -> bytes:
    """Serialize ``content`` with ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def software() -> dict[str, str]:
    """Return the versions of the software that writes the checkpoint."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "numpy")}
    return {"python": platform.python_version(), **packages}
