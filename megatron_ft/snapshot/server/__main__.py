"""``python -m megatron_ft.snapshot.server``: see ``process.py``."""

import os
import sys

from megatron_ft.snapshot.server.process import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads still run and hold large memory: the interpreter's own shutdown could wait for them.
    os._exit(code)
