"""Starts a node for a running job. The node joins between two iterations.

python -m tools.add_node runs/moe_tiny-001 2
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
    parser = argparse.ArgumentParser(prog="add_node", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("node", type=int, help="number of the node")
    options = parser.parse_args(arguments)
    try:
        with AdminClient(options.run_dir) as operator:
            operator.add(options.node)
    except MegatronFtError as error:
        print(f"add_node: {error}", file=sys.stderr)
        return error.exit_code
    print(f"node {options.node} is being started; it joins at an iteration boundary")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
