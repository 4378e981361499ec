"""Tests the language of the code: how docstrings begin, and words that must not be used (CONTRIBUTING.md)."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY as ROOT

NOT_YET: tuple[str, ...] = ()
"""Files and folders that are not checked yet."""
FIRST_WORDS = """
    As At Between Beside By For From How If In Of On Since That Those To Until What When Where Which Who Whoever Whom
    Whose With Without
"""
BAD_START = re.compile(rf"(?:{'|'.join(FIRST_WORDS.split())})\b")
PRIVATE_WORDS = r"""
    anew|anybody|nobody|somebody|befell|doors?|fruitless|hopeless|foretell|foretold|goes\ on|go\ on|went\ on|goes\ by|
    hangs?\ up|hanging\ up|hung\ up|hears?|heard|in\ vain|ladder|lets?\ go|lives\ on|mend|mends|mended|mending|
    newcomers?|owes?|rungs?|said|speaks?|stands?\ still|stood\ still|strangers?|told|tells?|untold|whoever|whom
"""
BAD_WORD = re.compile(rf"\b(?:{PRIVATE_WORDS})\b", re.VERBOSE)


def python_files(*parts: str) -> list[Path]:
    tops = [ROOT / part for part in parts]
    found = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*.py"))]
    return sorted(path for path in found if "__pycache__" not in path.parts and not _is_left_out(path))


def _is_left_out(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(NOT_YET)


def documentation(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def bad_starts(source: str) -> list[str]:
    return [
        f"{line}: {text.splitlines()[0] if text else 'empty'}"
        for line, text in documentation(ast.parse(source))
        if not text or BAD_START.match(text)
    ]


def bad_words(source: str) -> list[str]:
    """Return private words in docstrings, comments and texts. Strings without a space are keys and are not checked."""
    texts = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return [f"{line}: {found.group()}" for line, text in texts for found in BAD_WORD.finditer(" ".join(text.split()))]


def test_docstrings_start_with_a_verb_or_the_thing_itself() -> None:
    files = python_files(
        "megatron_ft", "transformer_engine_ext", "tools", "slurm", "benchmarks", "pretrain_moe.py", "hydra_entry.py"
    )
    found = {path.relative_to(ROOT).as_posix(): bad_starts(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_private_words() -> None:
    files = python_files("megatron_ft", "transformer_engine_ext", "tools", "slurm", "pretrain_moe.py", "hydra_entry.py")
    found = {path.relative_to(ROOT).as_posix(): bad_words(path.read_text(encoding="utf-8")) for path in files}
    assert {name: words for name, words in found.items() if words} == {}


def test_what_is_left_out_still_has_to_be_rewritten() -> None:
    for path in (ROOT / name for name in NOT_YET):
        sources = [file.read_text(encoding="utf-8") for file in ([path] if path.is_file() else path.rglob("*.py"))]
        assert any(bad_starts(source) or bad_words(source) for source in sources), f"remove {path} from NOT_YET"


@pytest.mark.parametrize(
    ("source", "starts", "words"),
    [
        ('"""Of the job."""', 1, 0),
        ('RANKS = 4\n"""Of a node."""', 1, 0),
        ('class A:\n    size: int\n    """What it takes."""', 1, 0),
        ('def a() -> None:\n    """  """', 1, 0),
        ('"""Ranks of the job."""\n\n\ndef a() -> str:\n    """Return a name."""\n    return "told"', 0, 0),
        ('"""Offsets, forming, informed, asynchronous."""', 0, 0),
        ("# nobody says so", 0, 1),
        ('raise ValueError(f"{rank}: is told anew")', 0, 2),
        ('"""Waits in\n    vain."""', 0, 1),
    ],
)
def test_the_checks_find(source: str, starts: int, words: int) -> None:
    assert (len(bad_starts(source)), len(bad_words(source))) == (starts, words)
