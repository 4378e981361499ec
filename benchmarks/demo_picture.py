"""Draws the README's demo in a terminal as ``docs/images/survive-a-kill.svg``.

python -m benchmarks.demo_picture

A terminal (tmux, 100 columns) has two windows. One runs the demo; the other kills a process named in the first window
with ``kill -9``. Both windows are drawn after the lost node has joined again. A lost or repeated iteration is an error.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from benchmarks.kill_peers import records_of, wait_for
from benchmarks.source import ROOT
from megatron_ft.errors import EXIT_OK

PICTURE = ROOT / "docs" / "images" / "survive-a-kill.svg"
COMMAND = "python pretrain_moe.py experiment=survive_a_kill"
KILLED_RANK = 2
KILL_AT_ITERATION = 50
COLUMNS, ROWS = 100, 34
THEME = TerminalTheme(
    (17, 22, 29),
    (222, 226, 230),
    [
        (60, 66, 74),
        (213, 94, 0),
        (0, 158, 115),
        (230, 159, 0),
        (86, 180, 233),
        (204, 121, 167),
        (86, 180, 233),
        (222, 226, 230),
    ],
    [
        (108, 117, 125),
        (213, 94, 0),
        (0, 158, 115),
        (230, 159, 0),
        (86, 180, 233),
        (204, 121, 167),
        (86, 180, 233),
        (255, 255, 255),
    ],
)
_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#11161d"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""
"""SVG template of ``Console.export_svg`` without a window frame, and without a font from the network."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and draw it. Return the exit code."""
    parser = argparse.ArgumentParser(prog="demo_picture", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="file that the picture is written to")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        screen = play(Path(folder))
    options.out.write_text(draw(screen), encoding="utf-8")
    print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} kB")
    return EXIT_OK


def play(folder: Path) -> str:
    """Run the demo in a terminal. Return the text of both windows, with colours.

    Args:
        folder: Empty folder, in which the terminal's socket and the exit code are written.

    Raises:
        RuntimeError: the job failed, or an iteration was lost or repeated.
    """
    ended = folder / "ended"
    before = set((ROOT / "runs").glob("*"))
    with terminal(folder, "job") as tmux:
        tmux("send-keys", "-t", "job", f"{COMMAND}; echo $? > {ended}", "Enter")
        wait_for(lambda: _named_processes(tmux) is not None, lambda: not ended.exists(), "the processes' names")
        processes = _named_processes(tmux)
        assert processes is not None, "they were just there"
        (run,) = set((ROOT / "runs").glob("*")) - before
        metrics, events = run / "metrics.jsonl", run / "events.jsonl"
        wait_for(
            lambda: _iteration(metrics) >= KILL_AT_ITERATION, lambda: not ended.exists(), "the iteration to kill at"
        )
        tmux("new-window", "-d", "-n", "kill", "-c", str(ROOT), *_SHELL)
        # Text that is typed before the shell reads its terminal appears without a prompt.
        wait_for(
            lambda: tmux("capture-pane", "-p", "-t", "kill").startswith("$"), lambda: not ended.exists(), "a prompt"
        )
        tmux("send-keys", "-t", "kill", f"kill -9 {processes[KILLED_RANK]}", "Enter")

        def is_whole_again() -> bool:
            changes = [event for event in records_of(events) if event["kind"] == "membership_changed"]
            return bool(changes) and bool(changes[-1]["joining"]) and _iteration(metrics) > changes[-1]["iteration"] + 5

        wait_for(is_whole_again, lambda: not ended.exists(), "the node's return")
        screens = [tmux("capture-pane", "-p", "-e", "-t", window).rstrip("\n") for window in ("job", "kill")]
        wait_for(ended.exists, lambda: True, "the end of the run")
    iterations = Counter(record["iteration"] for record in records_of(metrics))
    if ended.read_text().strip() != "0" or sorted(iterations) != [*range(1, max(iterations) + 1)]:
        raise RuntimeError(f"{run}: exit code {ended.read_text().strip()}, or not every iteration was reported")
    if repeated := [iteration for iteration, count in iterations.items() if count > 1]:
        raise RuntimeError(f"{run}: iterations {repeated} were run again")
    shutil.rmtree(run)
    job, kill = screens
    return f"{_without_the_recording(job)}\x1b[0m\n\n{kill.splitlines()[0]}\n"


def _without_the_recording(screen: str) -> str:
    """Return the text of the screen without the options of the demo command that only this recording needs."""
    return re.sub(r"; echo \$\? > \S+", "", screen, count=1)


def _iteration(metrics: Path) -> int:
    return max((record["iteration"] for record in records_of(metrics)), default=0)


def _named_processes(tmux: "Tmux") -> list[int] | None:
    """Return the process ids by rank that the terminal shows; None if it does not show them yet."""
    found = re.search(r"process ids by rank: ([\d ]+\d)", tmux("capture-pane", "-p", "-t", "job"))
    return None if found is None else [int(number) for number in found.group(1).split()]


_SHELL = ("env", "PS1=$ ", "bash", "--norc", "--noprofile")


@contextlib.contextmanager
def terminal(folder: Path, name: str) -> "Iterator[Tmux]":
    """Open a terminal with a shell in the repository, and close it after the block."""
    tmux = Tmux(folder / "tmux")
    tmux("new-session", "-d", "-s", "demo", "-n", name, "-x", str(COLUMNS), "-y", str(ROWS), "-c", str(ROOT), *_SHELL)
    try:
        yield tmux
    finally:
        tmux("kill-server")


class Tmux:
    """Separate tmux server, so that no other session is affected."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def __call__(self, *words: str) -> str:
        """Run a tmux command and return its output.

        Raises:
            subprocess.CalledProcessError: tmux refused the command.
        """
        command = ["tmux", "-S", str(self._socket), "-f", os.devnull, *words]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"COLORTERM": "truecolor", "LC_ALL": "C.UTF-8", "PATH": path}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def draw(screen: str) -> str:
    """Draw the text of a terminal as SVG."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(screen), soft_wrap=True)
        return console.export_svg(theme=THEME, code_format=_SVG, unique_id="demo")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
