"""One digest of the code a result belongs to."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = (
    "pretrain_moe.py",
    "megatron_ft",
    "conf",
    "tools",
    "benchmarks",
    "tests/helpers",
    "requirements/constraints.txt",
)
SUFFIXES = {".py", ".yaml", ".txt", ".cpp", ".cu", ".h"}


def source_digest(root: Path = ROOT, parts: Iterable[str] = CODE) -> str:
    """First 16 hexadecimal digits of the SHA-256 over names and bytes of all source files below ``parts``.

    Results under ``benchmarks/results`` and the tables made of them are not source.
    """
    digest = hashlib.sha256()
    for path in source_files(root, parts):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def source_files(root: Path = ROOT, parts: Iterable[str] = CODE) -> list[Path]:
    """Source files below ``parts``, sorted by name."""
    found: list[Path] = []
    for part in parts:
        top = root / part
        found += [top] if top.is_file() else [path for path in top.rglob("*") if path.suffix in SUFFIXES]
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)
