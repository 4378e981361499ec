"""``PlacementPlan``: which experts are in the slots of every rank and layer."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Layout, copies_per_rank

Slots = tuple[tuple[tuple[int, ...], ...], ...]
"""Expert ids ``[layer][rank][slot]``, with ranks in the order of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Assignment of experts to the slots of every rank and layer, the same on every rank.

    Several slots of a rank may hold the same expert. These slots share one set of weights, and the rank processes a
    larger share of the expert's tokens.
    """

    num_experts: int
    num_slots_per_rank: int
    ranks: tuple[int, ...]
    """Global ranks, in the order in which ``slots`` contains them."""
    domains: tuple[str, ...]
    """Failure domain of each rank."""
    layer_numbers: tuple[int, ...]
    """Megatron's layer numbers, counted from 1."""
    slots: Slots
    """Expert ids ``[layer][rank][slot]``, ascending. Empty slots are left out, so a rank's list can be shorter."""
    algorithm: str

    @classmethod
    def of(
        cls,
        layout: Layout,
        slots: Slots,
        num_experts: int,
        algorithm: str,
        layer_numbers: Sequence[int] | None = None,
    ) -> "PlacementPlan":
        """Create a valid plan for the ranks of ``layout``. Without ``layer_numbers``, layers are numbered from 1."""
        plan = cls(
            num_experts=num_experts,
            num_slots_per_rank=layout.num_slots_per_rank,
            ranks=layout.ranks,
            domains=tuple(layout.domains[domain] for domain in layout.domain_of),
            layer_numbers=tuple(layer_numbers or range(1, len(slots) + 1)),
            slots=slots,
            algorithm=algorithm,
        )
        plan.validate()
        return plan

    def validate(self) -> None:
        """Check that every expert of every layer has a slot, and that no rank has more experts than slots in a layer.

        Raises:
            ConfigError: a slot list or a field is wrong; the message names layer, rank or expert.
        """
        if len(self.domains) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError.of("ranks", list(self.ranks), "must be distinct, and each needs a failure domain")
        if len(self.layer_numbers) != len(self.slots):
            raise ConfigError.of("layer_numbers", list(self.layer_numbers), f"must have {len(self.slots)} entries")
        everyone = set(range(self.num_experts))
        for layer, by_rank in zip(self.layer_numbers, self.slots, strict=True):
            if len(by_rank) != len(self.ranks):
                raise ConfigError.of(
                    f"slot lists of layer {layer}", len(by_rank), f"must be {len(self.ranks)} lists, one for each rank"
                )
            for rank, experts in zip(self.ranks, by_rank, strict=True):
                if len(experts) > self.num_slots_per_rank:
                    where = f"slots of layer {layer}, rank {rank}"
                    raise ConfigError.of(where, list(experts), f"must have at most {self.num_slots_per_rank} experts")
            held = {expert for experts in by_rank for expert in experts}
            if foreign := sorted(held - everyone):
                constraint = f"must be from 0 to {self.num_experts - 1}"
                raise ConfigError.of(f"layer {layer}: expert", foreign[0], constraint)
            if missing := sorted(everyone - held):
                raise ConfigError.of(f"layer {layer}: expert", missing[0], "must have at least one slot")

    def summary(self) -> str:
        layers = range(len(self.slots))
        num_replicas = max((sum(self.replica_counts(layer)) for layer in layers), default=0)
        return (
            f"{self.algorithm}: {len(layers)} layers x {self.num_experts} experts, at most {num_replicas} replicas "
            f"in a layer, on {len(self.ranks)} ranks in {len(set(self.domains))} failure domains; "
            f"failure domains of each expert: at least {self.spread}"
        )

    def of_rank(self, position: int) -> frozenset[tuple[int, int]]:
        """Return (layer number, expert) of all experts on the rank ``self.ranks[position]``."""
        return frozenset(
            (layer, expert)
            for layer, by_rank in zip(self.layer_numbers, self.slots, strict=True)
            for expert in by_rank[position]
        )

    def replica_counts(self, layer: int) -> tuple[int, ...]:
        """Return the number of replicas of each expert in the layer ``self.layer_numbers[layer]``."""
        held = Counter(expert for experts in self.slots[layer] for expert in experts)
        return tuple(held[expert] for expert in range(self.num_experts))

    def replicas_per_rank(self, layer: int) -> npt.NDArray[np.int64]:
        """Return ``R[E, N]``, the number of replicas of each expert on each rank, for the dispatcher."""
        return copies_per_rank(self.slots[layer], self.num_experts)

    def expert_domains(self, layer: int) -> tuple[frozenset[str], ...]:
        """Return the failure domains that hold each expert of one layer."""
        held: list[set[str]] = [set() for _ in range(self.num_experts)]
        for domain, experts in zip(self.domains, self.slots[layer], strict=True):
            for expert in experts:
                held[expert].add(domain)
        return tuple(frozenset(names) for names in held)

    @property
    def spread(self) -> int:
        """Smallest number of failure domains that hold one expert."""
        return min((len(held) for held in self.all_expert_domains()), default=0)

    def all_expert_domains(self) -> Iterator[frozenset[str]]:
        """Yield the failure domains that hold each expert, layer by layer."""
        for layer in range(len(self.slots)):
            yield from self.expert_domains(layer)

    def replacing(self, slots: Slots, algorithm: str | None = None) -> "PlacementPlan":
        """Return a validated copy of this plan with other ``slots``, for the same ranks and layers."""
        plan = dataclasses.replace(self, slots=slots, algorithm=algorithm or self.algorithm)
        plan.validate()
        return plan

    def to_json(self) -> dict[str, Any]:
        return {
            "num_experts": self.num_experts,
            "num_slots_per_rank": self.num_slots_per_rank,
            "ranks": list(self.ranks),
            "domains": list(self.domains),
            "layer_numbers": list(self.layer_numbers),
            "slots": [[list(experts) for experts in by_rank] for by_rank in self.slots],
            "algorithm": self.algorithm,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PlacementPlan":
        """Read a plan from JSON values and check it.

        Raises:
            ConfigError: the plan is inconsistent.
        """
        slots = tuple(tuple(tuple(experts) for experts in by_rank) for by_rank in content["slots"])
        names = ("ranks", "domains", "layer_numbers")
        plan = cls(**{**content, **{name: tuple(content[name]) for name in names}, "slots": slots})
        plan.validate()
        return plan
