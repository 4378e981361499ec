"""Stage ``smoke`` of ``tools/gpu_day.py``, a series of tests on a GPU: several ranks run and time every collective
that training uses, and check its result."""

import time
from collections.abc import Callable
from typing import Any

from tools.gpu import ranks
from tools.gpu.day import Day, describe
from tools.gpu.transports import find_transport, join

WORLD_SIZE, SHORT_WORLD_SIZE = 4, 2
NUM_ELEMENTS = 1 << 12
REPEATS, SHORT_REPEATS = 20, 3


def run(day: Day) -> None:
    """Find a transport (backend of torch.distributed) that works here, and run every collective over it."""
    transport = find_transport(day)
    if transport.backend != "nccl":
        day.lacks("NCCL", "no transport between ranks that share a GPU works on this machine")
    world_size = WORLD_SIZE if day.has_gpu else SHORT_WORLD_SIZE
    repeats = REPEATS if day.has_gpu else SHORT_REPEATS
    reports = ranks.run_ranks(
        "tools.gpu.collectives:be_rank",
        world_size=world_size,
        arguments={"backend": transport.backend, "device_type": day.device_type, "repeats": repeats},
        environments=transport.environments(world_size),
        seconds=day.remaining_seconds - 5,
    )
    for name in reports[0]:
        found = [report[name] for report in reports]
        day.record(**{name: {"seconds": max(each["seconds"] for each in found)}})
        wrong = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(found) if each["problem"]]
        day.check(not wrong, f"{name}: {'; '.join(wrong)}")


def be_rank(place: ranks.Place, pipe: Any, *, backend: str, device_type: str, repeats: int) -> dict[str, Any]:
    """Run each collective several times on one rank. Return for each the median seconds, and any problem."""
    import torch

    join(place, backend)
    device = torch.device(device_type)
    report = {}
    for name, call in (
        ("all_reduce", _all_reduce),
        ("all_gather", _all_gather),
        ("all_to_all", _all_to_all),
        ("reduce_scatter", _reduce_scatter),
        ("point_to_point", _point_to_point),
    ):
        report[name] = _timed(lambda call=call: call(place, device), repeats)
    return report


def _timed(call: Callable[[], bool], repeats: int) -> dict[str, Any]:
    seconds, problem = [], ""
    for _ in range(repeats):
        began = time.perf_counter()
        try:
            right = call()
        except Exception as error:  # noqa: BLE001 - the other collectives still run
            return {"seconds": 0.0, "problem": describe(error)}
        seconds.append(time.perf_counter() - began)
        problem = problem or ("" if right else "a wrong result")
    return {"seconds": sorted(seconds)[len(seconds) // 2], "problem": problem}


def _all_reduce(place: ranks.Place, device: Any) -> bool:
    import torch
    import torch.distributed as dist

    tensor = torch.full((NUM_ELEMENTS,), float(place.rank + 1), device=device)
    dist.all_reduce(tensor)
    return bool((tensor == place.world_size * (place.world_size + 1) / 2).all())


def _all_gather(place: ranks.Place, device: Any) -> bool:
    import torch
    import torch.distributed as dist

    gathered = torch.zeros(place.world_size, NUM_ELEMENTS, device=device)
    dist.all_gather_into_tensor(gathered.view(-1), torch.full((NUM_ELEMENTS,), float(place.rank), device=device))
    wanted = torch.arange(place.world_size, device=device, dtype=gathered.dtype)
    return bool((gathered == wanted[:, None]).all())


def _all_to_all(place: ranks.Place, device: Any) -> bool:
    """Send j + 1 rows with the value i from each rank i to each rank j. Return whether this rank received its rows."""
    import torch
    import torch.distributed as dist

    sent = [rank + 1 for rank in range(place.world_size)]
    received = [place.rank + 1] * place.world_size
    rows = torch.full((sum(sent), 8), float(place.rank), device=device)
    arrived = torch.full((sum(received), 8), -1.0, device=device)
    dist.all_to_all_single(arrived, rows, received, sent)
    wanted = torch.arange(place.world_size, device=device, dtype=rows.dtype).repeat_interleave(place.rank + 1)
    return bool((arrived == wanted[:, None]).all())


def _reduce_scatter(place: ranks.Place, device: Any) -> bool:
    import torch
    import torch.distributed as dist

    mine = torch.zeros(NUM_ELEMENTS, device=device)
    whole = torch.arange(place.world_size, device=device, dtype=mine.dtype).repeat_interleave(NUM_ELEMENTS)
    dist.reduce_scatter_tensor(mine, whole)
    return bool((mine == place.rank * place.world_size).all())


def _point_to_point(place: ranks.Place, device: Any) -> bool:
    """Send a tensor to the next rank. Return whether the tensor of the previous rank arrived correctly."""
    import torch
    import torch.distributed as dist

    after, before = (place.rank + 1) % place.world_size, (place.rank - 1) % place.world_size
    sent = torch.full((NUM_ELEMENTS,), float(place.rank), device=device)
    arrived = torch.full((NUM_ELEMENTS,), -1.0, device=device)
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, arrived, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return bool((arrived == before).all())
