"""Transfer plans carried out element by element, by the simplest means: what tests compare the planner with."""

from collections import defaultdict

from megatron_ft.operators import OperatorId
from megatron_ft.planning.state.declined import Declined
from megatron_ft.planning.state.holdings import STORAGE, Holdings, Medium, Needs
from megatron_ft.planning.state.tensors import StateTensor
from megatron_ft.planning.state.transfers import TransferPlan, plan_transfers

Element = tuple[StateTensor, int, int]
"""Tensor, element, iteration: the identity of a bit pattern."""


def tensor(
    name: str = "w", num_elements: int = 12, *, kind: str = "master", part: int = 0, item: int = 4
) -> StateTensor:
    """A tensor of layer 1."""
    operator = OperatorId(layer=1, kind="non_expert")
    return StateTensor(
        operator=operator, parameter=name, tensor_part=part, kind=kind, num_elements=num_elements, item_bytes=item
    )


def held_elements(holdings: Holdings) -> dict[Element, dict[int, Medium]]:
    """By element the ranks that have it, each with its fastest medium."""
    found: dict[Element, dict[int, Medium]] = defaultdict(dict)
    for row in holdings:
        for element in range(row.start, row.stop):
            ranks = found[row.tensor, element, row.iteration]
            ranks[row.rank] = min(row.medium, ranks.get(row.rank, Medium.STORAGE))
    return found


def needed_elements(needs: Needs) -> set[tuple[int, Element]]:
    """(rank, element) of everything that is needed."""
    return {(row.rank, (row.tensor, e, row.iteration)) for row in needs for e in range(row.start, row.stop)}


def carry_out(plan: TransferPlan, holdings: Holdings) -> dict[tuple[int, Element], Element]:
    """What every rank has in each needed place afterwards, taken from what its source holds; once each."""
    held = held_elements(holdings)
    received: dict[tuple[int, Element], Element] = {}
    for rank in sorted(set(plan.kept.rank.tolist())):
        for kept in plan.kept_by(rank):
            for place in range(kept.start, kept.stop):
                element = (kept.tensor, place, kept.iteration)
                assert held[element].get(rank) == kept.medium, f"rank {rank} keeps {element}, which it lacks"
                assert (rank, element) not in received, f"rank {rank} keeps {element} twice"
                received[rank, element] = element
    for transfer in plan.transfers():
        for place in range(transfer.start, transfer.stop):
            element = (transfer.tensor, place, transfer.iteration)
            assert held[element].get(transfer.source) == transfer.medium, f"{transfer}: the source lacks {place}"
            assert (transfer.target, element) not in received, f"{transfer}: {place} comes twice"
            received[transfer.target, element] = element
    return received


def check_plan(plan: TransferPlan, holdings: Holdings, needs: Needs) -> None:
    """Every need once, own state kept, the fastest medium, bytes in flight within the limit."""
    plan.validate()
    held = held_elements(holdings)
    wanted = needed_elements(needs)
    assert set(carry_out(plan, holdings)) == wanted
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
    """A plan that must exist, checked."""
    plan = plan_transfers(holdings, needs, limit_bytes=limit_bytes, min_piece_bytes=min_piece_bytes)
    assert not isinstance(plan, Declined), plan.summary()
    check_plan(plan, holdings, needs)
    return plan
