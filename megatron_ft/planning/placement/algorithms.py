"""Registry of placement algorithms by name."""

from collections.abc import Mapping

from megatron_ft.planning.placement.algorithm import PlacementAlgorithm
from megatron_ft.planning.placement.compact import Compact
from megatron_ft.planning.placement.maximum_rank_overlap import MaximumRankOverlap
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.spread import Spread

ALGORITHMS: Mapping[str, type[PlacementAlgorithm]] = {
    "overlap_search": OverlapSearch,
    "maximum_rank_overlap": MaximumRankOverlap,
    "spread": Spread,
    "compact": Compact,
}
