"""Claim ``convert-memory``: conversions between checkpoints and Hugging Face folders need little memory and are fast.

A checkpoint of a random Mixtral model is converted to a folder, and the folder back to a checkpoint, by the commands of
``tools/convert_checkpoint.py`` in processes of their own. The largest sum of private and shared memory of each process
is sampled. Between conversions, the same files are copied and flushed to disk, by processes that have imported the same
modules. Each process drops the page cache just before it starts the clock, if it is permitted to. So conversions and
copies begin in the same state: a virtual machine that gives free memory back to its host is slower after a pause.

The large model gives the memory of one conversion in each direction. The small model gives the speed: the median ratio
of several pairs of a conversion and a copy. A single ratio would be wrong if the disk was busy. The conversion and the
copy of a pair run one after the other; the order alternates. Each folder is removed as soon as nothing reads it any
more, so the disk needs space for two models of the large size.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import ConfigError

ID = "convert-memory"
SIZES, QUICK_SIZES = (20e9, 4e9), (0.2e9, 0.2e9)
"""Bytes of the model whose memory is measured, and of the model whose time is measured."""
PAIRS, QUICK_PAIRS = 7, 2
"""Pairs with the small model, in each direction."""
SPACE = 2.05
"""Required free space of the disk at the start, as a multiple of the large model's size."""
MOST_MEMORY = 2e9
MIN_SPEED, QUICK_MIN_SPEED = 0.5, 0.3
FILE_BYTES = 500_000_000
_SAMPLE_SECONDS = 0.02
_CACHES = Path("/proc/sys/vm/drop_caches")
_LAYER = ModelConfig(
    num_layers=1,
    hidden_size=1024,
    num_attention_heads=16,
    num_query_groups=8,
    seq_length=4096,
    vocab_size=8192,
    ffn_hidden_size=3584,
    moe_ffn_hidden_size=3584,
    num_moe_experts=8,
)
WAYS = ("to-hf", "from-hf")
THRESHOLD = "<= 2 GB of private and shared memory, at least 0.5 of the speed of copies with fsync"


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, copy, and judge."""
    arguments = parse_arguments(__doc__, argv)
    (large, timed), pairs = (QUICK_SIZES, QUICK_PAIRS) if arguments.quick else (SIZES, PAIRS)
    with tempfile.TemporaryDirectory(prefix="convert-memory-") as name:
        free = shutil.disk_usage(name).free
        if free < SPACE * large:
            raise ConfigError(f"TMPDIR={name}: needs {SPACE * large / 1e9:.0f} GB, but has {free / 1e9:.0f} GB free")
        memory, seconds, num_bytes = _measure_large(Path(name), large)
        rows = _measure_speed(Path(name), timed, pairs)
    ratios = {way: sorted(row[way] for row in rows) for way in WAYS}
    speeds = {way: statistics.median(found) for way, found in ratios.items()}
    shown = {way: f"{speeds[way]:.2f} ({found[0]:.2f} to {found[-1]:.2f})" for way, found in ratios.items()}
    figure = (
        f"{num_bytes / 1e9:.1f} GB within {max(memory.values()) / 1e9:.2f} GB of memory; median of {pairs} pairs with "
        f"{timed / 1e9:.1f} GB: {shown['to-hf']} of the speed of a copy to a folder, {shown['from-hf']} to a checkpoint"
    )
    limit = QUICK_MIN_SPEED if arguments.quick else MIN_SPEED
    return finish(
        arguments.out,
        ID,
        passed=max(memory.values()) <= MOST_MEMORY and min(speeds.values()) >= limit,
        figure=figure,
        threshold=THRESHOLD.replace(str(MIN_SPEED), str(limit)),
        counts={"pairs": pairs, "cache_dropped": int(os.access(_CACHES, os.W_OK))},
        details={"memory": memory, "bytes": num_bytes, "large_seconds": seconds, "rows": rows, "speeds": speeds},
    )


def _model(num_bytes: float) -> ModelConfig:
    """Return a model whose weights in bf16 have about ``num_bytes`` bytes."""
    from math import prod

    from megatron_ft.mcore.convert.mixtral import FAMILY

    def size(model: ModelConfig) -> int:
        return sum(2 * prod(rule.shape(model)) for rule in FAMILY.tensors(model))

    one, two = size(_LAYER), size(replace(_LAYER, num_layers=2))
    return replace(_LAYER, num_layers=max(1, round((num_bytes - one) / (two - one)) + 1))


def _write_checkpoint(path: Path, num_bytes: float) -> int:
    """Write a checkpoint of random weights, one tensor at a time. Return its size."""
    import torch

    from megatron_ft.mcore.convert.mixtral import FAMILY
    from megatron_ft.mcore.convert.weights import weights_manifest, write_weights

    model, generator = _model(num_bytes), torch.Generator().manual_seed(1)

    def tensors() -> Any:
        for rule in FAMILY.tensors(model):
            yield rule.ours, torch.rand(rule.shape(model), generator=generator).bfloat16()

    settings = {f"model.{name}": value for name, value in asdict(model).items()}
    manifest = weights_manifest(path.name, settings, {})
    write_weights(path, tensors(), manifest, num_bytes=int(num_bytes), most_file_bytes=FILE_BYTES)
    return sum(file.stat().st_size for file in path.iterdir())


def _measure_large(folder: Path, num_bytes: float) -> tuple[dict[str, int], dict[str, float], int]:
    """Convert the large model once in each direction. Return the largest memory of each conversion in bytes, its
    seconds, and the size of the model."""
    size = _write_checkpoint(folder / "large", num_bytes)
    memory: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for way, source, target in (("to-hf", "large", "large-hf"), ("from-hf", "large-hf", "back")):
        seconds[way], memory[way] = _convert(way, folder / source, folder / target)
        shutil.rmtree(folder / source)
        print(f"{size / 1e9:.1f} GB, {way}: {seconds[way]:.1f} s, {memory[way]:,} bytes of memory", flush=True)
    shutil.rmtree(folder / "back")
    return memory, seconds, size


def _measure_speed(folder: Path, num_bytes: float, pairs: int) -> list[dict[str, float]]:
    """Return the speed of each conversion as a share of the speed of a copy of its input, for each pair."""
    _write_checkpoint(folder / "weights", num_bytes)
    rows = []
    for number in range(pairs):
        row: dict[str, float] = {}
        for way, source, target in (("to-hf", "weights", "hf"), ("from-hf", "hf", "back")):
            # The order of both alternates, because the first one may find less memory that is ready for use.
            row |= _measure_pair(folder, way, source, target, is_copied_first=number % 2 == 0)
        shutil.rmtree(folder / "hf")
        print(f"pair {number + 1}/{pairs}, {row}", flush=True)
        rows.append(row)
    shutil.rmtree(folder / "weights")
    return rows


def _measure_pair(folder: Path, way: str, source: str, target: str, *, is_copied_first: bool) -> dict[str, float]:
    """Convert and copy ``source``. Return the speed of the conversion as a share of that of the copy, with the seconds
    of both. The copy and the checkpoint of ``from-hf`` are removed before anything else is written."""
    seconds: dict[str, float] = {}
    for name, out in [("copy", "copy"), (way, target)][:: 1 if is_copied_first else -1]:
        seconds[name], _ = _convert(name, folder / source, folder / out)
        if name != "to-hf":  # its folder is the input of ``from-hf``
            shutil.rmtree(folder / out)
    return {
        way: seconds["copy"] / seconds[way],
        f"{way} seconds": seconds[way],
        f"copy for {way} seconds": seconds["copy"],
    }


_CHILD = """
import sys, time
from benchmarks.convert_memory import copy, drop_caches
from megatron_ft.mcore.convert import converter
from tools import convert_checkpoint
run = copy if sys.argv[1] == "copy" else convert_checkpoint.main
drop_caches()
began = time.perf_counter()
code = run(sys.argv[1:])
print(time.perf_counter() - began)
sys.exit(code)
"""
"""Program of a conversion or a copy. Its last line is the duration without the time to import torch, about 5 s."""


def _convert(way: str, source: Path, target: Path) -> tuple[float, int]:
    """Run a conversion or a copy. Return its seconds, and the largest sum of its private and shared memory in bytes."""
    options = ["--family", "mixtral"] if way == "to-hf" else []
    command = [sys.executable, "-c", _CHILD, way, str(source), str(target), *options, "--file-bytes", str(FILE_BYTES)]
    most = 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, text=True)
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            time.sleep(_SAMPLE_SECONDS)
        if process.returncode:
            raise RuntimeError(f"{way} ended with exit code {process.returncode}")
        output.seek(0)
        return float(output.read().splitlines()[-1]), most


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def copy(words: Sequence[str]) -> int:
    """Copy a folder, ``words[1]``, to ``words[2]``, and flush the files to disk. Return 0."""
    source, target = Path(words[1]), Path(words[2])
    shutil.copytree(source, target)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return 0


def drop_caches() -> None:
    """Flush files to disk, and drop the page cache, if this process may do so."""
    os.sync()
    if os.access(_CACHES, os.W_OK):
        _CACHES.write_text("3")


if __name__ == "__main__":
    raise SystemExit(main())
