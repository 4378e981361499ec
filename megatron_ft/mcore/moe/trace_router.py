"""Forced routing: recorded loads choose the experts, the learned gate gives the probabilities.

Notation: T tokens of a microbatch on this rank, K experts of each token, E experts.
"""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import RouterBuilder
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.config.inputs import read_trace
from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.moe.router import PaddingAwareRouter
from megatron_ft.planning.batch import microbatch_position
from megatron_ft.planning.trace import RoutingTrace, expert_token_counts, forced_experts


class TraceRouter(PaddingAwareRouter):
    """Routes every microbatch in the proportions of a recording (Lazarus, arXiv 2407.04656, section 6.1).

    The assignment of tokens depends only on (seed, iteration, layer, microbatch of the global batch), neither on the
    layout of ranks nor on the placement of experts. Tensor-parallel ranks route their parts of one assignment.
    Auxiliary losses use the gate's own choice.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        trace: RoutingTrace,
        seed: int,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.trace, self.seed = trace, seed
        self.router_replay = _ForcedChoice()
        self._dp_group = pg_collection.dp
        self.start_iteration(0)

    def start_iteration(self, iteration: int) -> None:
        """Start counting the microbatches of ``iteration``."""
        super().start_iteration(iteration)
        self._iteration = iteration
        self._num_routed = {False: 0, True: 0}

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route ``logits`` [sequence, batch, E]; returns probs [T, E] and routing_map [T, E]."""
        num_tokens = logits.shape[0] * logits.shape[1]
        self.router_replay.experts = self._forced(num_tokens, self._next_microbatch()).to(logits.device)
        return super().routing(logits, padding_mask)

    def _next_microbatch(self) -> int:
        """Return the position of the next microbatch in the global batch.

        Full recomputation routes each microbatch once without gradients and once with, both times in order.
        """
        with_gradients = torch.is_grad_enabled()
        number = self._num_routed[with_gradients]
        self._num_routed[with_gradients] += 1
        return microbatch_position(self._dp_group.size(), self._dp_group.rank(), number)

    def _forced(self, num_tokens: int, microbatch: int) -> torch.Tensor:
        """Choose the experts of this rank's tokens: int64 [T, K]. Sequence parallelism cuts a microbatch into equal
        parts."""
        part, num_parts = self.tp_cp_group.rank(), self.tp_cp_group.size()
        loads = self.trace.loads(self._iteration, self.layer_number)
        counts = expert_token_counts(loads, num_tokens * num_parts, self.topk)
        key = f"{self.seed}/iteration {self._iteration}/layer {self.layer_number}/microbatch {microbatch}"
        # Of the whole microbatch, then cut: ranks that hold its parts must route them by one assignment.
        experts = forced_experts(counts, num_tokens * num_parts, key)
        return torch.from_numpy(experts[part * num_tokens : (part + 1) * num_tokens].copy())


class _ForcedChoice:
    """Replaces Megatron's recorded choices: scores are taken at given experts instead of the best ones."""

    experts: torch.Tensor
    """int64 [T, K]."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [T, K] at the forced experts, and the experts."""
        return scores.gather(1, self.experts), self.experts


def router_builder(config: JobConfig) -> RouterBuilder:
    """Build the function that makes the routers of a job's MoE layers.

    Raises:
        ConfigError, DataError: a trace that cannot be read or does not fit the model.
    """
    if config.model.router != "trace":
        return PaddingAwareRouter
    trace = RoutingTrace.of(config.model, read_trace(config))
    return partial(TraceRouter, trace=trace, seed=config.training.seed)
