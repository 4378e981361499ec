"""Shows the state of a running job: its generation, its nodes, and the iteration of each.

python -m tools.status runs/moe_tiny-001
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.control.admin import AdminClient
from megatron_ft.errors import EXIT_OK, ControlError, MegatronFtError
from megatron_ft.planning.render import table

_GROUPS = (("members", "trains"), ("waiting", "waits to join"), ("draining", "leaves"), ("lost", "lost"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="status", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args(arguments)
    try:
        with AdminClient(options.run_dir) as operator:
            status = operator.status()
        print(json.dumps(status, indent=2) if options.json else render(status))
    except MegatronFtError as error:
        print(f"status: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def render(status: Mapping[str, Any]) -> str:
    """Render one line on the job and one on each node.

    Raises:
        ControlError: the controller's answer cannot be read.
    """
    try:
        head = (
            f"generation {status['generation']}, {status['phase']}; nodes changed "
            f"{status['num_reforms']} times; controller epoch {status['epoch']}"
        )
        rows = [("node", "state", "iteration", "phase", "seconds since its last report")]
        states = {node: state for name, state in _GROUPS for node in status[name]}
        for node in sorted(states | {int(name): "" for name in status["nodes"]}):
            about = status["nodes"].get(str(node), {})
            seconds = about.get("seconds_since_word")
            since = None if seconds is None else f"{seconds:.1f}"
            figures = (about.get("iteration"), about.get("phase"), since)
            shown = ("-" if figure is None else str(figure) for figure in figures)
            rows.append((str(node), states.get(node, "-"), *shown))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ControlError(f"the controller's status cannot be read: {error!r}") from None
    return f"{head}\n{table(rows)}"


if __name__ == "__main__":
    sys.exit(main())
