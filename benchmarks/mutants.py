"""Small faults in Python source, chosen at random: what ``seeded_faults`` puts into the code."""

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
"""Operators and what replaces them. ``<`` against ``<=`` is left out: between measured seconds it changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: a piece of a file's source and what replaces it."""

    line: int
    """Line of the file, from 1."""
    function: str
    before: str
    after: str
    source: str
    """The whole file with the fault."""

    def summary(self) -> str:
        """One line for people."""
        return f"line {self.line}, {self.function}: {_short(self.before)} -> {_short(self.after)}"


def choose(source: str, generator: random.Random) -> Mutant | None:
    """One of all faults that can be put into the functions of a file, each as likely; None where there is none."""
    found = list(mutants(source))
    return generator.choice(found) if found else None


def mutants(source: str) -> Iterator[Mutant]:
    """Every fault: a condition negated, an operator replaced, a call that stands alone removed, a truth value flipped.

    Defaults, decorators, annotations and whatever runs at import are left alone, and so are messages of errors.
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
        # Functions within functions have their own turn. What an error says is no behaviour.
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
