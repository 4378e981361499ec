"""Makes token routings and expert placements for tests of dispatch, and emulates an all-to-all within one process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ft.runtime.dispatch.backend import DispatchBackend
from megatron_ft.runtime.dispatch.rows import DispatchHandle


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routing of one MoE layer. ``maps``: the experts of each token, bool [tokens, experts] for each rank.
    ``replicas``: the number of copies of each expert on each rank, int64 [experts, ranks]."""

    maps: list[torch.Tensor]
    replicas: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """Return the number of tokens that each rank routes to each expert: int64 [experts, ranks]."""
        return torch.stack([routing_map.sum(0) for routing_map in self.maps], dim=1)

    def local_experts(self, rank: int) -> list[int]:
        """Return the experts that have a copy on ``rank``, in ascending order."""
        return self.replicas[:, rank].nonzero().flatten().tolist()

    def to(self, device: torch.device | str) -> "Routing":
        """Return a copy of this routing on ``device``."""
        return Routing(maps=[each.to(device) for each in self.maps], replicas=self.replicas.to(device))


def make_routing(
    *, num_ranks: int, topk: int, num_experts: int, tokens: Sequence[int], skew: float, seed: int, drop: float = 0.0
) -> Routing:
    """Make a routing with Zipf-like loads of exponent ``skew``. Every third expert gets no token if ``topk`` allows it.

    ``tokens`` gives the number of tokens per rank and is repeated if it has too few entries. ``drop`` is the share of
    (token, expert) pairs to remove, as a capacity limit does. Every expert has at least one copy. Some experts have
    several copies, even on the same rank. If there are several ranks, the last rank has no expert.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = (1.0 + torch.arange(num_experts, dtype=torch.float64)) ** -skew
    if num_experts - len(range(2, num_experts, 3)) >= topk:
        weights[2::3] = 0.0
    maps = []
    for rank in range(num_ranks):
        num_tokens = tokens[rank % len(tokens)]
        routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
        if num_tokens:
            drawn = torch.multinomial(weights.expand(num_tokens, -1), topk, generator=generator)
            routing_map.scatter_(1, drawn, True)
            routing_map &= torch.rand(routing_map.shape, generator=generator) >= drop
        maps.append(routing_map)
    holders = max(1, num_ranks - 1)
    replicas = torch.randint(0, 3, (num_experts, num_ranks), generator=generator)
    replicas[:, holders:] = 0
    replicas[torch.arange(num_experts), torch.arange(num_experts) % holders] += 1
    return Routing(maps=maps, replicas=replicas)


def plan_all(backend: DispatchBackend, routing: Routing) -> list[DispatchHandle]:
    """Let ``backend`` plan how ranks send tokens to experts by ``routing``. Return each rank's dispatch handle."""
    counts = routing.counts
    return [
        backend.plan(routing_map, backend.schedule(counts, routing.replicas, rank), rank, routing.local_experts(rank))
        for rank, routing_map in enumerate(routing.maps)
    ]


def swap(rows: Sequence[torch.Tensor], splits: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Emulate an all-to-all in one process. Rank i sends ``rows[i]``; ``splits[i]`` has the number of rows for each
    receiver. Return, for each rank, the rows that it receives, ordered by sender."""
    parts = [list(each.split(list(cut))) for each, cut in zip(rows, splits, strict=True)]
    return [torch.cat([part[receiver] for part in parts]) for receiver in range(len(rows))]
