"""Renders a run as one page: the loss, the failures, and the ranks and transfers of each recovery.

    python -m tools.report runs/moe_tiny-001                    # writes runs/moe_tiny-001/report.html
    python -m tools.report runs/moe_tiny-001 --out page.html
    python -m tools.report runs/moe_tiny-001 --live             # writes it again while the run continues

The page is one file that loads nothing else. It is made from events.jsonl, metrics.jsonl, decisions.jsonl and
placements/. The run may still be going on.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.errors import EXIT_OK, ConfigError, MegatronFtError
from megatron_ft.telemetry.report.files import follow, read_run
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
    parser.add_argument("--live", action="store_true", help="update the page during the run, until the run ends")
    parser.add_argument(
        "--every", type=_whole_seconds, default=5, metavar="SECONDS", help="least time between two updates; default 5"
    )
    parser.add_argument(
        "--patience",
        type=_whole_seconds,
        default=600,
        metavar="SECONDS",
        help="time without a report after which --live ends; default 600",
    )
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / FILE
    try:
        if options.live:
            return _live(options.run_dir, out, every_seconds=options.every, patience_seconds=options.patience)
        write(out, render(build(read_run(options.run_dir))))
    except MegatronFtError as error:
        print(f"report: {error}", file=sys.stderr)
        return error.exit_code
    print(out)
    return EXIT_OK


def _live(run_dir: Path, out: Path, *, every_seconds: int, patience_seconds: int) -> int:
    """Write the page until the run has ended. The last page no longer reloads itself."""

    def write_page() -> bool:
        report = build(read_run(run_dir))
        has_ended = report.outcome.level != "open"
        write(out, render(report, refresh_seconds=None if has_ended else every_seconds))
        return has_ended

    print(f"{out}: updated when the run reports; end with Ctrl-C", flush=True)
    try:
        if follow(run_dir, write_page, every_seconds=every_seconds, patience_seconds=patience_seconds):
            return EXIT_OK
        print(f"report: {run_dir} has reported nothing for {patience_seconds} s", file=sys.stderr)
    except KeyboardInterrupt:
        print("report: updates have ended", file=sys.stderr)
    write(out, render(build(read_run(run_dir))))
    return EXIT_OK


def _whole_seconds(text: str) -> int:
    seconds = int(text)
    if not 1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 to 86400 seconds")
    return seconds


def write(path: Path, page: str) -> None:
    """Replace the page atomically: readers see the old page or the new one.

    Raises:
        ConfigError: the page cannot be written there.
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
