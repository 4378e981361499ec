"""Tests dispatch behaviour that only a CUDA device shows. ``tests/contract`` compares the results with the
reference."""

import pytest
import torch

from megatron_ft.config.placement import SHARES
from megatron_ft.runtime.dispatch.backend import DispatchBackend, open_backend
from megatron_ft.runtime.dispatch.rows import DispatchHandle
from megatron_ft.testing.routing import make_routing, plan_all

HIDDEN = 1024


@pytest.fixture(scope="module")
def backend() -> DispatchBackend:
    return open_backend("cuda")


def handles(name: str, device: str) -> list[DispatchHandle]:
    routing = make_routing(num_ranks=8, topk=8, num_experts=256, tokens=(4096, 1, 0), skew=1.0, seed=1)
    return plan_all(open_backend(name), routing.to(device))


def test_large_plans_equal_the_references() -> None:
    for found, wanted in zip(handles("cuda", "cuda"), handles("reference", "cpu"), strict=True):
        assert torch.equal(found.permutation.cpu(), wanted.permutation)
        assert torch.equal(found.rows_of_token.cpu(), wanted.rows_of_token)
        assert torch.equal(found.receive_order.cpu(), wanted.receive_order)


@pytest.mark.parametrize("shares", SHARES)
def test_schedules_of_many_ranks_equal_the_references_and_read_nothing_back(shares: str) -> None:
    routing = make_routing(num_ranks=64, topk=8, num_experts=256, tokens=(512, 64, 0), skew=1.0, seed=2)
    counts, replicas = routing.counts.cuda(), routing.replicas.cuda()
    backend = open_backend("cuda", shares)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = backend.schedule(counts, replicas, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), open_backend("reference", shares).schedule(routing.counts, routing.replicas, 5))


@pytest.mark.parametrize("hidden", [1, 3, 8, 1000, HIDDEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rows_of_any_width_and_alignment(backend: DispatchBackend, dtype: torch.dtype, hidden: int) -> None:
    handle = handles("cuda", "cuda")[0]
    reference = open_backend("reference")
    storage = torch.randn(handle.num_tokens * hidden + 1, device="cuda").to(dtype)
    for tokens in (storage[:-1].view(-1, hidden), storage[1:].view(-1, hidden)):
        rows = backend.permute(tokens, handle)
        assert torch.equal(rows, reference.permute(tokens, handle))
        assert torch.equal(backend.unpermute(rows, None, handle), reference.unpermute(rows, None, handle))


def test_repeated_passes_give_the_same_bits(backend: DispatchBackend) -> None:
    handle = handles("cuda", "cuda")[0]
    tokens = torch.randn(handle.num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    probs = torch.rand(handle.num_tokens, 256, device="cuda")
    found = []
    for _ in range(5):
        leaf, scale = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
        total = backend.unpermute(backend.permute(leaf, handle), scale, handle)
        total.float().square().sum().backward()
        found.append((total.detach(), leaf.grad, scale.grad))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_kernels_run_on_the_callers_stream(backend: DispatchBackend) -> None:
    handle = handles("cuda", "cuda")[0]
    tokens = torch.zeros(handle.num_tokens, HIDDEN, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        tokens.fill_(1.0)
        rows = backend.permute(tokens, handle)
    stream.synchronize()
    assert bool((rows == 1.0).all())


def test_tensors_in_host_memory_are_refused(backend: DispatchBackend) -> None:
    handle = handles("reference", "cpu")[0]
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        backend.permute(torch.zeros(handle.num_tokens, HIDDEN), handle)
