"""``ParallelLayout``: the parallel coordinates of every process that trains, and the hot spares."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from megatron_ft.errors import ConfigError
from megatron_ft.planning.state.tensors import Column

Group = tuple[int, ...]
"""Ranks of one TP·CP group, ordered so that the TP coordinate changes fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """TP·CP groups of ranks for every pipeline stage and lane (model replica), and the hot spares.

    Ranks are numbers of living processes. The position of a rank in ``stages`` determines its parallel coordinates.
    """

    tensor_size: int
    """TP degree."""
    context_size: int = 1
    """CP degree."""
    stages: tuple[tuple[Group, ...], ...]
    """TP·CP groups as ``[stage][lane]``. Every stage must have the same number of lanes."""
    spares: tuple[int, ...] = ()
    """Hot spares: ranks that do not train, ascending."""

    @classmethod
    def regular(
        cls, num_ranks: int, *, tensor_size: int, num_stages: int, context_size: int = 1, num_spares: int = 0
    ) -> "ParallelLayout":
        """Return the layout of ranks in Megatron's order, in which TP changes fastest, followed by CP, lane and stage.
        The last ``num_spares`` ranks are hot spares.

        Raises:
            ConfigError: the number of ranks without spares is not a multiple of TP * CP * PP.
        """
        size = tensor_size * context_size
        num_lanes, rest = divmod(num_ranks - num_spares, size * num_stages)
        if rest or num_lanes < 1:
            raise ConfigError.of(
                "number of ranks that train",
                num_ranks - num_spares,
                f"must be a positive multiple of TP * CP * PP = {size * num_stages}",
            )
        # Megatron's default order ``tp-cp-ep-dp-pp``: stages are contiguous, and TP ranks adjacent.
        places = np.arange(num_ranks - num_spares).reshape(num_stages, num_lanes, size).tolist()
        return cls(
            tensor_size=tensor_size,
            context_size=context_size,
            stages=tuple(tuple(tuple(group) for group in stage) for stage in places),
            spares=tuple(range(num_ranks - num_spares, num_ranks)),
        )

    @property
    def group_size(self) -> int:
        """Number of ranks in a TP·CP group."""
        return self.tensor_size * self.context_size

    @property
    def num_stages(self) -> int:
        """PP degree."""
        return len(self.stages)

    @property
    def num_lanes(self) -> int:
        """Number of model replicas, which is the data-parallel size."""
        return min((len(stage) for stage in self.stages), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that train; the position of a rank in this tuple is the rank's new number in Megatron."""
        return tuple(chain.from_iterable(chain.from_iterable(self.stages)))

    def stage_array(self, stage: int) -> Column:
        """Return the ranks of a stage as an array ``[num_lanes, group_size]``."""
        return np.array(self.stages[stage], dtype=np.int64).reshape(-1, self.group_size)

    def places(self) -> dict[int, tuple[int, int, int]]:
        """Return, for every rank that trains, its stage, its lane and its position in the TP·CP group."""
        return {
            rank: (stage, lane, place)
            for stage, groups in enumerate(self.stages)
            for lane, group in enumerate(groups)
            for place, rank in enumerate(group)
        }

    def validate(self) -> None:
        """Check that groups have TP * CP ranks, that stages have equally many lanes, and that no rank occurs twice.

        Raises:
            ConfigError: one of these conditions is violated.
        """
        lanes = {len(stage) for stage in self.stages}
        if len(lanes) != 1 or 0 in lanes:
            raise ConfigError.of(
                "lanes of each stage", [len(stage) for stage in self.stages], "must be equal in all stages, at least 1"
            )
        sizes = {len(group) for stage in self.stages for group in stage}
        if sizes != {self.group_size}:
            raise ConfigError.of("sizes of groups", sorted(sizes), f"must all be TP * CP = {self.group_size}")
        counts = Counter((*self.ranks, *self.spares))
        if twice := [rank for rank, count in counts.items() if count > 1]:
            raise ConfigError.of("rank", min(twice), "must occur only once in the stages and spares")

    def summary(self) -> str:
        """Describe the layout in one line for a log."""
        size = f"TP{self.tensor_size} CP{self.context_size} PP{self.num_stages}, lanes: {self.num_lanes}"
        return f"{size}, ranks: {len(self.ranks)}" + (f", hot spares: {len(self.spares)}" if self.spares else "")

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        return {
            "tensor_size": self.tensor_size,
            "context_size": self.context_size,
            "stages": [[list(group) for group in stage] for stage in self.stages],
            "spares": list(self.spares),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "ParallelLayout":
        """Read the values of ``to_json`` and validate them."""
        found = cls(
            tensor_size=content["tensor_size"],
            context_size=content["context_size"],
            stages=tuple(tuple(tuple(group) for group in stage) for stage in content["stages"]),
            spares=tuple(content["spares"]),
        )
        found.validate()
        return found
