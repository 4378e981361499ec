"""Records which statements of the files in a folder are executed, in every process of a command.

Python imports this module at its start from ``PYTHONPATH``. Each file of the folder ``LINE_TRACE_FOLDER`` is compiled
with a call before every statement. At the first execution of a statement, the call writes the statement's line to the
file ``LINE_TRACE``, so that the record of a killed process is complete. Other files run at full speed.
"""

import ast
import builtins
import os
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType

_CALL = "__note_line__"
_FOLDER, _OUT = os.environ.get("LINE_TRACE_FOLDER", ""), os.environ.get("LINE_TRACE", "")


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements in a module."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def does_something(statement: ast.stmt) -> bool:
    """Return whether a statement is more than a docstring."""
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _with_calls(source: bytes, path: str) -> CodeType:
    tree = ast.parse(source, path)
    for block in list(blocks(tree)):
        noted = []
        for statement in block:
            if does_something(statement):
                text = f"{_CALL}({path!r}, {statement.lineno})"
                noted.append(ast.increment_lineno(ast.parse(text).body[0], statement.lineno - 1))
            noted.append(statement)
        block[:] = noted
    return compile(tree, path, "exec")


def _start() -> None:
    seen = set()
    as_before = SourceFileLoader.get_code

    def note(path: str, line: int) -> None:
        if (path, line) not in seen:
            seen.add((path, line))
            with open(_OUT, "a", encoding="utf-8") as out:
                out.write(f"{path}:{line}\n")

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = os.path.realpath(self.get_filename(name))
        return _with_calls(self.get_data(path), path) if path.startswith(_FOLDER) else as_before(self, name)

    setattr(builtins, _CALL, note)
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


if _OUT:
    _start()
