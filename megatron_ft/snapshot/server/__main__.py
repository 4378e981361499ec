"""``python -m megatron_ft.snapshot.server``: see ``serve.py``."""

import os
import sys

from megatron_ft.snapshot.server.serve import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
