"""Builds several implementations of one MoE layer, Megatron's and one per dispatcher backend, with the same tokens,
weights and routing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.model.transformer_config import build_transformer_config
from megatron_ft.mcore.moe.replica_layer import ReplicaGradients, ReplicaMixtureLayer, Replicas
from megatron_ft.mcore.moe.router import PaddingAwareRouter
from megatron_ft.mcore.versions import submodules_of
from megatron_ft.planning import dispatch as rule
from megatron_ft.planning.placement.overlap_search import OverlapSearch
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.rebalance import imbalance
from megatron_ft.planning.placement.stage import StageRequest
from megatron_ft.runtime.dispatch.backend import open_backend
from megatron_ft.topology import Cluster

PREFERRED = 10.0
"""Logit of an expert that a token must choose. It is far larger than the logits of the router's weights."""


class Mixtures:
    """Implementations ``names`` of one layer on this rank. A name is ``megatron``, or a backend of the replica layer.

    Args:
        loads: Relative load of each expert. Every rank routes its tokens exactly in these proportions.
        num_slots: Number of slots of each rank.
        min_replicas: Minimum number of copies of every expert.
    """

    def __init__(
        self,
        config: JobConfig,
        pg_collection: ProcessGroupCollection,
        *,
        loads: Sequence[float],
        names: Sequence[str],
        num_slots: int,
        min_replicas: int,
    ) -> None:
        self.group = pg_collection.ep
        self.loads = loads
        self.plan = plan_for(loads, self.group.size(), num_slots=num_slots, min_replicas=min_replicas)
        self.config = build_transformer_config(config, "local")
        num_tokens, hidden = config.model.seq_length, config.model.hidden_size
        self.choices = choose(loads, num_tokens, config.model.moe_router_topk, seed=self.group.rank())
        generator = torch.Generator().manual_seed(100 + self.group.rank())
        self.tokens = torch.randn((num_tokens, 1, hidden), generator=generator)
        self.grad = torch.randn((num_tokens, 1, hidden), generator=generator)
        self.backends = {name: open_backend(name) for name in names if name != "megatron"}
        self.layers = {name: self._layer(name, pg_collection) for name in names}
        self.copies = self._copies(names[1])

    def run(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward and backward pass of an implementation. Return (output, gradient of the tokens), both
        [tokens, 1, hidden]."""
        tokens = self.tokens.detach().requires_grad_()
        for parameter in self.layers[name].parameters():
            parameter.grad = None
        output, _ = self.layers[name](tokens)
        output.backward(self.grad)
        assert tokens.grad is not None, "the layer's input has a gradient"
        return output.detach(), tokens.grad

    def sum_copies(self) -> None:
        """Sum the gradients of copies, as training does once per iteration."""
        self.copies.sum()

    def compare(self) -> dict[str, Any]:
        """Compare the results of each implementation with the first one, and return the bytes that each sends."""
        results, sent = {}, {}
        for name in self.layers:
            with _counting(self.group) as counted:
                results[name] = self.run(name)
            sent[name] = counted[0]
        expected = next(iter(results.values()))
        deviation = {
            name: max(
                float((mine - theirs).norm() / theirs.norm()) for mine, theirs in zip(result, expected, strict=True)
            )
            for name, result in results.items()
        }
        return {
            "deviation": deviation,
            "sent_bytes": sent,
            "needed_bytes": self._needed_bytes(),
            "imbalance": imbalance(self.plan, [self.loads]),
            "gain_bound": self._gain_bound(),
        }

    def _counts(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each expert on each rank, [experts, ranks]. All ranks route equally."""
        mine = torch.bincount(self.choices.flatten(), minlength=len(self.loads))
        return torch.stack([mine] * self.group.size(), dim=1).numpy()

    def _gain_bound(self) -> float:
        """Return the largest possible speed-up: the busiest rank's rows with contiguous experts, divided by the fewest
        rows that the busiest rank can have with the placement."""
        counts = self._counts()
        contiguous = counts.sum(axis=1).reshape(self.group.size(), -1).sum(axis=1)
        return float(contiguous.max() / rule.quotas(counts, self.plan.replicas_per_rank(0)).sum(axis=0).max())

    def _needed_bytes(self) -> int:
        """Return the bytes of the rows that must leave this rank: values and gradients, in both directions."""
        planned = rule.schedule(self._counts(), self.plan.replicas_per_rank(0)).sum(axis=0)
        rank = self.group.rank()
        leaving = planned[rank].sum() - planned[rank, rank]
        arriving = planned[:, rank].sum() - planned[rank, rank]
        return int(2 * leaving + 2 * arriving) * self.tokens.shape[-1] * self.tokens.element_size()

    def _layer(self, name: str, pg_collection: ProcessGroupCollection) -> MoELayer:
        router: type[TopKRouter] = _ForcedMegatronRouter if name == "megatron" else _ForcedRouter
        submodules = replace(_submodules(self.config), router=partial(router, choices=self.choices))
        if name == "megatron":
            layer = MoELayer(self.config, submodules, layer_number=1, pg_collection=pg_collection)
            experts = layer.local_expert_indices
        else:
            layer = ReplicaMixtureLayer(
                self.config,
                submodules,
                layer_number=1,
                slots=self.plan.slots[0],
                backend=self.backends[name],
                pg_collection=pg_collection,
            )
            experts = layer.experts.expert_ids
        layer.set_layer_number(1)
        _fill(layer.router, 0)
        for expert_id, expert in zip(experts, layer.experts.local_experts, strict=True):
            _fill(expert, 1 + expert_id)
        return layer

    def _copies(self, name: str) -> ReplicaGradients:
        layer = self.layers[name]
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        chunk, block, decoder = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
        block.mlp, block.layer_number = layer, 1
        decoder.layers = torch.nn.ModuleList([block])
        chunk.decoder = decoder
        return ReplicaGradients([chunk], Replicas(plan=self.plan, backend=self.backends[name]), self.group)


def plan_for(loads: Sequence[float], num_ranks: int, *, num_slots: int, min_replicas: int) -> PlacementPlan:
    """Return the planner's placement for ranks that are each on their own node, with ``num_slots`` slots each."""
    request = StageRequest(
        cluster=Cluster.of(num_ranks, 1),
        ranks=tuple(range(num_ranks)),
        layer_numbers=(1,),
        num_experts=len(loads),
        num_slots_per_rank=num_slots,
        min_replicas=min_replicas,
    )
    plan, _ = request.place(OverlapSearch(), [loads])
    return plan


def choose(loads: Sequence[float], num_tokens: int, topk: int, *, seed: int) -> torch.Tensor:
    """Return distinct experts for each token, int64 [num_tokens, topk], in the proportions of ``loads``."""
    total = num_tokens * topk
    ends = (torch.tensor(loads, dtype=torch.float64).cumsum(0) / sum(loads) * total).round().long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    assert int(counts.max()) <= num_tokens, "a token cannot choose an expert twice"
    # The list is sorted by expert and read in columns. So a token's choices are num_tokens apart in the list, and never
    # the same expert.
    experts = torch.arange(len(loads)).repeat_interleave(counts).view(topk, num_tokens).t()
    return experts[torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))]


class _Forced(TopKRouter):
    """Router that computes its own choice, which costs the usual time, but returns given experts."""

    def __init__(self, *args: Any, choices: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        forced = torch.zeros((len(choices), self.config.num_moe_experts))
        self.forced = forced.scatter_(1, choices, PREFERRED).unsqueeze(1)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return super().gating(input) + self.forced


class _ForcedMegatronRouter(_Forced):
    """Megatron's router with given choices."""


class _ForcedRouter(_Forced, PaddingAwareRouter):
    """The project's router with given choices."""


def _submodules(config: TransformerConfig) -> MoESubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return submodules_of(block.layer_specs[0].submodules.mlp)


def _fill(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)


@contextmanager
def _counting(group: dist.ProcessGroup) -> Iterator[list[int]]:
    """Count the bytes that this rank sends to other ranks in all-to-alls within the block."""
    counted, exchange = [0], dist.all_to_all_single

    def count(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        assert input_split_sizes is not None, "dispatchers must give the numbers of rows for each rank"
        rows = [int(size) for size in input_split_sizes]
        counted[0] += (sum(rows) - rows[group.rank()]) * input.shape[1:].numel() * input.element_size()
        return exchange(output, input, output_split_sizes, input_split_sizes, **kwargs)

    dist.all_to_all_single = count
    try:
        yield counted
    finally:
        dist.all_to_all_single = exchange
