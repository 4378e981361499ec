"""The pictures of a run's page in docs/tools.md, from a real run.

    python -m benchmarks.pictures                   # writes docs/images/{report,report-experts}.png

Four nodes with expert replicas and snapshots lose one node, continue without it and get it back, twice. Chromium draws
the page, in two parts. ``demo_picture`` draws the README's demo.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.errors import EXIT_OK, ConfigError
from megatron_ft.testing.browser import Tab, browse, chromium
from megatron_ft.testing.jobs import REPOSITORY
from tools import report

IMAGES = REPOSITORY / "docs" / "images"
WIDTH = 1000
"""Pixels of the page."""
NUM_ITERATIONS = 60
FAULTS = ((2, 21, 0), (1, 44, 2))
"""Node, iteration, and generation."""
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
    "recovery.min_nodes=2",
    "nodes.restart_lost_nodes=true",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and draw its page. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="pictures", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder that the pictures are written to")
    options = parser.parse_args(argv)
    if chromium() is None:
        raise ConfigError("pictures: needs Chromium (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name)
        train(folder)
        report.main([str(folder / RUN)])
        with browse(folder) as tab:
            tab.open((folder / RUN / "report.html").as_uri(), width=WIDTH)
            middle, end = _top_of(tab, "#expert-load"), _top_of(tab, "#recovery-2")
            tab.screenshot(options.out / "report.png", bottom=middle)
            tab.screenshot(options.out / "report-experts.png", top=middle, bottom=end)
    for name in ("report", "report-experts"):
        path = options.out / f"{name}.png"
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return EXIT_OK


def _top_of(tab: Tab, selector: str) -> float:
    """Top of an element, with a margin."""
    return float(tab.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().top + scrollY")) - 8.0


def train(folder: Path) -> None:
    """Run the job in ``folder``.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    kills = ",".join(
        f"'kill(phase=\"backward\",node={node},at_iteration={iteration},generation={generation})'"
        for node, iteration, generation in FAULTS
    )
    words = [*WORDS, f"testing.failpoints=[{kills}]", f"run.dir={folder}", f"data.cache_dir={folder / 'cache'}"]
    subprocess.run([sys.executable, "pretrain_moe.py", *words], cwd=REPOSITORY, check=True)


if __name__ == "__main__":
    sys.exit(main())
