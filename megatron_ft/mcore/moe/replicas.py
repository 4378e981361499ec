"""The placement in force on this rank's pipeline stage, in the form that the model needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.runtime.dispatch.backend import DispatchBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """A stage's plan and the backend for its dispatch; the plan's ranks are those of the expert group."""

    plan: PlacementPlan
    backend: DispatchBackend

    def slots_of(self, layer_number: int) -> Sequence[Sequence[int]]:
        """Return the expert of each slot of each rank, for a layer by Megatron's number (from 1)."""
        return self.plan.slots[self.plan.layer_numbers.index(layer_number)]
