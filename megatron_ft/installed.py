"""Makes the error message of a command that was started without the project's Python environment."""

import sys
from pathlib import Path

_ACTIVATE = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "activate"


def not_installed(error: ModuleNotFoundError) -> str:
    """Return the error message for a package that cannot be imported. The message names the environment to activate."""
    return (
        f"error: {error.name}: is not installed for {sys.executable}; activate the project's environment (source "
        f"{_ACTIVATE}), or create it with make install"
    )
