"""A router that ignores padding microbatches and counts the tokens of each expert; a router that follows a load trace.

Notation: T tokens of a microbatch on this rank, E experts.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import RouterBuilder
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_router_token_dropping,
    get_capacity,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import read_trace
from megatron_ft.mcore import versions
from megatron_ft.mcore.model.transformer_config import unwrap
from megatron_ft.planning.iteration import microbatch_position
from megatron_ft.planning.trace import RoutingTrace, expert_token_counts, forced_experts

_Z_LOSS = "z_loss"


class PaddingAwareRouter(TopKRouter):
    """Megatron's top-k router, changed to treat each microbatch that has a ``padding_mask`` as padding.

    A padding microbatch is routed and dispatched, because the all-to-all is collective. But it has no effect on
    auxiliary losses, z-loss, router bias and load counts. Masking the loss would not be enough, because Megatron
    attaches auxiliary losses through an autograd function that does not depend on the loss.

    ``load`` [E] int64 is the number of tokens that were routed to each expert since the iteration began. ``repaid`` [E]
    int64 is the number of these tokens beyond the expert's capacity; None without ``repay_capacity_share``.

    Args:
        repay_capacity_share: additional capacity of an expert that lost tokens in a recovery, as a share of its
            capacity (``snapshot.repay_capacity_share``). None if no expert gets additional capacity.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        repay_capacity_share: float | None = None,
        **others: Any,
    ) -> None:
        self._limits = config
        self._repay_capacity_share = repay_capacity_share
        self.repaid: torch.Tensor | None = None
        if repay_capacity_share is not None:
            # Megatron's router drops tokens in the middle of ``routing``. This class drops them afterwards, when it is
            # known how much capacity other experts leave unused.
            config = copy(config)
            config.moe_expert_capacity_factor = None
        super().__init__(config=config, pg_collection=pg_collection, **others)
        self.is_padding = False
        self.load = torch.zeros(self.config.num_moe_experts, dtype=torch.int64, device=torch.cuda.current_device())
        if repay_capacity_share is not None:
            self.repaid = torch.zeros_like(self.load)
        self._owing: torch.Tensor | None = None

    def start_iteration(self, iteration: int, owed: Sequence[int] = ()) -> None:
        """Reset ``load`` and ``repaid`` at the start of ``iteration``. 0 means an evaluation, which resets nothing.

        Args:
            owed: number of lost tokens minus the additional tokens processed since the loss, for each expert.
        """
        if iteration:
            self.load.zero_()
            if self.repaid is not None:
                self.repaid.zero_()
        experts = sorted((e for e, tokens in enumerate(owed) if tokens), key=lambda expert: -owed[expert])
        # Copying host values to a tensor waits for the device, so no tensor is made in the usual case.
        self._owing = torch.tensor(experts, dtype=torch.int64, device=self.load.device) if experts else None

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route the tokens with ``logits`` [sequence, batch, E]. Return probs [T, E] and routing_map [T, E]."""
        self.is_padding = padding_mask is not None
        probs, routing_map = super().routing(logits)
        extra = None
        if self._repay_capacity_share is not None:
            probs, routing_map, extra = self._drop_tokens(probs, routing_map)
        # Full recomputation routes each microbatch twice, but only the second time with gradients.
        if self.training and torch.is_grad_enabled() and not self.is_padding:
            self.load += routing_map.sum(dim=0)
            if extra is not None:
                self.repaid += extra
        return probs, routing_map

    def _drop_tokens(
        self, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Drop tokens of ``probs`` and ``routing_map`` [T, E] beyond the capacities of their experts, as Megatron does.
        Experts that lost tokens in a recovery keep additional tokens, as far as other experts leave capacity unused.
        Return probs, routing_map and the number of additional tokens of each expert [E], or None instead of this number
        if no expert may process additional tokens."""
        limits = self._limits
        kept_probs, kept = apply_router_token_dropping(
            probs,
            routing_map,
            router_topk=self.topk,
            capacity_factor=limits.moe_expert_capacity_factor,
            drop_policy=limits.moe_token_drop_policy,
        )
        extra = None
        if self._owing is not None and self.training:
            num_tokens, num_experts = probs.shape
            capacity = get_capacity(num_tokens * self.topk, num_experts, limits.moe_expert_capacity_factor)
            most = int(self._repay_capacity_share * capacity)
            added, extra = more_tokens(
                *(probs.detach(), routing_map, kept, self._owing, capacity, most),
                by_probs=limits.moe_token_drop_policy == "probs",
            )
            kept = kept | added
            kept_probs = probs * kept
        self._count_for_bias(kept)
        return kept_probs, kept, extra

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the z-loss (ST-MoE, arXiv 2202.08906, eq. 5) to ``logits`` [T, E], unless they are padding."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or self.is_padding or not (self.training and torch.is_grad_enabled()):
            return logits
        z_loss = z_loss_func(logits, coefficient / self._num_shares())
        versions.record_auxiliary_loss(_Z_LOSS, z_loss / coefficient, self.layer_number, self.config.num_layers)
        # The loss is a mean over this microbatch, so multiply it by the number of tokens of the microbatch. Later,
        # gradients are divided by the number of tokens of the iteration (``calculate_per_token_loss``).
        return MoEAuxLossAutoScaler.apply(logits, z_loss * (logits.shape[0] * self._num_shares()))

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        *,
        valid_token_count: int | torch.Tensor | None = None,
        **logging: Any,
    ) -> torch.Tensor:
        """Attach a load-balancing loss to ``activation`` [T, E], unless the microbatch is padding.

        With per-token losses, Megatron later divides gradients by the token count of the iteration. To compensate,
        Megatron's method multiplies this loss by a token count of this rank. That count is too small in three cases:
        ranks share a microbatch (TP, CP); data-parallel ranks share a loss (``global_aux_loss``); each sequence of a
        microbatch has its own loss (``seq_aux_loss``). This method multiplies by the token count of the whole
        microbatch and by the count of microbatches that share the loss. So the gradient does not depend on how the
        batch is divided.
        """
        if self.is_padding:
            return activation
        num_shares = self._num_shares()
        # ``num_microbatches`` is greater than 1 only for ``global_aux_loss``: its group contains data-parallel ranks.
        num_microbatches = reduce_group.size() // num_shares
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss if num_microbatches == 1 else aux_loss * num_microbatches,
            aux_loss_name,
            reduce_group,
            valid_token_count=versions.balancing_token_count(activation.shape[0], num_shares),
            **logging,
        )

    def _num_shares(self) -> int:
        return self.tp_cp_group.size()

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        # Runs for padding, too, because it is collective: other data-parallel ranks may have real microbatches.
        counted = torch.zeros_like(routing_map) if self.is_padding else routing_map
        return super()._apply_global_aux_loss(probs, scores_for_aux_loss, counted, with_padding_mask)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        # With ``repay_capacity_share``, ``_drop_tokens`` counts the tokens that it has kept.
        if self._repay_capacity_share is None:
            self._count_for_bias(routing_map)

    def _count_for_bias(self, routing_map: torch.Tensor) -> None:
        if self.enable_expert_bias and torch.is_grad_enabled() and not self.is_padding:
            with torch.no_grad():
                self.local_tokens_per_expert += routing_map.sum(dim=0)


# Notation: T tokens of a microbatch on this rank, K experts of each token, E experts.


class _TraceRouter(PaddingAwareRouter):
    """Routes tokens so that the loads of experts follow a recorded trace (Lazarus, arXiv 2407.04656, section 6.1).

    The assignment of tokens to experts depends only on the seed, the iteration, the layer and the position of the
    microbatch in the global batch. It does not depend on the parallel layout or the placement. Tensor-parallel ranks
    use parts of the same assignment. Auxiliary losses use the experts that the learned gate would choose.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        trace: RoutingTrace,
        seed: int,
        **others: Any,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **others)
        self.trace, self.seed = trace, seed
        self.router_replay = _ForcedChoice()
        self._dp_group = pg_collection.dp
        self.start_iteration(0)

    def start_iteration(self, iteration: int, owed: Sequence[int] = ()) -> None:
        """Reset the count of routed microbatches, and start the iteration as ``PaddingAwareRouter`` does."""
        super().start_iteration(iteration, owed)
        self._iteration = iteration
        self._num_routed = {False: 0, True: 0}

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens to the forced experts. ``logits`` is [sequence, batch, E]. Return probs [T, E], which the
        learned gate computes, and routing_map [T, E]."""
        num_tokens = logits.shape[0] * logits.shape[1]
        self.router_replay.experts = self._forced(num_tokens, self._next_microbatch()).to(logits.device)
        return super().routing(logits, padding_mask)

    def _next_microbatch(self) -> int:
        """Return the position of the next microbatch in the global batch. Passes with and without gradients are counted
        separately, because full recomputation routes each microbatch twice: without and with gradients."""
        with_gradients = torch.is_grad_enabled()
        number = self._num_routed[with_gradients]
        self._num_routed[with_gradients] += 1
        return microbatch_position(self._dp_group.size(), self._dp_group.rank(), number)

    def _forced(self, num_tokens: int, microbatch: int) -> torch.Tensor:
        """Return the forced experts of this rank's tokens: int64 [T, K]. With sequence parallelism, each rank has an
        equal part of the tokens of a microbatch."""
        part, num_parts = self.tp_cp_group.rank(), self.tp_cp_group.size()
        loads = self.trace.loads(self._iteration, self.layer_number)
        counts = expert_token_counts(loads, num_tokens * num_parts, self.topk)
        key = f"{self.seed}/iteration {self._iteration}/layer {self.layer_number}/microbatch {microbatch}"
        # Assign the whole microbatch, and use this rank's part, so that all parts belong to one assignment.
        experts = forced_experts(counts, num_tokens * num_parts, key)
        return torch.from_numpy(experts[part * num_tokens : (part + 1) * num_tokens].copy())


class _ForcedChoice:
    """Replacement for Megatron's ``RouterReplay`` that selects given experts, not those with the highest scores."""

    experts: torch.Tensor
    """The K experts to select for each of T tokens, int64 [T, K]."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [T, K] of the given experts, and the experts [T, K]."""
        return scores.gather(1, self.experts), self.experts


def router_builder(config: JobConfig) -> RouterBuilder:
    """Return the function that creates the routers of a job's MoE layers.

    Raises:
        ConfigError, DataError: the routing trace cannot be read, or does not match the model.
    """
    share = config.snapshot.repay_capacity_share
    if config.model.router != "trace":
        return partial(PaddingAwareRouter, repay_capacity_share=share)
    trace = RoutingTrace.of(config.model, read_trace(config))
    return partial(_TraceRouter, trace=trace, seed=config.training.seed, repay_capacity_share=share)


def routers(model_chunks: list[torch.nn.Module]) -> list[PaddingAwareRouter]:
    """Return the routers of all MoE layers of ``model_chunks``, in the order of the layers within each chunk."""
    return [m for chunk in model_chunks for m in unwrap(chunk).modules() if isinstance(m, PaddingAwareRouter)]


def take_auxiliary_losses() -> tuple[float, float]:
    """Return this rank's auxiliary losses, summed since the last call, and reset the sums.

    Returns:
        (sum of balancing losses, sum of z-losses) over layers and microbatches, without their coefficients.
    """
    balancing = z = 0.0
    # The values are not reduced over ranks here: the vote sums them in rank order.
    for name, values in versions.auxiliary_losses().items():
        total = float(values.sum())
        values.zero_()
        if name == _Z_LOSS:
            z += total
        else:
            balancing += total
    return balancing, z


def forget_auxiliary_losses() -> None:
    """Clear Megatron's global tracker of auxiliary losses, which references process groups of the current engine. Also
    reset the global scale of auxiliary losses, which the schedule of the next engine sets again."""
    versions.auxiliary_losses(forget=True)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def routed_tokens(
    model_chunks: list[torch.nn.Module], num_layers: int, num_experts: int, *, with_repaid: bool = False
) -> torch.Tensor:
    """Return the number of tokens that this rank has routed to each expert in this iteration, as int64 [1, num_layers,
    num_experts] on the CPU. With ``with_repaid``, the shape is [2, num_layers, num_experts]. The second entry is the
    number of tokens beyond the expert's capacity (``snapshot.repay_capacity_share``)."""
    load = torch.zeros((1 + with_repaid, num_layers, num_experts), dtype=torch.int64)
    for router in routers(model_chunks):
        load[:, router.layer_number - 1] = torch.stack([router.load, router.repaid][: len(load)]).cpu()
    return load


def more_tokens(
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    kept: torch.Tensor,
    owing: torch.Tensor,
    capacity: int,
    most: int,
    *,
    by_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose dropped tokens that experts process beyond their capacity, because these experts lost tokens in a recovery
    (MoEtion, section 6). All experts together process at most as many tokens as their capacities allow.

    Args:
        probs: probability of each token and expert, [T, E].
        routing_map: tokens that were routed to each expert, bool [T, E].
        kept: tokens that each expert processes within its capacity, bool [T, E].
        owing: ids of experts that may exceed their capacity, int64 without duplicates; earlier ones take tokens first.
        capacity: capacity of each expert, in tokens.
        most: largest number of tokens that one expert may process beyond its capacity.
        by_probs: if true, choose the dropped tokens with the largest probabilities; otherwise the first dropped tokens.

    Returns:
        The additional tokens, bool [T, E], and their number for each expert, int64 [E].
    """
    most = min(most, len(probs))
    chosen = torch.zeros_like(routing_map)
    num_kept = kept.sum(dim=0)
    dropped = (routing_map & ~kept)[:, owing]
    unused = capacity * routing_map.shape[1] - num_kept.sum()
    wanted = dropped.sum(dim=0).clamp(max=most)
    # Nothing here reads a tensor's values on the host, because routing must not wait for the device.
    before = wanted.cumsum(dim=0) - wanted
    granted = torch.minimum((unused - before).clamp(min=0), wanted)
    positions = torch.arange(len(probs), 0, -1, device=probs.device).unsqueeze(1)
    scores = torch.where(dropped, probs[:, owing] if by_probs else positions, -1)
    tokens = scores.argsort(dim=0, descending=True, stable=True)[:most]
    is_granted = torch.arange(most, device=probs.device).unsqueeze(1) < granted
    chosen[:, owing] = torch.zeros_like(dropped).scatter(0, tokens, is_granted)
    return chosen, torch.zeros_like(num_kept).index_copy(0, owing, granted)
