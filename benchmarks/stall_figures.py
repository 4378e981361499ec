"""Computes the figures of ``snapshot_stall.py`` from its measured rows."""

import mmap
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

OURS, DCP, DCP_SHARED, MEGATRON = "ours", "dcp", "dcp_shared", "torch_dist"
NAMES = {
    OURS: "sparse windows, r=2",
    DCP: "torch async_save",
    DCP_SHARED: "torch async_save, shared memory",
    MEGATRON: "Megatron torch_dist, background",
}
MAX_SHARE, QUICK_MAX_SHARE = 0.02, 0.10
MAX_MEMCPY, QUICK_MAX_MEMCPY = 1.2, 6.0
MIN_WINDOW_ITERATIONS = 3
MAX_NEW_PAGES = 0.001
"""Largest number of new pages in all rounds, as a share of the pages that one round captures."""

Row = dict[str, Any]
"""Measurements of one system in one round on one rank."""


def summary(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures for each system: the slowest rank of each round, then the median over the rounds except the first.

    Args:
        ranks: Measurements of each rank, all in the same order.
    """
    plain = statistics.median(
        max(seconds) for seconds in zip(*(rank["plain_seconds"][1:] for rank in ranks), strict=True)
    )
    plain_cpu = statistics.median(seconds for rank in ranks for seconds in rank["plain_cpu_seconds"][1:])
    systems = {
        name: _of_system([[row for row in rank["rows"] if row["system"] == name] for rank in ranks], plain, plain_cpu)
        for name in NAMES
        if any(row["system"] == name for row in ranks[0]["rows"])
    }
    dense = max(rank["dense_bytes"] for rank in ranks)
    for figures in systems.values():
        figures["bytes_against_dense"] = figures["save_bytes"] / dense
    return {
        "systems": systems,
        "iteration_seconds": plain,
        "dense_bytes": dense,
        "window_iterations": ranks[0]["window_iterations"],
        "num_delayed": sum(rank["num_delayed"] for rank in ranks),
        "operations": [max(counts) for counts in zip(*(rank["operations"] for rank in ranks), strict=True)],
    }


def judge(figures: dict[str, Any], *, num_saves: int, quick: bool) -> tuple[bool, str, str]:
    """Return (whether the claim holds, the figure, the threshold)."""
    ours = figures["systems"][OURS]
    share, memcpy = (QUICK_MAX_SHARE, QUICK_MAX_MEMCPY) if quick else (MAX_SHARE, MAX_MEMCPY)
    checks = [
        (MIN_WINDOW_ITERATIONS <= figures["window_iterations"] == num_saves, f"W={figures['window_iterations']}"),
        (ours["share_of_iteration"] <= share, f"{ours['share_of_iteration']:.2%} of an iteration"),
        (ours["of_memcpy"] <= memcpy, f"{ours['of_memcpy']:.2f}x memcpy"),
        (
            ours["capture_faults"] <= MAX_NEW_PAGES * ours["save_bytes"] * num_saves / mmap.PAGESIZE,
            f"{ours['capture_faults']} new pages while copying",
        ),
        (sum(figures["operations"][1:]) == 0, f"torch operations by slice: {figures['operations']}"),
        (figures["num_delayed"] == 0, f"{figures['num_delayed']} windows delayed"),
    ]
    failed = [text for holds, text in checks if not holds]
    others = ", ".join(f"{NAMES[name]} {figures['systems'][name]['of_memcpy']:.1f}x" for name in NAMES if name != OURS)
    figure = (
        f"blocked {ours['share_of_iteration']:.2%} of an iteration of {figures['iteration_seconds']:.2f} s, "
        f"{ours['of_memcpy']:.2f}x memcpy (first window {ours['first_of_memcpy']:.1f}x; {others}); copying "
        f"{ours['capture_cpu_seconds'] * 1e3:.1f} CPU ms an iteration and rank, keepers with r=2 "
        f"{ours['keeper_cpu_seconds'] * 1e3:.1f}; {ours['bytes_against_dense']:.2f} of dense bytes each; "
        f"{ours['capture_faults']} new pages while copying; device memory n/a on CPU"
    )
    bounds = f"<= {share:.0%} of an iteration, <= {memcpy:g}x memcpy, slowest rank, W >= 3"
    threshold = f"{bounds}; new pages <= {MAX_NEW_PAGES:.1%} of those captured"
    return not failed, "; ".join([*failed, figure] if failed else [figure]), threshold


def table(figures: dict[str, Any]) -> str:
    """Format the table of figures for one save: CPU milliseconds while training was blocked, and all CPU milliseconds
    that the rank needs in addition to training."""
    lines = [
        f"{'':34}{'blocked ms':>11}{'x memcpy':>10}{'worst':>8}{'of iter.':>10}{'first ms':>10}{'first x':>9}"
        f"{'its CPU':>9}{'rank CPU':>9}{'bytes':>7}{'slowed':>8}"
    ]
    for name, row in figures["systems"].items():
        lines.append(
            f"{NAMES[name]:34}{row['blocked_seconds'] * 1e3:11.2f}{row['of_memcpy']:10.2f}{row['worst_of_memcpy']:8.2f}"
            f"{row['share_of_iteration']:10.2%}{row['first_blocked_seconds'] * 1e3:10.1f}{row['first_of_memcpy']:9.2f}"
            f"{row['blocked_cpu_seconds'] * 1e3:9.1f}{row['cpu_seconds'] * 1e3:9.1f}"
            f"{row['bytes_against_dense']:7.2f}{row['slowdown']:8.2f}"
        )
    return "\n".join(lines)


def _of_system(by_rank: Sequence[Sequence[Row]], plain: float, plain_cpu: float) -> dict[str, Any]:
    """Return the figures for one save of one system."""
    rounds = list(zip(*by_rank, strict=True))
    warm = rounds[1:]
    num_saves = len(rounds[0][0]["blocked_seconds"])

    def slowest(value: Callable[[Row], float]) -> float:
        return statistics.median(max(value(row) for row in rows) for rows in warm)

    def beyond_training(row: Row) -> float:
        return float(row["process_cpu_seconds"] - plain_cpu * len(row["iteration_seconds"]))

    blocked = slowest(_blocked)
    return {
        "blocked_seconds": blocked / num_saves,
        "of_memcpy": slowest(lambda row: _blocked(row) / row["memcpy_seconds"]),
        "worst_of_memcpy": max(_blocked(row) / row["memcpy_seconds"] for rows in warm for row in rows),
        "share_of_iteration": blocked / num_saves / plain,
        "first_blocked_seconds": max(row["blocked_seconds"][0] for row in rounds[0]),
        "first_of_memcpy": max(row["blocked_seconds"][0] / row["memcpy_seconds"] * num_saves for row in rounds[0]),
        "save_bytes": slowest(lambda row: row["num_bytes"]) / num_saves,
        "blocked_by_save": [slowest(partial(_blocked_by, save)) for save in range(num_saves)],
        "settle_seconds": slowest(lambda row: float(sum(row["settle_seconds"]))) / num_saves,
        "blocked_cpu_seconds": slowest(lambda row: row["blocked_cpu_seconds"]) / num_saves,
        "cpu_seconds": slowest(beyond_training) / num_saves,
        "capture_cpu_seconds": slowest(lambda row: row["capture_cpu_seconds"]) / num_saves,
        "keeper_cpu_seconds": statistics.median(sum(row["keeper_cpu_seconds"] for row in rows) for rows in warm)
        / num_saves,
        "capture_faults": sum(row["capture_faults"] for rows in warm for row in rows),
        "main_faults": statistics.median(max(row["main_faults"] for row in rows) for rows in warm) / num_saves,
        "slowdown": statistics.median(
            statistics.median(seconds) for rows in warm for seconds in (row["iteration_seconds"] for row in rows)
        )
        / plain,
        "drain_seconds": slowest(lambda row: row["drain_seconds"]),
    }


def _blocked_by(save: int, row: Row) -> float:
    return float(row["blocked_seconds"][save])


def _blocked(row: Row) -> float:
    return float(sum(row["blocked_seconds"]))
