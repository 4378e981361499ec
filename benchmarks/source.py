"""Computes the digest of the source of a claim's result: of all files that the claim's script imports or starts.

Docstrings and comments do not count, because they influence no measurement.
"""

import ast
import hashlib
import io
import re
import tokenize
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
"""Tables, texts and their results, which do not influence a measurement."""
_MODULE = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_TARGET = re.compile(rf"\b{_MODULE.pattern}")


def source_digest(script: Path, *, root: Path = ROOT) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 over names and contents of all files that a script uses.

    ``used_files`` lists the files. In Python files, docstrings, empty lines and comments do not count.
    Results in ``benchmarks/results`` and the tables made from them do not count either.
    """
    digest = hashlib.sha256()
    for path in used_files(script, root=root):
        data = _content(path, path.stat().st_mtime_ns)
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


@cache
def _content(path: Path, _changed_at: int) -> bytes:
    """Return the part of a file that can influence a measurement. ``_changed_at`` makes the cache read a changed file
    again."""
    data = path.read_bytes()
    if path.suffix != ".py":
        return data
    texts, docstrings = set[int](), set[int]()
    for node in ast.walk(ast.parse(data)):
        match node:
            # An expression that is only a string: a docstring of a module, class, function or attribute.
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.Constant(value=str()) | ast.JoinedStr():
                texts.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    lines = data.decode("utf-8").splitlines()
    for token in tokenize.tokenize(io.BytesIO(data).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    counted = enumerate(lines, start=1)
    return "\n".join(
        line for number, line in counted if number not in docstrings and (number in texts or line.strip())
    ).encode()


def used_files(script: Path, *, root: Path = ROOT) -> list[Path]:
    """Return the files of the repository that a script can run, sorted by name.

    These are the script itself, the modules that it imports anywhere, and the files that it names in a string constant:
    a module (``"megatron_ft.mcore.rank_main:warm"``), a file or a folder (``"pretrain_moe.py"``,
    ``"slurm/array.sbatch"``, ``"conf"``). The files that these use are included too. In a YAML file, a module may be
    named anywhere.
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
    """Return the files that one file names. ``_changed_at`` makes the cache read a changed file again."""
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
    """Yield the file of a module, or of the module that defines a name, and the files of its packages."""
    parts = name.split(".")
    if parts[0] not in PACKAGES and not (root / f"{parts[0]}.py").is_file():
        return
    for end in range(1, len(parts) + 1):
        base = root.joinpath(*parts[:end])
        yield from (file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file())
    if (root.joinpath(*parts) / "__main__.py").is_file():
        yield root.joinpath(*parts) / "__main__.py"


def _at(text: str, root: Path) -> Iterable[Path]:
    """Return the file, or all files of the folder, that a string names by a path relative to the repository."""
    path = root / text.rstrip("/")
    if not re.fullmatch(rf"(?:{'|'.join(FOLDERS)})(?:/\w[\w.-]*)*/?|\w+\.py", text) or not path.exists():
        return ()
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in files if file.suffix in SUFFIXES and file.is_file() and not _is_left_out(file, root)]


def _is_left_out(path: Path, root: Path) -> bool:
    name = path.relative_to(root).as_posix()
    return "__pycache__" in path.parts or any(name.startswith(left_out) for left_out in NOT_SOURCE)
