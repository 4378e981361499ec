"""Tests the figures of ``tools.code_size`` on a small package."""

from pathlib import Path

import pytest

from tools.code_size import CodeSize, main, measure

FIRST = '''"""A module.

Two lines.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ft.second import Second  # noqa: F401

# A comment.
LIMIT = 3


def double(number: int) -> int:
    """Return twice ``number``."""
    import megatron_ft.third

    return 2 * number  # an inline comment


def _half(number: int) -> int:
    return number // 2
'''
SECOND = "from megatron_ft.first import _half\n\n\nclass Second:\n    size = _half(4)\n"


def written(root: Path, **modules: str) -> CodeSize:
    (root / "megatron_ft" / "testing").mkdir(parents=True)
    for name, source in {"testing/__init__": "WIDE = 1\n" * 99, **modules}.items():
        (root / "megatron_ft" / f"{name}.py").write_text(source, encoding="utf-8")
    return measure(root)


def test_lines_names_and_comments_are_counted_without_testing(tmp_path: Path) -> None:
    size = written(tmp_path, first=FIRST, second=SECOND)
    assert (size.num_lines, size.num_code_lines) == (22 + 5, 6 + 2)
    assert size.num_names == 3, "double, Second, and _half, which another module imports"
    assert size.num_comments == 2
    assert size.longest == ("megatron_ft/first.py", 23)


def test_imports_for_type_checking_make_circles_and_those_in_functions_do_not(tmp_path: Path) -> None:
    size = written(tmp_path, first=FIRST, second=SECOND, third="import megatron_ft.first\n")
    assert size.circular_modules == ("megatron_ft.first", "megatron_ft.second")


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert "names per 1,000 code lines" in capsys.readouterr().out
