"""Survival against balance against slots: what a placement gets for each choice of ``survival_share``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ft.planning.placement.allocation import allocate
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.rebalance import critical_tokens, imbalance
from megatron_ft.planning.placement.survival import Survival, survival
from megatron_ft.topology import Cluster

SHARES_OF_SURVIVAL = (0.0, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffPoint:
    """Figures of one placement."""

    num_slots: int
    """Slots of each rank."""
    survival_share: float
    fullest: float
    """Fullest over mean rank with balanced shares, over all layers."""
    worst_layer: float
    """The same of the worst layer."""
    survival: tuple[Survival, ...]
    """Of all layers together."""


def tradeoff(
    search: OverlapSearch,
    loads: Sequence[Sequence[float]],
    cluster: Cluster,
    *,
    slots: Sequence[int],
    min_replicas: int,
    lost: Sequence[int],
) -> Iterator[TradeoffPoint]:
    """Yield the points of the curve, by slots and ``survival_share``; choices with the same placement are one point.

    Args:
        search: its ``survival_share`` is replaced.
        loads: tokens of each expert, ``[L][E]``.
        slots: slots of a rank.
        min_replicas: copies of every expert at least.
        lost: numbers of failure domains that are lost together.

    Raises:
        ConfigError: too few slots for the experts.
    """
    num_ranks = cluster.num_nodes * cluster.ranks_per_node
    for num_slots in slots:
        counts = [allocate(load, num_ranks * num_slots, min_replicas).replica_counts for load in loads]
        before = None
        for share in SHARES_OF_SURVIVAL:
            plan = replace(search, survival_share=share).place(
                counts, cluster, num_slots_per_rank=num_slots, loads=loads, min_replicas=min_replicas
            )
            if before is not None and plan.slots == before.slots:
                continue
            before = plan
            yield TradeoffPoint(
                num_slots=num_slots,
                survival_share=share,
                fullest=critical_tokens(plan, loads) * num_ranks / (sum(map(sum, loads)) or 1.0),
                worst_layer=imbalance(plan, loads),
                survival=survival(plan.all_expert_domains(), cluster.failure_domains, lost),
            )
