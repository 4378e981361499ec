"""Prints the size of the package without ``testing/``: lines, names, comments, import circles and the longest file.

python -m tools.code_size
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PRAGMA = re.compile(r"#\s*(?:noqa|type:|pragma|fmt:)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSize:
    """Counts of lines, names and comments in the files of the package ``megatron_ft``."""

    num_lines: int
    """Number of lines of the package, except lines that contain only a comment."""
    num_code_lines: int
    """Number of lines of the package, except blank lines, comments, docstrings and imports."""
    num_names: int
    """Number of public functions and classes, plus private names that other modules import."""
    num_comments: int
    """Number of comments, except pragmas such as ``noqa``."""
    circular_modules: tuple[str, ...]
    """Modules that import each other in a circle, including imports for type checking."""
    longest: tuple[str, int]
    """Path of the longest file of the package, and its number of lines."""

    @property
    def names_per_thousand(self) -> float:
        """Return the number of names per 1,000 code lines."""
        return 1e3 * self.num_names / self.num_code_lines

    @property
    def comments_per_thousand(self) -> float:
        """Return the number of comments per 1,000 lines."""
        return 1e3 * self.num_comments / self.num_lines

    def summary(self) -> str:
        """Return all figures as text, one per line."""
        return "\n".join(
            [
                f"lines without comments      {self.num_lines:,}",
                f"code lines                  {self.num_code_lines:,}",
                f"names per 1,000 code lines  {self.names_per_thousand:.1f}",
                f"comments per 1,000 lines    {self.comments_per_thousand:.1f}",
                f"modules in import circles   {len(self.circular_modules)}",
                f"longest file                {self.longest[1]} lines, {self.longest[0]}",
            ]
        )


def measure(root: Path = ROOT) -> CodeSize:
    """Measure the Python files of ``root/megatron_ft/``, except those in ``megatron_ft/testing/``."""
    testing = root / "megatron_ft" / "testing"
    files = [path for path in sorted((root / "megatron_ft").rglob("*.py")) if testing not in path.parents]
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    own_lines = [line.strip() for source in sources.values() for line in source.splitlines()]
    num_lines = sum(not line.startswith("#") for line in own_lines)
    num_blank = own_lines.count("")
    num_other = sum(_docstring_and_import_lines(tree, sources[name]) for name, tree in trees.items())
    return CodeSize(
        num_lines=num_lines,
        num_code_lines=num_lines - num_blank - num_other,
        num_names=_num_names(trees),
        num_comments=sum(_num_comments(source) for source in sources.values()),
        circular_modules=circular_modules(trees),
        longest=max(((name, len(source.splitlines())) for name, source in sources.items()), key=lambda pair: pair[1]),
    )


def circular_modules(trees: Mapping[str, ast.Module]) -> tuple[str, ...]:
    """Return the modules that are part of an import circle. Imports inside functions do not count.

    Args:
        trees: Syntax tree of each file by the file's path relative to the repository.
    """
    modules = {_module(name): tree for name, tree in trees.items()}
    needs = {module: _imports(tree, modules.keys()) - {module} for module, tree in modules.items()}
    return tuple(sorted(module for module in needs if module in _reachable(needs, module)))


def _reachable(needs: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(needs[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += needs[module]
    return found


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(tree: ast.Module, modules: Collection[str]) -> set[str]:
    found: set[str] = set()
    for node in _outside_functions(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
    return {name for name in found if name in modules}


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _outside_functions(node)


def _num_names(trees: Mapping[str, ast.Module]) -> int:
    public = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
        for tree in trees.values()
        for node in tree.body
    )
    imported = {
        (node.module, alias.name)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megatron_ft")
        for alias in node.names
        if alias.name.startswith("_")
    }
    return public + len(imported)


def _docstring_and_import_lines(tree: ast.Module, source: str) -> int:
    lines = source.splitlines()
    return sum(
        bool(lines[number - 1].strip())
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _num_comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT and not _PRAGMA.match(token.string) for token in tokens)


def main() -> int:
    """Print the figures and return the exit code."""
    print(measure().summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
