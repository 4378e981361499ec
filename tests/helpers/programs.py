"""Writes programs that replace others, which a machine lacks or which do not fail when a test needs it."""

import stat
from pathlib import Path


def write_program(folder: Path, name: str, script: str) -> None:
    """Write a bash script into a folder that is, or will be, first in a ``PATH``."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(stat.S_IRWXU)
