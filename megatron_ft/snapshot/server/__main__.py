"""``python -m megatron_ft.snapshot.server``: see ``process.py``."""

import os
import sys

from megatron_ft.snapshot.server.process import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
