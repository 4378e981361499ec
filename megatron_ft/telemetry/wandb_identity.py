"""What has to outlive a restart for wandb to show one run: its id, and how far it was given figures."""

import os
import secrets
import string
from pathlib import Path

ID_FILE = "wandb_run_id"
POSITION_FILE = "wandb_iteration"

_ALPHABET = string.ascii_lowercase + string.digits


def run_id(run_dir: Path) -> str:
    """The wandb run id of this run directory; chosen at the first call, the same ever after."""
    path = run_dir / ID_FILE
    try:
        with path.open("x", encoding="ascii") as file:
            file.write("".join(secrets.choice(_ALPHABET) for _ in range(8)) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        pass
    return path.read_text(encoding="ascii").strip()


class Position:
    """The newest iteration handed to wandb, kept in a small file of fixed width."""

    def __init__(self, run_dir: Path) -> None:
        self._file = os.open(run_dir / POSITION_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        self.iteration = int(os.pread(self._file, 32, 0) or b"0")

    def sent(self, iteration: int) -> None:
        """Remember ``iteration``."""
        os.pwrite(self._file, f"{iteration:15d}\n".encode(), 0)
        self.iteration = iteration
