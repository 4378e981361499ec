"""Chooses small random faults in Python source, which ``seeded_faults`` puts into the code."""

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass

OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}
"""Replacement of each operator. ``<`` and ``<=`` are not exchanged, because for measured times this changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Fault: a piece of a file's source, and its replacement."""

    line: int
    """Line in the file, counted from 1."""
    function: str
    before: str
    after: str
    source: str
    """Text of the whole file with the fault."""

    def summary(self) -> str:
        """Describe the fault in one line."""
        return f"line {self.line}, {self.function}: {_short(self.before)} -> {_short(self.after)}"


def choose(source: str, generator: random.Random) -> Mutant | None:
    """Choose one of all faults that the functions of a file can have, with equal probability; None if there are
    none."""
    found = list(mutants(source))
    return generator.choice(found) if found else None


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every fault: a negated condition, a replaced operator, a removed call statement, a flipped truth value.

    Defaults, decorators, annotations, error messages and code that runs at import are not changed.
    """
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node, replacement in _replacements(function):
                yield _mutant(source, function.name, node, replacement)


def _replacements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[ast.AST, ast.AST]]:
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        # Inner functions are handled separately. Texts of errors do not count as behaviour.
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.JoinedStr)):
            continue
        if isinstance(node, ast.Assert):
            continue
        yield from _of_node(node)
        pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]


def _of_node(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    changed = copy.deepcopy(node)
    match changed:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
            yield getattr(node, "test"), ast.UnaryOp(op=ast.Not(), operand=test)  # noqa: B009
        case ast.Compare(ops=[only]) if type(only) in OPPOSITES:
            changed.ops = [OPPOSITES[type(only)]()]  # type: ignore[list-item]
            yield node, changed
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in OPPOSITES:
            changed.op = OPPOSITES[type(operator)]()  # type: ignore[assignment]
            yield node, changed
        case ast.Expr(value=ast.Call()):
            yield node, ast.Pass()
        case ast.Constant(value=bool() as value):
            yield node, ast.Constant(value=not value)


def _mutant(source: str, function: str, node: ast.AST, replacement: ast.AST) -> Mutant:
    before = ast.get_source_segment(source, node)
    assert before is not None, f"{ast.dump(node)} has no place in its source"
    text = ast.unparse(ast.fix_missing_locations(replacement))
    after = text if isinstance(replacement, ast.Pass) else f"({text})"
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset  # type: ignore[attr-defined]
    whole = source.encode()
    changed = whole[:start] + after.encode() + whole[start + len(before.encode()) :]
    return Mutant(line=node.lineno, function=function, before=before, after=after, source=changed.decode())  # type: ignore[attr-defined]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
