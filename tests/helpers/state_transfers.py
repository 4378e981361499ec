"""Carries out transfer plans on arrays with simple code, as the reference for the planner."""

import zlib
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from megatron_ft.operators import OperatorId
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.holdings import STORAGE, Holdings, Medium, Needs
from megatron_ft.planning.state.tensors import StateTensor
from megatron_ft.planning.state.transfers import Kept, Transfer, TransferPlan

Element = tuple[StateTensor, int, int]
"""Tensor, element and iteration, which identify a bit pattern."""


def tensor(
    name: str = "w", num_elements: int = 12, *, kind: str = "master", part: int = 0, item: int = 4
) -> StateTensor:
    """Return a tensor of layer 1."""
    operator = OperatorId(layer=1, kind="non_expert")
    return StateTensor(
        operator=operator, parameter=name, tensor_part=part, kind=kind, num_elements=num_elements, item_bytes=item
    )


def held_elements(holdings: Holdings) -> dict[Element, dict[int, Medium]]:
    """Return, for each element, the ranks that have it and the fastest medium of each."""
    found: dict[Element, dict[int, Medium]] = defaultdict(dict)
    for row in holdings:
        for element in range(row.start, row.stop):
            ranks = found[row.tensor, element, row.iteration]
            ranks[row.rank] = min(row.medium, ranks.get(row.rank, Medium.STORAGE))
    return found


def needed_elements(needs: Needs) -> set[tuple[int, Element]]:
    """Return (rank, element) of everything that is needed."""
    return {(row.rank, (row.tensor, e, row.iteration)) for row in needs for e in range(row.start, row.stop)}


Memory = dict[tuple[int, StateTensor, int], npt.NDArray[np.int64]]
"""Elements that a rank has, by rank, tensor and iteration. Other elements contain garbage."""


def bits(tensor: StateTensor, iteration: int) -> npt.NDArray[np.int64]:
    """Return the elements of a tensor after an iteration. Different tensors, iterations and positions have different
    values."""
    salt = zlib.crc32(f"{tensor} {iteration}".encode())
    return salt * 1_000_000 + np.arange(tensor.num_elements, dtype=np.int64)


def carry_out(plan: TransferPlan, holdings: Holdings) -> tuple[Memory, Memory]:
    """Return the state of every rank after the transfers, copied from the sources, and how often each element was
    received."""
    memory: dict[tuple[int, Medium, StateTensor, int], npt.NDArray[np.int64]] = {}
    for row in holdings:
        garbage = np.full(row.tensor.num_elements, -1 - row.rank, dtype=np.int64)
        held = memory.setdefault((row.rank, row.medium, row.tensor, row.iteration), garbage)
        held[row.start : row.stop] = bits(row.tensor, row.iteration)[row.start : row.stop]
    result: Memory = {}
    times: Memory = {}

    def put(source: int, target: int, moved: Transfer | Kept) -> None:
        key = (target, moved.tensor, moved.iteration)
        place = slice(moved.start, moved.stop)
        result.setdefault(key, np.zeros(moved.tensor.num_elements, dtype=np.int64))[place] = memory[
            source, moved.medium, moved.tensor, moved.iteration
        ][place]
        times.setdefault(key, np.zeros(moved.tensor.num_elements, dtype=np.int64))[place] += 1

    for rank in sorted(set(plan.kept.rank.tolist())):
        for kept in plan.kept_by(rank):
            put(rank, rank, kept)
    for transfer in plan.transfers():
        put(transfer.source, transfer.target, transfer)
    return result, times


def check_plan(plan: TransferPlan, holdings: Holdings, needs: Needs) -> None:
    """Check that every need is met once, own state is kept, the fastest medium is used, and rounds keep the limit."""
    plan.validate()
    held = held_elements(holdings)
    wanted = needed_elements(needs)
    result, times = carry_out(plan, holdings)
    came = {(rank, (of, int(e), i)) for (rank, of, i), count in times.items() for e in np.flatnonzero(count)}
    assert came == wanted
    for key, count in times.items():
        assert count.max() == 1, f"{key} has elements that came twice"
        assert (result[key] == bits(key[1], key[2]))[count == 1].all(), (
            f"{key} has elements that are not what they were"
        )
    in_flight: dict[tuple[int, int], int] = defaultdict(int)
    for transfer in plan.transfers():
        for place in range(transfer.start, transfer.stop):
            holders = held[transfer.tensor, place, transfer.iteration]
            assert transfer.target not in holders, f"{transfer}: the target has element {place}"
            assert transfer.medium == min(holders.values()), f"{transfer}: a faster medium has element {place}"
        for rank in {transfer.source, transfer.target} - {STORAGE}:
            in_flight[transfer.round, rank] += transfer.num_bytes
    assert max(in_flight.values(), default=0) <= plan.limit_bytes
    moved = sum(transfer.num_bytes for transfer in plan.transfers())
    assert moved == plan.num_bytes == sum(plan.received_bytes().values()) == sum(plan.sent_bytes().values())
    assert moved + plan.kept_bytes == sum(element[0].item_bytes for _, element in wanted)


def planned(holdings: Holdings, needs: Needs, *, limit_bytes: int = 1 << 20, min_piece_bytes: int = 1) -> TransferPlan:
    """Return a plan, and check that it exists and is correct."""
    plan = TransferPlan.of(holdings, needs, limit_bytes=limit_bytes, min_piece_bytes=min_piece_bytes)
    assert not isinstance(plan, Declined), plan.summary()
    check_plan(plan, holdings, needs)
    return plan
