"""The message of commands that run without the project's environment."""

import sys
from pathlib import Path

_ACTIVATE = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "activate"


def not_installed(error: ModuleNotFoundError) -> str:
    """Return the line which says that the project's environment is not active, or lacks a package."""
    return (
        f"error: {error.name}: is not installed for {sys.executable}; activate the project's environment (source "
        f"{_ACTIVATE}), or create it with make install"
    )
