"""The placement of one pipeline stage, in the form in which the model uses it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.runtime.dispatch.backend import DispatchBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Placement of one pipeline stage, over the ranks of its expert group, and the dispatch backend."""

    plan: PlacementPlan
    backend: DispatchBackend

    def slots_of(self, layer_number: int) -> Sequence[Sequence[int]]:
        """Return, for each rank, the expert in each of its slots. ``layer_number`` counts from 1, as in Megatron."""
        return self.plan.slots[self.plan.layer_numbers.index(layer_number)]
