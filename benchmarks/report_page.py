"""Claim ``report-page``: the report page of a run with failures shows these failures in a real browser, without network
access.

The runs are real. In one, nodes with expert replicas continue without a lost node; in another, one stage of a pipeline
replays; in the third, all ranks restart from windows. ``tools/report.py`` writes the page of each run. Headless
Chromium opens it in light and dark mode and at widths from 390 to 1900 pixels. The expected content is computed from
the lines of the run's files (``page_checks.py``).
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page_checks import Drawn, Files, look
from benchmarks.report import finish, parse_arguments
from megatron_ft.testing.browser import browse
from megatron_ft.testing.jobs import REPOSITORY, JobResult, forkserver, run_job

ID = "report-page"
TIMEOUT_SECONDS = 240.0
WARM = "megatron_ft.mcore.rank_main:warm"
MOST_BYTES, MOST_SECONDS = 500_000, 2.0
BASE = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=6",
    "training.eval_interval_iterations=0",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "launch.ranks_per_node=1",
)
_WINDOWS = (
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "snapshot.bandwidth_bytes_per_second=6e5",
)
_KILL = "testing.failpoints=['kill(phase=\"backward\",rank={rank},at_iteration={iteration},generation=0)']"
RUNS = {
    "living_state": (
        "training.train_iterations=10",
        "launch.num_nodes=3",
        "recovery.min_nodes=2",
        "parallel.use_distributed_optimizer=false",
        "placement=overlap_search",
        "placement.min_replicas=2",
        "placement.num_slots_per_rank=6",
        _KILL.format(rank=1, iteration=6),
    ),
    "localized_replay": (
        *_WINDOWS,
        "training.train_iterations=20",
        "launch.num_nodes=2",
        "parallel.pipeline_model_parallel_size=2",
        "recovery.keep_layout=true",
        "nodes.restart_lost_nodes=true",
        "recovery.max_restarts=2",
        _KILL.format(rank=1, iteration=14),
    ),
    "rollback": (
        *_WINDOWS,
        "training.train_iterations=20",
        "launch.num_nodes=2",
        "recovery.max_restarts=2",
        _KILL.format(rank=0, iteration=14),
    ),
}
"""Overrides of the run for each recovery strategy."""
QUICK = ("living_state",)


def run_and_look(folder: Path, socket: str, strategy: str) -> Drawn:
    """Make a run and its page, and return the checked page."""
    words = [*BASE, *RUNS[strategy], f"run.name={strategy}", f"data.cache_dir={folder / 'cache'}"]
    run = run_job(words, forkserver=socket, runs=folder, timeout_seconds=TIMEOUT_SECONDS)
    problems = unproven(run, strategy)
    if problems:
        return Drawn(problems=problems, num_bytes=0, seconds=0.0, num_figures=0)
    command = [sys.executable, "-m", "tools.report", str(run.run_dir)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_SECONDS, cwd=REPOSITORY)
    browser = folder / f"browser-{strategy}"
    browser.mkdir()
    with browse(browser) as tab:
        return look(run.run_dir, run.run_dir / "report.html", tab)


def unproven(run: JobResult, strategy: str) -> list[str]:
    """Return reasons why a run does not prove anything about its page; empty if the fault happened and the expected
    strategy was used."""
    if run.exit_code != 0:
        return [f"exit code {run.exit_code}: {run.output[-1000:]}"]
    files = Files.of(run.run_dir)
    strategies = [event["strategy"] for event in files.every("recovery_started")]
    return (
        []
        if files.hits and strategies == [strategy]
        else [f"{len(files.hits)} faults, recovered by {strategies}, not by {strategy}"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs, open their pages, and judge them."""
    arguments = parse_arguments(__doc__, argv)
    strategies = QUICK if arguments.quick else tuple(RUNS)
    with tempfile.TemporaryDirectory(prefix="report-page-") as name, forkserver(WARM) as socket:
        pages = {strategy: run_and_look(Path(name), socket, strategy) for strategy in strategies}
    problems = [f"{strategy}: {problem}" for strategy, page in pages.items() for problem in page.problems]
    size, slowest = max(page.num_bytes for page in pages.values()), max(page.seconds for page in pages.values())
    in_time = slowest <= MOST_SECONDS or arguments.quick  # beside other tests, times are not meaningful
    figure = (
        f"{sum(not page.problems for page in pages.values())} of {len(pages)} pages whole, "
        f"{sum(page.num_figures for page in pages.values())} figures equal, at most {size / 1000:.0f} kB, "
        f"drawn within {slowest:.2f} s"
    )
    return finish(
        arguments.out,
        ID,
        passed=not problems and in_time and size <= MOST_BYTES,
        figure="; ".join([figure, *problems[:1]]),
        threshold=f"every page whole, all figures equal, no request, at most {MOST_BYTES / 1000:.0f} kB, "
        f"drawn within {MOST_SECONDS:g} s",
        counts={"pages": len(pages), "figures": sum(page.num_figures for page in pages.values()), "bytes": size},
        details={"problems": [problem[:500] for problem in problems]},
    )


if __name__ == "__main__":
    sys.exit(main())
