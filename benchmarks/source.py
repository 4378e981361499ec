"""One digest of the code that a claim's result belongs to: of the files that its script imports or starts."""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megatron_ft", "transformer_engine_ext", "benchmarks", "tests", "tools")
FOLDERS = (*PACKAGES, "conf", "csrc", "requirements", "slurm")
ALWAYS = ("requirements/constraints.txt",)
"""Files that every result depends on."""
SUFFIXES = {".py", ".yaml", ".yml", ".txt", ".sh", ".sbatch", ".cpp", ".cu", ".h"}
NOT_SOURCE = ("benchmarks/results", "benchmarks/claims.yaml")
"""Tables, texts and their results; no claim is measured with them."""
_MODULE = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_TARGET = re.compile(rf"\b{_MODULE.pattern}")


def source_digest(script: Path, *, root: Path = ROOT) -> str:
    """First 16 hexadecimal digits of the SHA-256 over names and bytes of all files that a script uses.

    See ``used_files``. Results under ``benchmarks/results`` and the tables made of them are not source.
    """
    digest = hashlib.sha256()
    for path in used_files(script, root=root):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def used_files(script: Path, *, root: Path = ROOT) -> list[Path]:
    """Files of the repository that a script can run, sorted by name.

    These are the script itself, what it imports anywhere in a file, and what it names in a string of its own: a module
    (``"megatron_ft.mcore.rank_main:warm"``), a file or a folder (``"pretrain_moe.py"``, ``"slurm/array.sbatch"``,
    ``"conf"``); then what these use in turn. YAML files name modules in any place.
    """
    found: set[Path] = set()
    waiting = [script.resolve(), *(root / name for name in ALWAYS if (root / name).exists())]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        waiting += _uses(path, path.stat().st_mtime_ns, root)
    return sorted(found)


@cache
def _uses(path: Path, _changed_at: int, root: Path) -> tuple[Path, ...]:
    """Files that one file names. The cache is asked again when the file changes."""
    if path.suffix in {".yaml", ".yml"}:
        return tuple(file for name in _TARGET.findall(path.read_text("utf-8")) for file in _of_module(name, root))
    if path.suffix != ".py":
        return ()
    return tuple(file for node in ast.walk(ast.parse(path.read_bytes())) for file in _of_node(node, path, root))


def _of_node(node: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield from _of_module(alias.name, root)
        case ast.ImportFrom(module=module, names=names, level=level):
            package = ".".join(path.relative_to(root).parts[:-level]) if level else ""
            base = ".".join(filter(None, (package, module)))
            for alias in names:
                yield from _of_module(f"{base}.{alias.name}", root)
        case ast.Constant(value=str(text)) if len(text) < 200:
            if _MODULE.fullmatch(text.partition(":")[0]):
                yield from _of_module(text.partition(":")[0], root)
            elif "/" in text or text == "conf" or text.endswith(".py"):
                yield from _at(text, root)


def _of_module(name: str, root: Path) -> Iterator[Path]:
    """The file of a module, or of the module that defines a name, and those of the packages it is in."""
    parts = name.split(".")
    if parts[0] not in PACKAGES and not (root / f"{parts[0]}.py").is_file():
        return
    for end in range(1, len(parts) + 1):
        base = root.joinpath(*parts[:end])
        yield from (file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file())
    if (root.joinpath(*parts) / "__main__.py").is_file():
        yield root.joinpath(*parts) / "__main__.py"


def _at(text: str, root: Path) -> Iterable[Path]:
    """The file, or all files of the folder, that a string names by its path from the repository's root."""
    path = root / text.rstrip("/")
    if not re.fullmatch(rf"(?:{'|'.join(FOLDERS)})(?:/\w[\w.-]*)*/?|\w+\.py", text) or not path.exists():
        return ()
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in files if file.suffix in SUFFIXES and file.is_file() and not _is_left_out(file, root)]


def _is_left_out(path: Path, root: Path) -> bool:
    name = path.relative_to(root).as_posix()
    return "__pycache__" in path.parts or any(name.startswith(left_out) for left_out in NOT_SOURCE)
