"""Runs the policy in docs/testing.md and its tests exactly as a reader of the page would copy them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY

pytestmark = pytest.mark.slow  # trains


def test_the_documented_tests_pass(tmp_path: Path, short_tmpdir: Path) -> None:
    page = (REPOSITORY / "docs" / "testing.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert sorted(files) == ["my_policy.py", "test_my_policy.py"]
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "test_my_policy.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "2 passed" in ended.stdout
