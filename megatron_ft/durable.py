"""What outlives the machine: names in a folder, once they are on the disk."""

import os
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: a file that was created or renamed there is found after a power cut.

    Source: the manual page fsync(2): that a file is on the disk does not mean that its entry in the folder is.

    Raises:
        OSError: the disk refused.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
