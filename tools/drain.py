"""Drains a node of a running job: the node leaves between two iterations, and the others continue.

python -m tools.drain runs/moe_tiny-001 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.control.admin import AdminClient
from megatron_ft.errors import EXIT_OK, MegatronFtError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="drain", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("node", type=int, help="number of the node")
    options = parser.parse_args(arguments)
    try:
        with AdminClient(options.run_dir) as operator:
            operator.drain(options.node)
    except MegatronFtError as error:
        print(f"drain: {error}", file=sys.stderr)
        return error.exit_code
    print(f"node {options.node} is to leave at the next iteration boundary")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
