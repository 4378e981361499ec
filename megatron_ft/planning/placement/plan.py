"""``PlacementPlan``: experts in the slots of every rank and layer."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError
from megatron_ft.planning.placement.layout import Layout

Slots = tuple[tuple[tuple[int, ...], ...], ...]
"""Expert ids by layer, by rank in the plan's order, by slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Experts in the slots of every rank and layer.

    Several slots of a rank may hold the same expert: they share one set of weights, which processes more of its tokens.
    The plan is the same on every rank.
    """

    num_experts: int
    num_slots_per_rank: int
    ranks: tuple[int, ...]
    """Global ranks, in the order of ``slots``."""
    domains: tuple[str, ...]
    """Failure domain of each rank."""
    layer_numbers: tuple[int, ...]
    """Megatron's layer numbers, counted from 1."""
    slots: Slots
    """``[layer][rank][slot]``: expert ids, ascending; a rank may have fewer than its slots."""
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
        """Make a valid plan over a layout. Without ``layer_numbers`` layers count from 1."""
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
        """Check that every expert of every layer has a slot and no rank holds more than its slots.

        Raises:
            ConfigError: naming layer, rank or expert.
        """
        if len(self.domains) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError.of("ranks", list(self.ranks), "must be distinct, and each needs a failure domain")
        if len(self.layer_numbers) != len(self.slots):
            raise ConfigError.of("layer_numbers", list(self.layer_numbers), f"must have {len(self.slots)} entries")
        everyone = set(range(self.num_experts))
        for layer, by_rank in zip(self.layer_numbers, self.slots, strict=True):
            if len(by_rank) != len(self.ranks):
                raise ConfigError.of(
                    f"slot lists of layer {layer}", len(by_rank), f"must be {len(self.ranks)}, one for each rank"
                )
            for rank, experts in zip(self.ranks, by_rank, strict=True):
                if len(experts) > self.num_slots_per_rank:
                    where = f"slots of layer {layer}, rank {rank}"
                    raise ConfigError.of(where, list(experts), f"must be at most {self.num_slots_per_rank} experts")
            held = {expert for experts in by_rank for expert in experts}
            if foreign := sorted(held - everyone):
                raise ConfigError.of(f"expert of layer {layer}", foreign[0], f"must be below {self.num_experts}")
            if missing := sorted(everyone - held):
                raise ConfigError.of(f"expert of layer {layer}", missing[0], "must have at least one slot")

    def summary(self) -> str:
        layers = range(len(self.slots))
        num_replicas = max((sum(self.replica_counts(layer)) for layer in layers), default=0)
        fewest = min((len(held) for held in self.all_expert_domains()), default=0)
        return (
            f"{self.algorithm}: {len(layers)} layers x {self.num_experts} experts, at most {num_replicas} replicas "
            f"a layer on {len(self.ranks)} ranks in {len(set(self.domains))} failure domains, "
            f"each expert on at least {fewest}"
        )

    def of_rank(self, position: int) -> frozenset[tuple[int, int]]:
        """Return (layer number, expert) of all experts on the rank at ``position`` of the plan's order."""
        return frozenset(
            (layer, expert)
            for layer, by_rank in zip(self.layer_numbers, self.slots, strict=True)
            for expert in by_rank[position]
        )

    def replica_counts(self, layer: int) -> tuple[int, ...]:
        """Replicas of each expert in the layer at this position of the plan."""
        held = Counter(expert for experts in self.slots[layer] for expert in experts)
        return tuple(held[expert] for expert in range(self.num_experts))

    def replicas_per_rank(self, layer: int) -> npt.NDArray[np.int64]:
        """``R[E, N]``: replicas of each expert on each rank, for the dispatcher."""
        matrix = np.zeros((self.num_experts, len(self.ranks)), dtype=np.int64)
        for position, experts in enumerate(self.slots[layer]):
            # A rank may hold an expert in several slots: ``+=`` with repeated indices would count one.
            np.add.at(matrix[:, position], list(experts), 1)
        return matrix

    def expert_domains(self, layer: int) -> tuple[frozenset[str], ...]:
        """Failure domains that hold each expert."""
        held: list[set[str]] = [set() for _ in range(self.num_experts)]
        for domain, experts in zip(self.domains, self.slots[layer], strict=True):
            for expert in experts:
                held[expert].add(domain)
        return tuple(frozenset(names) for names in held)

    def all_expert_domains(self) -> Iterator[frozenset[str]]:
        """Failure domains that hold each expert, over all layers."""
        for layer in range(len(self.slots)):
            yield from self.expert_domains(layer)

    def replacing(self, slots: Slots, algorithm: str | None = None) -> "PlacementPlan":
        """Return a valid plan of the same ranks and layers with other slots."""
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
        """Read and check a plan.

        Raises:
            ConfigError: the plan is inconsistent.
        """
        slots = tuple(tuple(tuple(experts) for experts in by_rank) for by_rank in content["slots"])
        names = ("ranks", "domains", "layer_numbers")
        plan = cls(**{**content, **{name: tuple(content[name]) for name in names}, "slots": slots})
        plan.validate()
        return plan
