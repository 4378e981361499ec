"""Writes small windows and dense checkpoints with known bytes, for scripts that damage these files."""

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import xxhash

from megatron_ft.errors import CheckpointError
from megatron_ft.planning.snapshot.plan import Piece, WindowKey, align
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.files import write_file
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.window_file import MAGIC, rank_name, window_name, write_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import ITEM_BYTES, Slice, Window

WORLD_SIZE = 2
OLD, NEW = 20, 30
"""Iterations of the two samples (windows or checkpoints) of a test: of the older and of the newer sample."""
COMPONENTS = (
    ("weight", "bfloat16", 700),
    ("master", "float32", 700),
    ("exp_avg", "float32", 700),
    ("step", "int64", 1),
)
_DENSE_FILES = {"__0_0.distcp": 9000, "__1_0.distcp": 5000, ".metadata": 300, "common.pt": 200}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Result of loading the newest sample (window or checkpoint) that passes verification."""

    iteration: int | None
    """Iteration of the loaded sample; None if no sample passed verification."""
    is_equal: bool
    """Whether every loaded byte equals the saved byte."""
    reasons: tuple[str, ...]
    """Reasons why samples newer than the loaded sample were not loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of stored state (windows or dense checkpoints), with functions that save, load and delete samples of it."""

    name: str
    save: Callable[[Path, int], None]
    load: Callable[[Path], Loaded]
    retire: Callable[[Path], None]
    """Deletes all samples except the newest sample."""
    files: Callable[[Path, int], list[Path]]
    """Returns all files of one sample."""
    pointer_leads_nowhere: Callable[[Path], bool] = lambda folder: False
    """Returns whether the file ``latest``, which must name the newest sample, is damaged or names an incomplete sample.
    Returns False for kinds that have no such file."""


def sample_name(start_iteration: int) -> str:
    """Return the name of a sample window's directory."""
    return window_name(WindowKey(start_iteration=start_iteration, generation=0))


@lru_cache
def sample_window(start_iteration: int, rank: int) -> tuple[Window, tuple[bytes, ...]]:
    """Return a window of two slices, and the bytes of each slice. A slice has a piece for each of ``COMPONENTS``."""
    generator = random.Random(f"{start_iteration}/{rank}")
    window = Window(
        run_id="run-1",
        generation=0,
        topology={"data_parallel": WORLD_SIZE},
        rank=rank,
        world_size=WORLD_SIZE,
        start_iteration=start_iteration,
        num_slices=2,
        plan={"slices": [[1, 2], [3]]},
    )
    payload = []
    for index in range(window.num_slices):
        pieces, content = _sample_slice(generator)
        part = Slice(
            iteration=start_iteration + index,
            offset=align(window.num_bytes),
            num_bytes=len(content),
            header={"vote": {"loss": 2.5, "is_applied": True}},
            pieces=pieces,
        )
        part.hashes = part.hash_pieces(memoryview(content))
        window.slices.append(part)
        payload.append(content)
    return window, tuple(payload)


def _sample_slice(generator: random.Random) -> tuple[tuple[Piece, ...], bytes]:
    content = bytearray(align(16384 - 1))
    pieces: list[Piece] = []
    offset = 0
    for component, dtype, num_items in COMPONENTS:
        data = generator.randbytes(num_items * ITEM_BYTES[dtype])
        content[offset : offset + len(data)] = data
        pieces.append(
            Piece(
                parameter="decoder.layers.0.mlp.router.weight",
                tensor_part=0,
                component=component,
                dtype=dtype,
                start=0,
                stop=700,
                offset=offset,
                num_bytes=len(data),
            )
        )
        offset = align(offset + len(data), 64)
    return tuple(pieces), bytes(content)


def forge(
    manifest: bytes, payload: bytes, *, version: int = 2, length: int | None = None, magic: bytes = MAGIC
) -> bytes:
    """Return the bytes of a window file with the given manifest, which may be invalid, and a valid checksum."""
    digest = xxhash.xxh3_128_digest(manifest)
    head = struct.pack("<8sIQ16s", magic, version, len(manifest) if length is None else length, digest) + manifest
    return head + bytes(align(len(head)) - len(head)) + payload


def _save_window(folder: Path, iteration: int) -> None:
    for rank in range(WORLD_SIZE):
        window, payload = sample_window(iteration, rank)
        write_window(folder, window, [memoryview(content) for content in payload])


def _load_window(folder: Path) -> Loaded:
    windows = WindowFolder(folder)
    stored, damaged = windows.newest(WORLD_SIZE)
    reasons = tuple(f"{report.path}: {report.reason}" for report in damaged)
    if stored is None:
        return Loaded(iteration=None, is_equal=True, reasons=reasons)
    is_equal = all(_is_sample(windows, stored.start_iteration, rank) for rank in range(WORLD_SIZE))
    return Loaded(iteration=stored.start_iteration, is_equal=is_equal, reasons=reasons)


def _is_sample(windows: WindowFolder, start_iteration: int, rank: int) -> bool:
    (stored,) = (stored for stored in windows.list_windows() if stored.start_iteration == start_iteration)
    window, payload = sample_window(start_iteration, rank)
    with windows.open(stored, rank) as opened:
        read = [bytes(opened.read_slice(index)) for index in range(opened.window.num_slices)]
        return opened.window == window and tuple(read) == payload


def _retire_windows(folder: Path) -> None:
    WindowFolder(folder).retain(1, WORLD_SIZE)


def _window_files(folder: Path, iteration: int) -> list[Path]:
    return [folder / sample_name(iteration) / rank_name(rank) for rank in range(WORLD_SIZE)]


@lru_cache
def sample_checkpoint(iteration: int) -> dict[str, bytes]:
    """Return the content of each file of a dense checkpoint, by file name. The manifest is not included."""
    generator = random.Random(iteration)
    return {name: generator.randbytes(num_bytes) for name, num_bytes in _DENSE_FILES.items()}


def _save_dense(folder: Path, iteration: int) -> None:
    directory = checkpoints.start_directory(folder, iteration)
    files = tuple(write_file(directory, name, content) for name, content in sample_checkpoint(iteration).items())
    checkpoints.sync_directory(directory)
    manifest = Manifest(
        run_id="run-1",
        run_name="first",
        generation=0,
        topology={"world_size": WORLD_SIZE},
        iteration=iteration,
        consumed_samples=iteration * 16,
        settings={"optimizer": {"optimizer.lr": 0.001}},
        software={"torch": "2.13.0"},
        files=files,
    )
    manifest.write(directory)
    checkpoints.move_latest(folder, directory, iteration)


def _load_dense(folder: Path) -> Loaded:
    path, damaged = checkpoints.newest_valid(folder)
    reasons = tuple(f"{report.path}: {report.reason}" for report in damaged)
    if path is None:
        return Loaded(iteration=None, is_equal=True, reasons=reasons)
    (stored,) = (stored for stored in checkpoints.list_checkpoints(folder) if stored.path == path)
    found = {file.name: file.read_bytes() for file in path.iterdir() if file.name != MANIFEST_NAME}
    is_equal = found == sample_checkpoint(stored.iteration)
    return Loaded(iteration=stored.iteration, is_equal=is_equal, reasons=reasons)


def _retire_dense(folder: Path) -> None:
    path, _ = checkpoints.newest_valid(folder)
    for stored in checkpoints.list_checkpoints(folder):
        if stored.path != path:
            checkpoints.delete(stored.path)


def _latest_leads_nowhere(folder: Path) -> bool:
    try:
        pointed = checkpoints.read_latest(folder)
    except CheckpointError:
        return True
    return pointed is not None and not (pointed / MANIFEST_NAME).is_file()


def _dense_files(folder: Path, iteration: int) -> list[Path]:
    directory = folder / checkpoints.directory_name(iteration)
    return [directory / name for name in (*_DENSE_FILES, MANIFEST_NAME)]


KINDS: Sequence[Kind] = (
    Kind(name="window", save=_save_window, load=_load_window, retire=_retire_windows, files=_window_files),
    Kind(
        name="dense",
        save=_save_dense,
        load=_load_dense,
        retire=_retire_dense,
        files=_dense_files,
        pointer_leads_nowhere=_latest_leads_nowhere,
    ),
)
"""All kinds of stored state (windows, dense checkpoints) that scripts save, damage and load."""
