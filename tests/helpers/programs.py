"""Programs that stand in for others: what a machine lacks, or what cannot be had to fail when a test wants it."""

import stat
from pathlib import Path


def write_program(folder: Path, name: str, script: str) -> None:
    """Put a bash script into a folder that is, or will be, first on somebody's ``PATH``."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(stat.S_IRWXU)
