"""Stage ``parallel`` of ``tools/gpu_day.py``, a series of tests on a GPU: trains in several parallel layouts.

Each layout must give the losses of one rank on the CPU within a tolerance. Two runs of a layout must give equal bits.
One layout reduces gradients during the backward pass.
"""

from typing import Any

from tools.gpu import ranks
from tools.gpu.day import Day
from tools.gpu.training import MODEL
from tools.gpu.transports import Transport, find_transport

Layout = tuple[int, dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "EP=2": (2, {"parallel.expert_model_parallel_size": 2}),
    "DP=2": (2, {}),
    "TP=2": (2, {"parallel.tensor_model_parallel_size": 2}),
    "PP=2": (2, {"parallel.pipeline_model_parallel_size": 2}),
    "EP=2 x DP=2": (4, {"parallel.expert_model_parallel_size": 2}),
    "DP=2, overlap": (2, {"parallel.overlap_grad_reduce": True}),
}
SHORT_LAYOUTS = ("EP=2",)
FIRST_TOLERANCE = 1e-5
"""Relative tolerance for the loss of the first iteration. All layouts compute it from the same initial state."""
TOLERANCE = 1e-2
"""Relative tolerance for the losses of all iterations. Losses of different layouts differ because rounding can change
the expert to which a token is routed."""


def run(day: Day) -> None:
    """Train twice in every layout. Compare the results with each other and with those of one rank on the CPU."""
    transport = find_transport(day)
    with day.part("one rank on the CPU"):
        expected = _on_cpu(day)
        for name in LAYOUTS if day.has_gpu else SHORT_LAYOUTS:
            with day.part(name):
                _compare(day, transport, name, expected)


def _on_cpu(day: Day) -> dict[str, Any]:
    """Return the results of training one rank on the CPU, in a process that does not see the GPU."""
    config, seconds = ranks.config_for("cpu", MODEL), day.remaining_seconds - 10
    if day.has_gpu:
        jobs = {"one": {"config": config, "world_size": 1}}
        return ranks.run_apart(jobs, folder=day.folder, seconds=seconds)["one"][0]
    return ranks.run_ranks("tools.gpu.ranks:train", world_size=1, arguments={"config": config}, seconds=seconds)[0]


def _compare(day: Day, transport: Transport, name: str, expected: dict[str, Any]) -> None:
    first, second = (train(day, transport, *LAYOUTS[name]) for _ in range(2))
    worst = ranks.difference(first[0], expected)
    at_first = abs(first[0]["losses"][0] / expected["losses"][0] - 1.0)
    same = [ranks.bits(mine) == ranks.bits(other) for mine, other in zip(first, second, strict=True)]
    day.record(
        **{name: {"difference": worst, "first": at_first, "same_bits": all(same), "seconds": first[0]["seconds"]}}
    )
    day.check(
        at_first <= FIRST_TOLERANCE,
        f"{name}: the first loss differs by {at_first:.2e} from that of one rank on the CPU",
    )
    day.check(worst <= TOLERANCE, f"{name}: the losses differ by {worst:.2e} from those of one rank on the CPU")
    day.check(
        all(same),
        f"{name}: the results of ranks {[rank for rank, equal in enumerate(same) if not equal]} "
        "differ between two runs",
    )


def train(day: Day, transport: Transport, world_size: int, parallel: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a few iterations in the parallel layout ``parallel``. Return the results of its ranks in rank order."""
    overrides = {**MODEL, **parallel}
    if day.has_gpu and transport.backend != "nccl":
        overrides["parallel.device_backend"] = transport.backend
    config = ranks.config_for(day.device_type, overrides, world_size=world_size)
    return ranks.run_ranks(
        "tools.gpu.ranks:train",
        world_size=world_size,
        arguments={"config": config},
        environments=transport.environments(world_size),
        seconds=min(90.0, day.remaining_seconds - 5),
    )
