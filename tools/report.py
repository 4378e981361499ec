"""Writes a report of a run as one HTML page: the loss, the failures, and the work of ranks in each recovery.

    python -m tools.report runs/moe_tiny-001                    # writes runs/moe_tiny-001/report.html
    python -m tools.report runs/moe_tiny-001 --out page.html
    python -m tools.report runs/moe_tiny-001 --live             # writes it again while the run continues

The page loads no other files. Its content comes from events.jsonl, metrics.jsonl, decisions.jsonl and placements/ in
the run's folder. The run may still be running.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.errors import EXIT_OK, ConfigError, MegatronFtError
from megatron_ft.telemetry.report.files import RunFiles, follow
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.page import render

FILE = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    first, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="report", description=first)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"page to write; default {FILE} in the run's folder")
    parser.add_argument("--live", action="store_true", help="update the page until the run ends")
    parser.add_argument(
        "--every",
        type=_whole_seconds,
        default=5,
        metavar="SECONDS",
        help="shortest time between two updates; default 5",
    )
    parser.add_argument(
        "--patience",
        type=_whole_seconds,
        default=600,
        metavar="SECONDS",
        help="time without new records after which --live ends; default 600",
    )
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / FILE
    try:
        if options.live:
            return _live(options.run_dir, out, every_seconds=options.every, patience_seconds=options.patience)
        write(out, render(RunReport.of(RunFiles.read(options.run_dir))))
    except MegatronFtError as error:
        print(f"report: {error}", file=sys.stderr)
        return error.exit_code
    print(out)
    return EXIT_OK


def _live(run_dir: Path, out: Path, *, every_seconds: int, patience_seconds: int) -> int:
    """Update the page until the run has ended. A browser reloads the page regularly until it shows the last version."""

    def write_page() -> bool:
        report = RunReport.of(RunFiles.read(run_dir))
        has_ended = report.outcome.level != "open"
        write(out, render(report, refresh_seconds=None if has_ended else every_seconds))
        return has_ended

    print(f"{out}: updated after each report of the run; stop with Ctrl-C", flush=True)
    try:
        if follow(run_dir, write_page, every_seconds=every_seconds, patience_seconds=patience_seconds):
            return EXIT_OK
        print(f"report: {run_dir} has reported nothing for {patience_seconds} s", file=sys.stderr)
    except KeyboardInterrupt:
        print("report: stopped updating the page", file=sys.stderr)
    write(out, render(RunReport.of(RunFiles.read(run_dir))))
    return EXIT_OK


def _whole_seconds(text: str) -> int:
    seconds = int(text)
    if not 1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 to 86400 seconds")
    return seconds


def write(path: Path, page: str) -> None:
    """Replace the page atomically. A reader sees either the old page or the new page.

    Raises:
        ConfigError: ``path`` cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError.of("--out", path, f"must be a writable file: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
