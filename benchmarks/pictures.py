"""The pictures of a run in the README, made anew from a real one: its page, and its live panel in a terminal.

    python -m benchmarks.pictures                   # writes docs/images/{report,report-experts,terminal}.png

Four nodes with expert replicas and snapshots lose one, go on without it and get it back, twice. The run has a terminal
of its own (tmux, 100 columns); the panel is taken while the first recovery is the newest thing on it. Chromium draws
both; the page is taken in two parts.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from benchmarks.kill_peers import records_of, wait_for
from megatron_ft.errors import EXIT_OK, ConfigError
from tests.helpers.browser import Tab, browse, chromium
from tests.helpers.jobs import REPOSITORY
from tools import report

IMAGES = REPOSITORY / "docs" / "images"
COLUMNS, ROWS = 100, 32
WIDTH = 1000
"""Pixels of the page."""
NUM_ITERATIONS = 60
FAULTS = ((2, 21, 0), (1, 44, 2))
"""Node, iteration, and the generation that it is of."""
RUN = "survivor"
WORDS = (
    "model=moe_micro",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.eval_interval_iterations=15",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "launch.num_nodes=4",
    "launch.ranks_per_node=1",
    "launch.min_nodes=2",
    "launch.restart_lost_nodes=true",
    "parallel.use_distributed_optimizer=false",
    "placement=overlap_search",
    "placement.num_slots_per_rank=6",
    "placement.rebalance_interval_iterations=10",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "snapshot.bandwidth_bytes_per_second=4e5",
    f"run.name={RUN}",
)
_DARK = TerminalTheme(
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
_PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ margin: 0; background: #11161d; color: #dee2e6; width: max-content; }}
pre {{ margin: 0; padding: 14px 18px; font: 16px/18px "DejaVu Sans Mono", monospace; }}
{stylesheet}
</style><pre>{code}</pre>"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, watch, draw. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="pictures", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder that the pictures are written to")
    options = parser.parse_args(argv)
    if chromium() is None:
        raise ConfigError("pictures: needs Chromium (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name)
        screen = watch(folder)
        report.main([str(folder / RUN)])
        page = folder / "terminal.html"
        page.write_text(screen_as_html(screen), encoding="utf-8")
        with browse(folder) as tab:
            tab.open((folder / RUN / "report.html").as_uri(), width=WIDTH)
            middle, end = _top_of(tab, "#expert-load"), _top_of(tab, "#recovery-2")
            tab.screenshot(options.out / "report.png", bottom=middle)
            tab.screenshot(options.out / "report-experts.png", top=middle, bottom=end)
            tab.open(page.as_uri(), width=400)
            tab.screenshot(options.out / "terminal.png", bottom=tab.evaluate("document.body.offsetHeight"))
    for name in ("report", "report-experts", "terminal"):
        path = options.out / f"{name}.png"
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return EXIT_OK


def _top_of(tab: Tab, selector: str) -> float:
    """Where an element begins, with a little of what is above it."""
    return float(tab.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().top + scrollY")) - 8.0


def watch(folder: Path) -> str:
    """Run the job in a terminal; what stood on it, with its colours, when the first recovery was the newest.

    Raises:
        TimeoutError: it does not come so far.
    """
    kills = ",".join(
        f"'kill(phase=\"backward\",node={node},at_iteration={iteration},generation={generation})'"
        for node, iteration, generation in FAULTS
    )
    words = [*WORDS, f"launch.failpoints=[{kills}]", f"run.dir={folder}", f"data.cache_dir={folder / 'cache'}"]
    command = shlex.join([sys.executable, "pretrain_moe.py", *words])
    events, ended = folder / RUN / "events.jsonl", folder / "ended"
    with terminal(folder, f"{command}; echo $? > {shlex.quote(str(ended))}; read") as tmux:

        def recovered() -> bool:
            kinds = [event["kind"] for event in records_of(events)]
            metrics = records_of(folder / RUN / "metrics.jsonl")
            return "membership_changed" in kinds and bool(metrics) and metrics[-1]["iteration"] > FAULTS[0][1] + 3

        wait_for(recovered, lambda: not ended.exists(), "the first recovery")
        screen = tmux("capture-pane", "-p", "-e", "-t", RUN)
        wait_for(ended.exists, lambda: True, "the end of the run")
    if (code := ended.read_text().strip()) != "0":
        raise TimeoutError(f"the run ended with exit code {code}")
    return screen


@contextlib.contextmanager
def terminal(folder: Path, command: str) -> "Iterator[Tmux]":
    """A terminal in which ``command`` runs; it is gone afterwards."""
    tmux = Tmux(folder / "tmux")
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    tmux("new-session", "-d", "-s", RUN, *size, "-c", str(REPOSITORY), command)
    try:
        yield tmux
    finally:
        tmux("kill-server")


class Tmux:
    """A server of our own, so that no other session is touched."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def __call__(self, *words: str) -> str:
        """Give it a command; what it prints.

        Raises:
            subprocess.CalledProcessError: it refuses.
        """
        command = ["tmux", "-S", str(self._socket), "-f", os.devnull, *words]
        environment = os.environ | {"COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def screen_as_html(screen: str) -> str:
    """What stands on a terminal as a page."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(screen.rstrip("\n")), soft_wrap=True)
        return console.export_html(theme=_DARK, code_format=_PAGE)


if __name__ == "__main__":
    sys.exit(main())
