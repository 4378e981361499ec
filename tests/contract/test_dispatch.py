"""Tests that every dispatch backend gives the same bits as the reference. To test a new backend, add a row."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ft.config.placement import SHARES
from megatron_ft.planning.dispatch import quotas
from megatron_ft.runtime.dispatch.backend import BACKENDS as BACKEND_CLASSES
from megatron_ft.runtime.dispatch.backend import DispatchBackend, open_backend
from megatron_ft.runtime.dispatch.rows import NO_ROW, DispatchHandle
from megatron_ft.testing.jobs import REPOSITORY as ROOT
from megatron_ft.testing.routing import Routing, make_routing, plan_all, swap
from tests.helpers.sharing import chosen

BACKENDS = {"reference": "cpu", "cpp": "cpu", "cuda": "cuda"}
"""Backends, and the device on which each is tested."""

CASES = {
    "one-rank": {"num_ranks": 1, "topk": 1, "num_experts": 4, "tokens": (17,), "skew": 0.0},
    "balanced": {"num_ranks": 2, "topk": 2, "num_experts": 8, "tokens": (32,), "skew": 0.0},
    "skewed": {"num_ranks": 3, "topk": 2, "num_experts": 8, "tokens": (64,), "skew": 2.0},
    "uneven-ranks": {"num_ranks": 4, "topk": 3, "num_experts": 7, "tokens": (5, 40, 1, 13), "skew": 1.0},
    "empty-ranks": {"num_ranks": 5, "topk": 4, "num_experts": 9, "tokens": (0, 31), "skew": 1.0},
    "no-tokens": {"num_ranks": 3, "topk": 2, "num_experts": 5, "tokens": (0,), "skew": 0.0},
    "dropped-pairs": {"num_ranks": 3, "topk": 4, "num_experts": 6, "tokens": (29,), "skew": 1.5, "drop": 0.4},
    "many-experts": {"num_ranks": 4, "topk": 4, "num_experts": 64, "tokens": (128,), "skew": 0.7},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HIDDEN = 12


@cache
def routing_of(case: str) -> Routing:
    return make_routing(**CASES[case], seed=len(case))


@cache
def reference_handles(case: str) -> list[DispatchHandle]:
    return plan_all(open_backend("reference"), routing_of(case))


@pytest.fixture(params=BACKENDS)
def opened(request: pytest.FixtureRequest) -> tuple[DispatchBackend, str]:
    name, device = request.param, BACKENDS[request.param]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    return open_backend(name), device


def name_of(backend: DispatchBackend) -> str:
    """Return the name that opens a backend like ``backend``."""
    return next(name for name, kind in BACKEND_CLASSES.items() if kind is type(backend))


Planned = Callable[[str], tuple[Routing, list[DispatchHandle]]]


@pytest.fixture
def planned(opened: tuple[DispatchBackend, str]) -> Planned:
    backend, device = opened

    def plan(case: str) -> tuple[Routing, list[DispatchHandle]]:
        routing = routing_of(case).to(device)
        return routing, plan_all(backend, routing)

    return plan


def expected_rows(routing: Routing, outgoing: torch.Tensor, rank: int) -> list[tuple[int, int, int]]:
    """Return (destination, expert, token) of each sent row, computed with plain lists."""
    num_ranks = len(routing.maps)
    filling = [rank] + [other for other in range(num_ranks) if other != rank]
    rows = []
    for expert in range(len(outgoing)):
        tokens = routing.maps[rank][:, expert].nonzero().flatten().tolist()
        for destination in filling:
            taken, tokens = tokens[: outgoing[expert, destination]], tokens[outgoing[expert, destination] :]
            rows += [(destination, expert, token) for token in taken]
        assert tokens == []
    return sorted(rows)


def schedules(backend: DispatchBackend, counts: torch.Tensor, replicas: torch.Tensor) -> torch.Tensor:
    """Return the schedules of all ranks, [N, 2, E, N]."""
    return torch.stack([backend.schedule(counts, replicas, rank) for rank in range(counts.shape[1])])


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("case", CASES)
def test_the_schedule_sends_every_token_to_a_copy(opened: tuple[DispatchBackend, str], case: str, shares: str) -> None:
    device = opened[1]
    backend = open_backend(name_of(opened[0]), shares)
    routing = routing_of(case).to(device)
    schedule = schedules(backend, routing.counts, routing.replicas)
    assert schedule.dtype == torch.int64
    assert schedule.device == routing.counts.device
    assert (schedule >= 0).all()
    sent, received = schedule.unbind(1)
    assert torch.equal(sent.permute(1, 0, 2), received.permute(1, 2, 0)), (
        "a rank does not receive what the other ranks send to it"
    )
    assert torch.equal(sent.sum(2).t(), routing.counts)
    assert (sent.sum(0)[routing.replicas == 0] == 0).all()
    expected = schedules(open_backend("reference", shares), routing_of(case).counts, routing_of(case).replicas)
    assert torch.equal(schedule.cpu(), expected)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("seed", range(20))
def test_schedules_of_large_uneven_counts_are_the_references(
    opened: tuple[DispatchBackend, str], seed: int, shares: str
) -> None:
    device = opened[1]
    backend = open_backend(name_of(opened[0]), shares)
    generator = torch.Generator().manual_seed(seed)
    num_experts, num_ranks = 1 + 5 * seed, 1 + seed % 7
    counts = torch.randint(0, 10 ** (1 + seed % 6), (num_experts, num_ranks), generator=generator)
    counts[torch.rand(num_experts, generator=generator) < 0.2] = 0
    replicas = torch.randint(0, 4, (num_experts, num_ranks), generator=generator)
    replicas *= torch.rand(replicas.shape, generator=generator) < 0.3 + 0.1 * (seed % 4)
    replicas[torch.arange(num_experts), torch.arange(num_experts) % num_ranks] += 1
    schedule = schedules(backend, counts.to(device), replicas.to(device))
    assert torch.equal(schedule.cpu(), schedules(open_backend("reference", shares), counts, replicas))


def test_backends_stop_after_the_same_number_of_rounds(opened: tuple[DispatchBackend, str]) -> None:
    backend, device = opened
    # In a chain of neighbours with even loads, tokens must pass many ranks: MAX_ROUNDS rounds do not reach the mean.
    num_ranks, num_experts = 100, 400
    first = torch.arange(num_experts) * (num_ranks - 1) // num_experts
    replicas = torch.zeros((num_experts, num_ranks), dtype=torch.int64)
    replicas[torch.arange(num_experts), first] = replicas[torch.arange(num_experts), first + 1] = 1
    drawn = np.random.default_rng(1).multinomial(4096, [1 / num_experts] * num_experts, num_ranks)
    counts = torch.from_numpy(drawn.T.copy())
    assert quotas(counts.numpy(), replicas.numpy()).sum(axis=0).max() > 4096, "the mean is 4096"
    found = backend.schedule(counts.to(device), replicas.to(device), 3)
    assert torch.equal(found.cpu(), open_backend("reference").schedule(counts, replicas, 3))


@pytest.mark.parametrize("case", CASES)
def test_rows_are_sent_in_the_stated_order(opened: tuple[DispatchBackend, str], planned: Planned, case: str) -> None:
    routing, handles = planned(case)
    for rank, handle in enumerate(handles):
        rows = expected_rows(routing, opened[0].schedule(routing.counts, routing.replicas, rank)[0], rank)
        assert handle.permutation.tolist() == [token for _, _, token in rows]
        assert handle.expert_of_row.tolist() == [expert for _, expert, _ in rows]
        destinations = [destination for destination, _, _ in rows]
        assert handle.send_splits == [destinations.count(other) for other in range(len(handles))]
        by_token: list[list[tuple[int, int]]] = [[] for _ in range(handle.num_tokens)]
        for row, (_, expert, token) in enumerate(rows):
            by_token[token].append((expert, row))
        listed = [[row for row in line if row != NO_ROW] for line in handle.rows_of_token.tolist()]
        assert listed == [[row for _, row in sorted(line)] for line in by_token]
        assert handle.rows_of_token.shape[1] == max((len(line) for line in by_token), default=0)


@pytest.mark.parametrize("case", CASES)
def test_received_rows_lie_together_by_local_expert(planned: Planned, case: str) -> None:
    routing, handles = planned(case)
    labels = []
    for rank, handle in enumerate(handles):
        source = torch.full_like(handle.permutation, rank)
        labels.append(torch.stack([handle.expert_of_row, source, handle.permutation], dim=1))
    arrived = swap(labels, [handle.send_splits for handle in handles])
    for rank, (handle, got) in enumerate(zip(handles, arrived, strict=True)):
        local = routing.local_experts(rank)
        assert len(got) == handle.num_received_rows
        ordered = got[handle.receive_order].tolist()
        assert ordered == sorted(ordered), "expert first, then source rank, then token"
        assert handle.local_experts == tuple(local)
        experts = [expert for expert, _, _ in ordered]
        assert handle.tokens_per_local_expert.tolist() == [experts.count(expert) for expert in local]
        assert torch.equal(handle.receive_order.sort().values.cpu(), torch.arange(len(got)))
        assert [sum(1 for _, source, _ in ordered if source == other) for other in range(len(handles))] == (
            handle.recv_splits
        )


@pytest.mark.parametrize("case", CASES)
def test_handles_equal_the_references(planned: Planned, case: str) -> None:
    for handle, expected in zip(planned(case)[1], reference_handles(case), strict=True):
        for field in fields(DispatchHandle):
            value, wanted = getattr(handle, field.name), getattr(expected, field.name)
            if isinstance(wanted, torch.Tensor):
                assert torch.equal(value.cpu(), wanted) and value.dtype == wanted.dtype, field.name
            else:
                assert value == wanted, field.name


def movements(
    backend: DispatchBackend, handle: DispatchHandle, dtype: torch.dtype, device: str, *, weighted: bool
) -> dict[str, torch.Tensor]:
    """Return the values and gradients of every movement, for inputs that depend only on the shapes."""
    generator = torch.Generator().manual_seed(handle.num_sent_rows)

    def numbers(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        return made.requires_grad_()

    tokens, rows, arrived = (
        numbers(length, HIDDEN) for length in (handle.num_tokens, handle.num_sent_rows, handle.num_received_rows)
    )
    num_experts = int(handle.expert_of_row.max()) + 1 if handle.num_sent_rows else 1
    probs = numbers(handle.num_tokens, num_experts)
    found = {
        "permute": backend.permute(tokens, handle),
        "sort_received": torch.cat(backend.sort_received(arrived, handle)),
        "unsort": backend.unsort(arrived.split(handle.piece_sizes), handle),
        "unpermute": backend.unpermute(rows, probs if weighted else None, handle),
        "row_probs": backend.row_probs(probs, handle),
    }
    sum((value.double() * numbers(*value.shape).detach()).sum() for value in found.values()).backward()
    found |= {"grad_tokens": tokens.grad, "grad_rows": rows.grad, "grad_arrived": arrived.grad}
    found |= {"grad_probs": probs.grad}
    return {name: value.detach().cpu() for name, value in found.items()}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_movements_and_gradients_have_the_references_bits(
    opened: tuple[DispatchBackend, str], planned: Planned, case: str, dtype: torch.dtype, weighted: bool
) -> None:
    backend, device = opened
    for handle, expected in zip(planned(case)[1], reference_handles(case), strict=True):
        found = movements(backend, handle, dtype, device, weighted=weighted)
        wanted = movements(open_backend("reference"), expected, dtype, "cpu", weighted=weighted)
        for name, value in found.items():
            assert value.dtype == wanted[name].dtype
            assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("case", chosen(["skewed", "empty-ranks", "dropped-pairs"], ["skewed"]))
def test_gradients_are_the_derivatives(opened: tuple[DispatchBackend, str], planned: Planned, case: str) -> None:
    backend, device = opened
    handle = planned(case)[1][1]
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()

    def check(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
        assert torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)

    num_experts = routing_of(case).replicas.shape[0]
    check(lambda tokens: backend.permute(tokens, handle), numbers(handle.num_tokens, 2))
    check(lambda rows: backend.sort_received(rows, handle), numbers(handle.num_received_rows, 2))
    pieces = [numbers(num_rows, 2) for num_rows in handle.piece_sizes]
    check(lambda *pieces: backend.unsort(pieces, handle), *pieces)
    check(lambda rows: backend.unpermute(rows, None, handle), numbers(handle.num_sent_rows, 2))
    probs = numbers(handle.num_tokens, num_experts)
    check(lambda rows, probs: backend.unpermute(rows, probs, handle), numbers(handle.num_sent_rows, 2), probs)
    check(lambda probs: backend.row_probs(probs, handle), probs)


@pytest.mark.parametrize("case", CASES)
def test_identity_experts_give_back_the_tokens(
    opened: tuple[DispatchBackend, str], planned: Planned, case: str
) -> None:
    backend, device = opened
    routing, handles = planned(case)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randn(len(each), HIDDEN, generator=generator).to(device) for each in routing.maps]
    probs = [torch.rand(each.shape, generator=generator).to(device) * each for each in routing.maps]
    sent = [backend.permute(each, handle) for each, handle in zip(tokens, handles, strict=True)]
    arrived = swap(sent, [handle.send_splits for handle in handles])
    back = [
        backend.unsort(backend.sort_received(each, handle), handle)
        for each, handle in zip(arrived, handles, strict=True)
    ]
    returned = swap(back, [handle.recv_splits for handle in handles])
    for rank, handle in enumerate(handles):
        total = backend.unpermute(returned[rank], probs[rank], handle)
        torch.testing.assert_close(total, tokens[rank] * probs[rank].sum(1, keepdim=True))


def test_a_tokens_sum_does_not_depend_on_the_placement(opened: tuple[DispatchBackend, str]) -> None:
    backend, device = opened
    generator = torch.Generator().manual_seed(0)
    totals = []
    for seed in range(3):
        routing = make_routing(num_ranks=3, topk=4, num_experts=8, tokens=(50,), skew=1.0, seed=seed).to(device)
        first = make_routing(num_ranks=3, topk=4, num_experts=8, tokens=(50,), skew=1.0, seed=0).to(device)
        routing = Routing(maps=first.maps, replicas=routing.replicas)
        handle = plan_all(backend, routing)[0]
        by_expert = torch.randn(8, 50, HIDDEN, generator=generator.manual_seed(9)).to(device)
        rows = by_expert[handle.expert_of_row, handle.permutation]
        totals.append(backend.unpermute(rows, None, handle))
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])


def test_what_does_not_fit_is_refused(opened: tuple[DispatchBackend, str]) -> None:
    backend, device = opened
    routing = routing_of("skewed").to(device)
    schedule = backend.schedule(routing.counts, routing.replicas, 0)
    local = routing.local_experts(0)
    with pytest.raises(ValueError, match="but the routing map of this rank has"):
        backend.plan(routing.maps[1], schedule, 0, local)
    with pytest.raises(ValueError, match="which has only experts"):
        backend.plan(routing.maps[0], schedule, 0, local[1:])
    with pytest.raises(ValueError, match="ascending"):
        backend.plan(routing.maps[0], schedule, 0, local[::-1])
    with pytest.raises(ValueError, match="must be bool"):
        backend.plan(routing.maps[0].long(), schedule, 0, local)
    with pytest.raises(ValueError, match="must be int64"):
        backend.plan(routing.maps[0], schedule[:, :2], 0, local)
    with pytest.raises(ValueError, match="from 0 to 2"):
        backend.plan(routing.maps[0], schedule, 3, local)
    handle = backend.plan(routing.maps[0], schedule, 0, local)
    with pytest.raises(ValueError, match=r"must have shape \[64, H\]"):
        backend.permute(torch.zeros(63, HIDDEN, device=device), handle)
    with pytest.raises(ValueError, match="float32"):
        backend.permute(torch.zeros(64, HIDDEN, dtype=torch.int64, device=device), handle)


def test_schedules_refuse_bad_shapes(opened: tuple[DispatchBackend, str]) -> None:
    backend, device = opened
    counts = torch.tensor([[3, 4], [0, 0]], device=device)
    replicas = torch.tensor([[1, 0], [0, 0]], device=device)
    backend.schedule(counts, replicas, 0)
    with pytest.raises(ValueError, match=r"\[E, N\]"):
        backend.schedule(counts, replicas[:, :1], 0)
    with pytest.raises(ValueError, match="rank=2: must be from 0 to 1"):
        backend.schedule(counts, replicas, 2)


def test_counts_without_a_schedule_are_refused(opened: tuple[DispatchBackend, str]) -> None:
    backend, device = opened
    counts = torch.tensor([[3, 4], [0, 0]], device=device)
    replicas = torch.tensor([[1, 0], [0, 0]], device=device)
    routing_map = torch.tensor([[True, False]] * 3, device=device)
    if device == "cuda":
        # Nothing is copied to the host before the splits. Their sums show the contradiction.
        with pytest.raises(ValueError, match="sends 0 tokens of expert 0 from rank 0, but the routing map .* has 3"):
            backend.plan(routing_map, backend.schedule(counts, torch.zeros_like(replicas), 0), 0, [])
        return
    with pytest.raises(ValueError, match="expert 0"):
        backend.schedule(counts, torch.zeros_like(replicas), 0)
    with pytest.raises(ValueError, match="must be at least 0"):
        backend.schedule(-counts, replicas, 0)
    with pytest.raises(ValueError, match="2147483648"):
        backend.schedule(counts << 29, replicas, 0)


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", chosen([1, 2, 3, 4], [1, 2, 3]))
@pytest.mark.parametrize("name", [name for name, device in BACKENDS.items() if device == "cpu"])
def test_real_ranks_get_their_tokens_back_and_send_no_byte_too_many(name: str, num_ranks: int, tmp_path: Path) -> None:
    outcome = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.helpers.dispatch_ranks", name, str(num_ranks), str(outcome)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in json.loads(outcome.read_text()):
        for dtype, found in rank.items():
            tolerance = 1e-12 if dtype == "torch.float64" else 0.1
            assert found["value_error"] <= tolerance
            assert found["tokens_grad_error"] <= tolerance
            assert found["probs_grad_error"] <= tolerance
            assert found["sent_bytes"] == found["rows_leaving"] * found["row_bytes"]
            assert found["kept_bytes"] == found["rows_kept"] * found["row_bytes"]
            assert found["num_exchanges"] == 4
            both_ways = 2 * (found["rows_leaving"] + found["rows_coming"])
            assert found["all_sent_bytes"] == both_ways * found["row_bytes"]
