"""The result file every claim's script writes, and its two options."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def parse_arguments(
    description: str | None, argv: Sequence[str] | None = None, *, takes_jobs: bool = False
) -> argparse.Namespace:
    """``--quick`` and ``--out FILE.json``.

    Args:
        takes_jobs: ``--jobs`` too, for campaigns that may be run in parts; what is left out has not passed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the variant of seconds")
    parser.add_argument("--out", type=Path, help="where the result is written as JSON")
    if takes_jobs:
        parser.add_argument(
            "--jobs", type=int, nargs="+", metavar="N", help="only these; outcomes are kept for later calls"
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
    """Write the result if a file is given; 0 when it passed, else 1."""
    result = {"id": claim_id, "passed": passed, "figure": figure, "threshold": threshold}
    result |= {"counts": dict(counts), "details": dict(details)}
    if out is not None:
        out.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0 if passed else 1
