"""Writes the result file of a claim's script, and parses the script's options."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def parse_arguments(
    description: str | None, argv: Sequence[str] | None = None, *, takes_jobs: bool = False
) -> argparse.Namespace:
    """Parse the options ``--quick`` and ``--out FILE.json``.

    Args:
        takes_jobs: Whether the script also has ``--jobs``, for campaigns that can be run in parts. Jobs that were left
            out count as not passed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="run the quick variant, which takes seconds")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    if takes_jobs:
        parser.add_argument(
            "--jobs",
            type=int,
            nargs="+",
            metavar="N",
            help="run only these jobs; their outcomes are stored for later calls",
        )
    return parser.parse_args(argv)


def finish(
    out: Path | None,
    claim_id: str,
    *,
    passed: bool,
    figure: str,
    threshold: str,
    counts: Mapping[str, int],
    details: Mapping[str, Any],
) -> int:
    """Write the result if a file is given. Return 0 if the claim passed, otherwise 1."""
    result = {"id": claim_id, "passed": passed, "figure": figure, "threshold": threshold}
    result |= {"counts": dict(counts), "details": dict(details)}
    if out is not None:
        out.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0 if passed else 1
