"""Runs gloo ranks for dispatch tests: ``python -m tests.helpers.dispatch_ranks BACKEND RANKS OUT.json``.

One process imports torch and forks the ranks. Each rank sends its tokens to experts that return them unchanged,
receives the results, and writes what it measured.
"""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.mcore.moe.replica_layer import ExchangeCounter, gather_counts, return_rows, send_rows
from megatron_ft.runtime.dispatch.backend import open_backend
from megatron_ft.testing.routing import make_routing

HIDDEN = 16
JOIN_SECONDS = 90


def run_rank(backend_name: str, rank: int, num_ranks: int, folder: str) -> None:
    """Run one exchange forward and backward, in float64 and bfloat16."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found = {str(dtype): round_trip(backend_name, rank, num_ranks, dtype) for dtype in (torch.float64, torch.bfloat16)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def round_trip(backend_name: str, rank: int, num_ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the results of one rank: deviation of values and gradients from the exact ones, and bytes."""
    group = dist.group.WORLD
    backend = open_backend(backend_name)
    tokens_of_ranks = [23, 0, 41, 8][:num_ranks]
    routing = make_routing(num_ranks=num_ranks, topk=2, num_experts=6, tokens=tokens_of_ranks, skew=1.5, seed=num_ranks)
    routing_map = routing.maps[rank]
    counts = gather_counts(routing_map, group)
    assert torch.equal(counts, routing.counts), "gathered counts differ"
    schedule = backend.schedule(counts, routing.replicas, rank)
    handle = backend.plan(routing_map, schedule, rank, routing.local_experts(rank))

    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(len(routing_map), HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    probs = (torch.rand(routing_map.shape, generator=generator, dtype=torch.float64) * routing_map).to(dtype)
    probs.requires_grad_()
    counter = ExchangeCounter()
    rows = send_rows(backend.permute(tokens, handle), handle, group, counter)
    forward = {"sent_bytes": counter.sent_bytes, "kept_bytes": counter.kept_bytes}
    pieces = backend.sort_received(rows, handle)
    assert [len(piece) for piece in pieces] == handle.piece_sizes
    rows = return_rows(backend.unsort(pieces, handle), handle, group, counter)
    total = backend.unpermute(rows, probs, handle)
    total.double().sum().backward()

    weight = probs.detach().double().sum(1, keepdim=True)
    wanted_probs = tokens.detach().double().sum(1, keepdim=True) * routing_map
    return forward | {
        "row_bytes": HIDDEN * tokens.element_size(),
        "rows_leaving": handle.num_sent_rows - handle.send_splits[rank],
        "rows_kept": handle.send_splits[rank],
        "rows_coming": handle.num_received_rows - handle.recv_splits[rank],
        "all_sent_bytes": counter.sent_bytes,
        "num_exchanges": counter.num_exchanges,
        "value_error": deviation(total, tokens.detach().double() * weight),
        "tokens_grad_error": deviation(tokens.grad, weight.expand(-1, HIDDEN)),
        "probs_grad_error": deviation(probs.grad, wanted_probs),
    }


def deviation(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    assert found is not None
    return float((found.detach().double() - wanted).abs().max()) if wanted.numel() else 0.0


def main(backend_name: str, num_ranks: int, outcome: str) -> None:
    """Fork the ranks and collect their results."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="megatron-ft-") as folder:
        ranks = [
            context.Process(target=run_rank, args=(backend_name, rank, num_ranks, folder)) for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=JOIN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process in ranks]
        assert codes == [0] * num_ranks, f"ranks ended with {codes}"
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]
    Path(outcome).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
