"""Records when functions of which files run, in every process of a job.

Python imports this module at its start from ``PYTHONPATH``. Each file of the folder ``FILE_TRACE_FOLDER`` is compiled
with a call before every statement of its functions. The call appends ``<slot> <file>`` to a file of its process in the
folder ``FILE_TRACE``, at most once for each file and slot of ``SLOT_SECONDS``, so that the record of a killed process
is complete. Statements of modules and classes, which run at import, do not count. Files in other folders run at full
speed.
"""

import ast
import builtins
import os
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

SLOT_SECONDS = 0.005
"""Length of a slot. Slots are numbered by the wall clock, as the times in a run's records are."""

_CALL = "__record_file__"
_FOLDER, _OUT = os.environ.get("FILE_TRACE_FOLDER", ""), os.environ.get("FILE_TRACE", "")


def _blocks(function: ast.AST) -> list[list[ast.stmt]]:
    """Yield every list of statements in a function."""
    found = []
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                found.append(block)
    return found


def with_calls(source: bytes, path: str, number: int) -> CodeType:
    """Return a module whose functions call the recorder with ``number`` before each of their statements."""
    tree = ast.parse(source, path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    blocks = {id(block): block for function in functions for block in _blocks(function)}
    for block in blocks.values():
        changed: list[ast.stmt] = []
        for statement in block:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text:  # a docstring has to stay the first statement
                call = ast.parse(f"{_CALL}({number})").body[0]
                changed.append(ast.increment_lineno(call, statement.lineno - 1))
            changed.append(statement)
        block[:] = changed
    return compile(tree, path, "exec")


class Recorder:
    """Records which files run in this process."""

    def __init__(self, out: Path, program: str) -> None:
        self._out, self._program = out, program
        self._names: list[bytes] = []
        self._slots: list[int] = []
        self._descriptor = self._open()
        os.register_at_fork(after_in_child=self._after_fork)

    def _open(self) -> int:
        path = self._out / f"{self._program}.{os.getpid()}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _after_fork(self) -> None:
        self._program = f"{self._program.removesuffix('.fork')}.fork"
        self._slots = [0] * len(self._names)
        self._descriptor = self._open()

    def add(self, name: str) -> int:
        """Add a file, and return its number."""
        self._names.append(name.encode())
        self._slots.append(0)
        return len(self._names) - 1

    def record(self, number: int) -> None:
        """Record that a function of the file runs now."""
        slot = int(time.time() / SLOT_SECONDS)
        if self._slots[number] != slot:
            self._slots[number] = slot
            os.write(self._descriptor, b"%d %s\n" % (slot, self._names[number]))


def _program() -> str:
    words = sys.orig_argv
    return words[words.index("-m") + 1] if "-m" in words else next((Path(w).stem for w in words if w[-3:] == ".py"), "")


def _start() -> None:
    recorder = Recorder(Path(_OUT), _program() or "python")
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = os.path.realpath(self.get_filename(name))
        if not path.startswith(_FOLDER):
            return original(self, name)
        return with_calls(self.get_data(path), path, recorder.add(os.path.relpath(path, _FOLDER)))

    setattr(builtins, _CALL, recorder.record)
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


if _OUT:
    _start()
