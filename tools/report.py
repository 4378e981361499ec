"""A run as one page: loss, failures, and for each recovery who computed, who waited and what moved.

    python -m tools.report runs/moe_tiny-001                    # writes runs/moe_tiny-001/report.html
    python -m tools.report runs/moe_tiny-001 --out page.html

The page is one file that fetches nothing. It is made from events.jsonl, metrics.jsonl and decisions.jsonl; the run may
still be going on.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.errors import EXIT_OK, ConfigError, MegatronFtError
from megatron_ft.telemetry.report.files import read_run
from megatron_ft.telemetry.report.model import build
from megatron_ft.telemetry.report.page import render

FILE = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    first, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="report", description=first)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"page to write; {FILE} in the run's folder if not given"
    )
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / FILE
    try:
        write(out, page_of(options.run_dir))
    except MegatronFtError as error:
        print(f"report: {error}", file=sys.stderr)
        return error.exit_code
    print(out)
    return EXIT_OK


def page_of(run_dir: Path) -> str:
    """The page of a run's folder.

    Raises:
        DataError: it is no run, or its files are damaged.
    """
    return render(build(read_run(run_dir)))


def write(path: Path, page: str) -> None:
    """Put the page in place at once: who looks at an older one sees that one or the new one.

    Raises:
        ConfigError: it cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError.of("--out", path, f"must be a file that can be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
