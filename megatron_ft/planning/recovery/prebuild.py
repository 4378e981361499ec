"""Decides what each spare builds before a node is lost.

A spare that replaces a lost node needs a *part*: the model, gradient buffers and optimizer of the node's ranks. It can
build parts in advance. Nodes whose ranks have the same layers, tensor parts and experts need the same part. Every node
is equally likely to be lost, so parts of more nodes are needed more often. Spares begin with different parts, so that
together they cover as many parts as possible.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.config.job import JobConfig
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class PrebuildPlan:
    """Parts of the model that each spare builds in advance. A place is the position of a node in the layout."""

    parts: tuple[tuple[int, ...], ...]
    """Layout positions of the nodes that need each part. Parts of more nodes come first; ties go by position."""
    stages: tuple[tuple[int, ...], ...]
    """Pipeline stages whose layers each part contains."""
    num_built: int
    """Number of parts that each spare builds; 0 if spares build nothing in advance."""
    num_nodes: int
    """Number of nodes in the layout."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check that each place (position of a node in the layout) is in exactly one part."""
        places = sorted(place for part in self.parts for place in part)
        assert places == list(range(self.num_nodes)), f"parts {self.parts} must contain each of {self.num_nodes} places"
        assert 0 <= self.num_built <= len(self.parts), f"num_built={self.num_built} must be from 0 to {len(self.parts)}"

    def summary(self) -> str:
        """Describe the plan in one line."""
        return f"each spare builds {self.num_built} of {len(self.parts)} parts of the model in advance"

    @classmethod
    def of(cls, config: JobConfig) -> "PrebuildPlan":
        """Plan the parts that spares build. If ``nodes.num_prebuilt_parts`` is null, each spare builds one part."""
        topology, size = Topology.of(config.parallel, config.world_size), config.launch.ranks_per_node
        found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for place in range(config.launch.num_nodes):
            ranks = [topology.coordinates(rank) for rank in range(place * size, (place + 1) * size)]
            found.setdefault(tuple((at.pp, at.tp, at.cp, at.ep) for at in ranks), []).append(place)
        order = sorted(found, key=lambda part: (-len(found[part]), found[part]))
        wanted = config.nodes.num_prebuilt_parts
        return cls(
            parts=tuple(tuple(found[part]) for part in order),
            stages=tuple(tuple(sorted({stage for stage, *_ in part})) for part in order),
            num_built=min(1 if wanted is None else wanted, len(order)) if can_prebuild(config) else 0,
            num_nodes=config.launch.num_nodes,
        )

    def of_node(self, node: int) -> tuple[int, ...]:
        """Return the indices of the parts that ``node`` builds while it is a spare, in the order of building."""
        num_parts = len(self.parts)
        # A former member begins with the part in which it trained.
        first = self.part_of(node) if node < self.num_nodes else (node - self.num_nodes) % num_parts
        return tuple((first + offset) % num_parts for offset in range(self.num_built))

    def part_of(self, place: int) -> int:
        """Return the index of the part that contains ``place`` (position of a node in the layout)."""
        return next(number for number, part in enumerate(self.parts) if place in part)

    def assign(self, places: Iterable[int], spares: Sequence[int]) -> Mapping[int, int]:
        """Choose a spare for each of ``places`` (positions of nodes in the layout). If possible, a place gets a spare
        that builds the part of this place in advance. Other places get the remaining spares in the given order. There
        must be enough spares."""
        left, found = list(spares), {}
        waiting = list(places)
        for place in tuple(waiting):
            part = self.part_of(place)
            able = [node for node in left if part in self.of_node(node)]
            if able:
                # The earlier a node builds the part, the more likely the part is complete.
                found[place] = min(able, key=lambda node: self.of_node(node).index(part))
                left.remove(found[place])
                waiting.remove(place)
        return {**found, **dict(zip(waiting, left, strict=False))}


def can_prebuild(config: JobConfig) -> bool:
    """Return whether spares can build parts of the model in advance. The job must have spares, keep its layout (so that
    the ranks of a lost node are known), have experts without replicas (so that the experts of a rank are known), and
    not run on ``cuda``."""
    kept = config.recovery.keep_layout and config.placement.algorithm is None
    return kept and config.nodes.num_spare_nodes > 0 and config.training.device != "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrebuildReport:
    """Parts of the model that spares build in advance, and the memory that this needs."""

    plan: PrebuildPlan
    spares: tuple[int, ...]
    """Numbers of the spare nodes at the start of the job."""
    part_bytes: tuple[int, ...]
    """Bytes of weights, gradients, master weights and moments of the ranks of a node, for each part."""
    reason: str
    """Reason for the number of parts that each spare builds."""

    @classmethod
    def of(cls, config: JobConfig, state_bytes: Sequence[int], reason: str) -> "PrebuildReport | None":
        """Return the report for a job with ``config``; None if spares build nothing in advance.

        Args:
            state_bytes: bytes of the state of a rank, for each pipeline stage.
            reason: reason for ``nodes.num_prebuilt_parts``.
        """
        plan = PrebuildPlan.of(config) if can_prebuild(config) else None
        if plan is None or not plan.num_built:
            return None
        first = config.launch.num_nodes
        return cls(
            plan=plan,
            spares=tuple(range(first, first + config.nodes.num_spare_nodes)),
            part_bytes=bytes_of_parts(plan, config, state_bytes),
            reason=reason,
        )

    @property
    def extra_bytes(self) -> int:
        """Most bytes of host memory that a spare needs for parts that it has built but does not use after a loss."""
        return extra_bytes(self.part_bytes, self.plan.num_built)


def bytes_of_parts(plan: PrebuildPlan, config: JobConfig, state_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of the state of a node's ranks, for each part of ``plan``. ``state_bytes`` are the bytes of a
    rank's state, for each pipeline stage."""
    topology, size = Topology.of(config.parallel, config.world_size), config.launch.ranks_per_node
    firsts = [part[0] * size for part in plan.parts]
    return tuple(
        sum(state_bytes[topology.coordinates(rank).pp] for rank in range(first, first + size)) for first in firsts
    )


def extra_bytes(part_bytes: Sequence[int], num_built: int) -> int:
    """Return the most bytes that unused parts can have if a spare has built ``num_built`` parts and uses one."""
    return sum(sorted(part_bytes, reverse=True)[: max(0, num_built - 1)])


def most_parts(part_bytes: Sequence[int], free_bytes: int) -> int:
    """Return how many parts a spare can build (at least 1) if unused parts must fit in ``free_bytes``, whichever
    part it uses."""
    return max(
        number for number in range(1, len(part_bytes) + 1) if extra_bytes(part_bytes, number) <= max(0, free_bytes)
    )
