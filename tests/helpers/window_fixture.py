"""Writes ``tests/fixtures/windows/version_<n>.window``, a file that every later version must read.

Run ``python -m tests.helpers.window_fixture`` once after the format has changed. Older files are not written again.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from megatron_ft.planning.snapshot.plan import Piece, align
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.snapshot.window import ITEM_BYTES, WINDOW_FORMAT_VERSION, Slice, Window

FOLDER = Path(__file__).parents[1] / "fixtures" / "windows"
PIECES = (
    [("weight", "bfloat16", 50), ("master", "float32", 50), ("exp_avg", "float32", 50), ("step", "int64", 1)],
    [("weight", "bfloat16", 50), ("scale", "float32", 1)],
)


def content_of(iteration: int, component: str, num_bytes: int) -> bytes:
    """Return the bytes of a piece, which depend only on its name."""
    return hashlib.shake_256(f"{iteration} {component}".encode()).digest(num_bytes)


def window() -> tuple[Window, list[bytes]]:
    """Return the description and the slices of the window in the file."""
    described = Window(
        run_id="2026-01-31_12-00-00",
        generation=1,
        topology={"tensor_parallel": 1, "expert_parallel": 2},
        rank=1,
        world_size=2,
        start_iteration=12,
        num_slices=2,
        plan={"slices": [["gate"], ["expert"]]},
    )
    payload = []
    for index, components in enumerate(PIECES):
        part, content = _slice(12 + index, align(described.num_bytes), components)
        described.slices.append(part)
        payload.append(content)
    return described, payload


def _slice(iteration: int, offset: int, components: list[tuple[str, str, int]]) -> tuple[Slice, bytes]:
    content = bytearray(4096)
    pieces = []
    for number, (component, dtype, num_items) in enumerate(components):
        data = content_of(iteration, component, num_items * ITEM_BYTES[dtype])
        start = number * 512
        content[start : start + len(data)] = data
        pieces.append(
            Piece(
                parameter="decoder.layers.1.mlp.router.weight",
                tensor_part=0,
                component=component,
                dtype=dtype,
                start=100,
                stop=150,
                offset=start,
                num_bytes=len(data),
            )
        )
    header = {"vote": {"loss": 2.25, "is_applied": True}, "consumed_samples": 192}
    part = Slice(iteration=iteration, offset=offset, num_bytes=4096, header=header, pieces=tuple(pieces))
    part.hashes = part.hash_pieces(memoryview(content))
    return part, bytes(content)


def main() -> None:
    """Write the file of the present version."""
    described, payload = window()
    with tempfile.TemporaryDirectory() as folder:
        write_window(folder, described, [memoryview(content) for content in payload])
        (written,) = Path(folder).rglob("*.window")
        shutil.copyfile(written, FOLDER / f"version_{WINDOW_FORMAT_VERSION}.window")


if __name__ == "__main__":
    main()
