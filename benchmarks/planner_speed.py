"""Claim ``planner-speed``: replicas of 256 experts on 1,024 GPUs are planned in under 50 ms per layer on one core."""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import recorded
from benchmarks.report import finish, parse_arguments
from megatron_ft.config.placement import BALANCED, EVEN
from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.layout import busiest_tokens
from megatron_ft.planning.placement.maximum_rank_overlap import MaximumRankOverlap
from megatron_ft.planning.placement.migration import holdings
from megatron_ft.planning.placement.overlap_search import OverlapSearch, search_base
from megatron_ft.topology import Cluster

ID = "planner-speed"
NUM_GPUS = 1024
MAX_LAYER_SECONDS = 0.050
MIN_REPLICAS = 2
MEASURED: dict[str, PlacementAlgorithm] = {
    "overlap_search": OverlapSearch(),
    "all for survival": OverlapSearch(survival_share=1.0),
    "maximum_rank_overlap": MaximumRankOverlap(),
}
REPEATS = 3
QUICK_LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Failure domains of the GPUs, and slots of each GPU."""

    gpus_per_domain: int
    num_slots: int
    """Number of slots per GPU."""

    @property
    def cluster(self) -> Cluster:
        """Return the cluster of 1,024 GPUs, in failure domains of equal size."""
        return Cluster.of(NUM_GPUS // self.gpus_per_domain, self.gpus_per_domain)

    @property
    def name(self) -> str:
        """Return the name that tables show."""
        return f"{NUM_GPUS // self.gpus_per_domain} domains x {self.gpus_per_domain} GPUs x {self.num_slots} slots"


SHAPES = tuple(Shape(gpus_per_domain=size, num_slots=slots) for size in (8, 1) for slots in (2, 3))
"""Shapes of the cluster. The slots of a domain divide the number of experts only with two slots per GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plan every recorded layer separately, several times, and judge the median of the slowest shape."""
    arguments = parse_arguments(__doc__, argv)
    layers = recorded_layers()
    chosen = layers[:QUICK_LAYERS] if arguments.quick else layers
    rows = [measure(name, algorithm, shape, chosen) for name, algorithm in MEASURED.items() for shape in SHAPES]
    worst = max(rows, key=lambda row: row["median_ms"])
    for row in rows:
        times = "median {median_ms:6.1f} ms  slowest {slowest_ms:6.1f} ms".format(**row)
        print(f"{row['algorithm']:>22}  {row['shape']:<36} {times}  even/balanced {row['even_over_balanced']:.3f}")
    return finish(
        arguments.out,
        ID,
        passed=worst["median_ms"] < 1000 * MAX_LAYER_SECONDS,
        figure=f"{worst['median_ms']:.0f} ms a layer in the slowest of {len(rows)} settings ({worst['shape']})",
        threshold="median < 50 CPU ms a layer, allocation and placement, in every setting",
        counts={"layers": len(chosen), "settings": len(rows), "repeats": REPEATS},
        details={"settings": rows, "gpus": NUM_GPUS, "experts": len(chosen[0])},
    )


def recorded_layers() -> list[list[float]]:
    """Return the loads of every MoE layer of the recorded DeepSeek-V3 runs."""
    layers = [layer for name in recorded.DEEPSEEK for layer in recorded.read(name).per_layer().tolist()]
    return [layer for layer in layers if any(layer)]


def measure(
    name: str, algorithm: PlacementAlgorithm, shape: Shape, layers: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return the CPU milliseconds of allocation and placement: the median over layers of the fastest repeat of each
    layer.

    Each plan starts from the experts that ranks have in the placement of the previous layer. The base copies are
    searched again for each plan, although a membership needs this search only once. Above 256 ranks, the search uses
    even shares instead of balanced shares. ``even_over_balanced`` is the ratio of the busiest rank's tokens with even
    shares to those with balanced shares.
    """
    place = partial(algorithm.place, min_replicas=MIN_REPLICAS)
    times, gaps, held = [], [], None
    for loads in layers:
        repeats = []
        for _ in range(REPEATS):
            search_base.cache_clear()
            started = time.process_time()
            counts = allocate(loads, NUM_GPUS * shape.num_slots, MIN_REPLICAS).replica_counts
            plan = place([counts], shape.cluster, num_slots_per_rank=shape.num_slots, loads=[loads], previous=held)
            repeats.append(time.process_time() - started)
        times.append(min(repeats))
        held = holdings(plan)
        even, balanced = (busiest_tokens(plan.replicas_per_rank(0), loads, shares) for shares in (EVEN, BALANCED))
        gaps.append(even / balanced)
    return {
        "algorithm": name,
        "shape": shape.name,
        "median_ms": round(1000 * statistics.median(times), 2),
        "slowest_ms": round(1000 * max(times), 2),
        "even_over_balanced": round(statistics.median(gaps), 3),
    }


def on_one_core() -> None:
    """Start this program again with one thread for matrix products. numpy reads this number when it is imported."""
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in single.items()):
        command = [sys.executable, "-m", "benchmarks.planner_speed", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **single})


if __name__ == "__main__":
    on_one_core()
    sys.exit(main())
