"""Measures survival and balance of placements for different numbers of slots and values of ``survival_share``."""

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
    """One placement: how likely all experts survive losses, and how evenly ranks share the tokens."""

    num_slots: int
    """Number of slots of each rank."""
    survival_share: float
    imbalance: float
    """Tokens of each layer's busiest rank, summed over layers, divided by a rank's mean tokens in all layers together.
    The replicas of an expert divide its tokens so that the busiest rank has as few as possible (balanced shares)."""
    worst_imbalance: float
    """Tokens of the busiest rank divided by the mean of all ranks, in the layer in which this ratio is largest."""
    survival: tuple[Survival, ...]
    """Probability that every expert of all layers survives, for each number of lost domains."""


def tradeoff(
    search: OverlapSearch,
    loads: Sequence[Sequence[float]],
    cluster: Cluster,
    *,
    slots: Sequence[int],
    min_replicas: int,
    lost: Sequence[int],
) -> Iterator[TradeoffPoint]:
    """Yield one placement for each number of slots and each value of ``survival_share``. A value that gives the same
    placement as the value before it is left out.

    Args:
        search: placement algorithm; its ``survival_share`` is replaced.
        loads: tokens of each expert, ``[L][E]``.
        slots: numbers of slots of a rank.
        min_replicas: smallest number of copies of an expert.
        lost: numbers of failure domains that are lost at the same time; survival is computed for each of them.

    Raises:
        ConfigError: there are fewer slots than experts.
    """
    num_ranks = len(cluster.nodes)
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
                imbalance=critical_tokens(plan, loads) * num_ranks / (sum(map(sum, loads)) or 1.0),
                worst_imbalance=imbalance(plan, loads),
                survival=survival(plan.all_expert_domains(), cluster.failure_domains, lost),
            )
