"""An MoE layer in which each expert can have any number of copies, and a class that sums the gradients of the copies.

``Replicas`` describes the placement of one pipeline stage for the model. ``MixtureLayer`` is Megatron's own layer with
a point for injected faults (failpoint). ``send_rows`` and ``return_rows`` exchange tokens between ranks, without
padding; ``runtime/dispatch/backend.py`` has the notation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoECudaGraphTensorStore
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ft import failpoints
from megatron_ft.mcore import versions
from megatron_ft.mcore.model.transformer_config import unwrap
from megatron_ft.planning.placement.layout import copies_per_rank
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.runtime.dispatch.backend import DispatchBackend
from megatron_ft.runtime.dispatch.rows import DispatchHandle


@dataclass(slots=True)
class ExchangeCounter:
    """Counts the bytes that this rank passes to all-to-all exchanges, for rows and for the gradients of rows. The
    caller reads and resets the counts."""

    sent_bytes: int = 0
    """Bytes of the rows that go to other ranks."""
    kept_bytes: int = 0
    """Bytes of the rows that stay on this rank."""
    num_exchanges: int = 0

    def add(self, splits: Sequence[int], rank: int, row_bytes: int) -> None:
        """Count one exchange in which this rank sends ``splits[n]`` rows of ``row_bytes`` bytes to each rank n."""
        self.num_exchanges += 1
        self.kept_bytes += splits[rank] * row_bytes
        self.sent_bytes += (sum(splits) - splits[rank]) * row_bytes


class _AllToAll(torch.autograd.Function):
    """All-to-all exchange of rows, which must be ordered by destination rank. The received rows are ordered by source
    rank. The backward pass sends the gradients of the rows back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        group: dist.ProcessGroup,
        counter: ExchangeCounter | None,
    ) -> torch.Tensor:
        ctx.way_back = (recv_splits, send_splits, group, counter)
        return _exchange(rows, send_splits, recv_splits, group, counter)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grad, *ctx.way_back), None, None, None, None


def send_rows(
    rows: torch.Tensor, handle: DispatchHandle, group: dist.ProcessGroup, counter: ExchangeCounter | None = None
) -> torch.Tensor:
    """Send ``rows`` [S, H] or [S] to their destination ranks. Return the rows that this rank receives, [R, H] or [R],
    in order of arrival. Every rank of ``group`` must call this."""
    return _AllToAll.apply(rows, handle.send_splits, handle.recv_splits, group, counter)


def return_rows(
    rows: torch.Tensor, handle: DispatchHandle, group: dist.ProcessGroup, counter: ExchangeCounter | None = None
) -> torch.Tensor:
    """Send the received ``rows`` [R, H] or [R], in order of arrival, back to the ranks that sent them. Return the rows
    that this rank had sent, [S, H] or [S], in sending order. Every rank of ``group`` must call this."""
    return _AllToAll.apply(rows, handle.recv_splits, handle.send_splits, group, counter)


def gather_counts(routing_map: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return how many tokens each rank routes to each expert, int64 [E, N]. Every rank of ``group`` must call this."""
    mine = routing_map.sum(0)
    rows = torch.empty((group.size(), len(mine)), dtype=torch.int64, device=mine.device)
    dist.all_gather_into_tensor(rows.view(-1), mine, group=group)
    return rows.t().contiguous()


def _exchange(
    rows: torch.Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup,
    counter: ExchangeCounter | None,
) -> torch.Tensor:
    if len(rows) != sum(send_splits) or len(send_splits) != group.size():
        raise ValueError(
            f"{len(rows)} rows cannot be sent with splits {list(send_splits)} in a group of size {group.size()}: there "
            "must be one split for each rank, and the splits must sum to the number of rows"
        )
    if counter is not None:
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        counter.add(send_splits, group.rank(), row_bytes)
    if group.size() == 1:
        return rows.clone()
    received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(recv_splits), list(send_splits), group=group)
    return received


def holders(slots: Sequence[Sequence[int]], expert: int) -> list[int]:
    """Return the ranks that have ``expert`` in a slot, in ascending order."""
    return [rank for rank, experts in enumerate(slots) if expert in experts]


# The gradient of an expert that is on n ranks is divided into n pieces. In a first exchange, each of these ranks sends
# piece k to the k-th of these ranks, which sums the pieces. In a second exchange, these ranks send each other the sums.


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedExpert:
    """An expert with copies on several ranks. ``holders`` lists these ranks, including this rank."""

    parameters: tuple[torch.nn.Parameter, ...]
    holders: tuple[int, ...]

    def pieces(self) -> list[int]:
        """Return how many gradient elements each rank in ``holders`` sums, in the order of ``holders``."""
        total, count = sum(parameter.numel() for parameter in self.parameters), len(self.holders)
        return [total * (number + 1) // count - total * number // count for number in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Placement of the experts of one pipeline stage on the ranks of its expert group, and the dispatch backend."""

    plan: PlacementPlan
    backend: DispatchBackend

    def slots_of(self, layer_number: int) -> Sequence[Sequence[int]]:
        """Return, for each rank, the expert in each of its slots. ``layer_number`` counts from 1, as in Megatron."""
        return self.plan.slots[self.plan.layer_numbers.index(layer_number)]


class ReplicaGradients:
    """Sums the gradients of all experts that have copies on several ranks of one stage.

    Args:
        model_chunks: chunks of this rank in ``DistributedDataParallel``.
        replicas: current placement of the stage.
        group: ranks of the stage.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        replicas: Replicas,
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._experts = list(_shared_experts(model_chunks, replicas))
        # A rank whose experts have no copies on other ranks takes part in the exchanges with this empty tensor.
        self._nothing = next(p.main_grad for chunk in model_chunks for p in chunk.parameters()).new_empty(0)

    def sum(self) -> None:
        """Replace the gradients of each expert by their sum over all copies. All ranks of the stage must call this."""
        # All experts share one exchange. Separate groups for sets of ranks would have to change with the placement.
        flats = [torch.cat([p.main_grad.reshape(-1) for p in expert.parameters]) for expert in self._experts]
        parts = [flat.split(expert.pieces()) for flat, expert in zip(flats, self._experts, strict=True)]
        contributions = self._exchange(
            [(part, expert) for part, expert in zip(parts, self._experts, strict=True)], to_owners=True
        )
        sums = [self._add_up(number, parts[number], contributions) for number in range(len(parts))]
        returned = self._exchange(
            [([s], expert) for s, expert in zip(sums, self._experts, strict=True)], to_owners=False
        )
        for number, expert in enumerate(self._experts):
            whole = [sums[number] if holder == self._rank else returned[holder][number] for holder in expert.holders]
            _write(expert.parameters, torch.cat(whole))

    def _add_up(
        self, number: int, own: Sequence[torch.Tensor], contributions: dict[int, dict[int, torch.Tensor]]
    ) -> torch.Tensor:
        expert = self._experts[number]
        mine = own[expert.holders.index(self._rank)]
        terms = [mine if holder == self._rank else contributions[holder][number] for holder in expert.holders]
        # An all-reduce is not used, because its order of additions depends on backend, sizes and number of ranks.
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        return total

    def _exchange(
        self, parts: list[tuple[Sequence[torch.Tensor], _SharedExpert]], *, to_owners: bool
    ) -> dict[int, dict[int, torch.Tensor]]:
        """Exchange pieces of gradients with one uneven all-to-all. Return the received pieces by rank and index of the
        expert. With ``to_owners``, piece k of an expert is sent to the k-th rank of its ``holders``. Otherwise
        ``parts`` has one piece per expert: the sum that this rank has computed, which is sent to all other ranks of
        ``holders``."""
        ranks = range(self._group.size())
        outgoing: list[list[torch.Tensor]] = [[] for _ in ranks]
        incoming: list[list[tuple[int, int]]] = [[] for _ in ranks]
        # Two ranks list their common experts in the same order, by layer and id, so sizes need not be exchanged.
        for number, (pieces, expert) in enumerate(parts):
            sizes, me = expert.pieces(), expert.holders.index(self._rank)
            for place, holder in enumerate(expert.holders):
                if holder != self._rank:
                    outgoing[holder].append(pieces[place] if to_owners else pieces[0])
                    incoming[holder].append((number, sizes[me] if to_owners else sizes[place]))
        send_sizes = [sum(piece.numel() for piece in of_rank) for of_rank in outgoing]
        receive_sizes = [sum(size for _, size in of_rank) for of_rank in incoming]
        flat = [piece for of_rank in outgoing for piece in of_rank]
        sent = torch.cat([self._nothing, *flat])
        received = sent.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self._group)
        chunks = iter(received.split([size for of_rank in incoming for _, size in of_rank]))
        return {rank: {number: next(chunks) for number, _ in of_rank} for rank, of_rank in enumerate(incoming)}


def _shared_experts(model_chunks: Sequence[torch.nn.Module], replicas: Replicas) -> Iterator[_SharedExpert]:
    for chunk in model_chunks:
        for layer in unwrap(chunk).decoder.layers:  # type: ignore[union-attr]
            if not isinstance(layer.mlp, ReplicaMixtureLayer):
                continue
            of_layer = replicas.slots_of(layer.layer_number)
            for expert_id, expert in zip(layer.mlp.experts.expert_ids, layer.mlp.experts.local_experts, strict=True):
                ranks = holders(of_layer, expert_id)
                if len(ranks) > 1:
                    yield _SharedExpert(parameters=tuple(expert.parameters()), holders=tuple(ranks))


def _write(parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.main_grad.copy_(part.view_as(parameter.main_grad))


class MixtureLayer(MoELayer):
    """Megatron's MoE layer with a failpoint in its dispatch. The engine calls ``start_iteration``."""

    iteration: int = 0

    def start_iteration(self, iteration: int, owed: Sequence[int] = ()) -> None:
        """Set the number of the iteration, which failpoints and forced routing need; 0 means an evaluation. For
        each expert, ``owed`` is its number of lost tokens minus the additional tokens it has processed since."""
        self.iteration = iteration
        self.router.start_iteration(iteration, owed)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens to the ranks of their experts, with an all-to-all."""
        failpoints.hit("dispatch", self.iteration)
        return super().dispatch(hidden_states, probs)


class _ReplicaExperts(SequentialMLP):
    """The experts of one layer on one rank. Slots with the same expert share one set of weights.

    Args:
        expert_ids: ids of these experts, in ascending order.
        holders: for each of these experts, the ranks of the expert group that have it, in ascending order.
        rank: index of this rank in the expert group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        expert_ids: Sequence[int],
        holders: Sequence[Sequence[int]],
        rank: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(len(expert_ids), config, submodules, pg_collection=pg_collection)
        self.place(expert_ids, holders, rank)

    def place(self, expert_ids: Sequence[int], holders: Sequence[Sequence[int]], rank: int) -> None:
        """Set the ids of the experts whose weights are in this object. The class docstring explains the arguments."""
        self.expert_ids = list(expert_ids)
        self.copy_numbers = [list(ranks).index(rank) for ranks in holders]
        self._mark_copies()

    def _mark_copies(self) -> None:
        # Each expert must count once in the gradient norm, so only its first copy counts. Megatron leaves parameters
        # out of the norm that are marked ``shared`` (``param_is_not_shared``).
        for expert, copy_number in zip(self.local_experts, self.copy_numbers, strict=True):
            for parameter in expert.parameters():
                parameter.shared = copy_number > 0

    def forward(
        self,
        pieces: Sequence[torch.Tensor],
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], None]:
        """Run each expert on its tokens. ``pieces`` has a tensor [rows, H] for each expert, and so has the returned
        list of outputs. Other arguments are ignored: the tensors already have ``tokens_per_expert`` rows, and the ranks
        that sent the tokens apply the probabilities."""
        outputs = []
        # Run experts without rows, too, because a bucket is reduced only if all its parameters have gradients.
        for expert, rows in zip(self.local_experts, pieces, strict=True):
            output, bias = expert(self._padded(rows))
            output = output if bias is None else output + bias
            # Slice only if necessary: the backward pass of a slice copies all rows.
            outputs.append(output if len(output) == len(rows) else output[: len(rows)])
        return outputs, None

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        if not (self.config.fp8 or self.config.fp4):
            return rows
        padded, _ = self._pad_tensor_for_quantization(rows, rows.new_zeros(len(rows)))
        return padded

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return Megatron's sharded state dict, with one entry per expert. Megatron treats all copies of an expert as
        replicas of one tensor, and saves one. Without ``singleton_local_shards`` in ``metadata``, all experts are parts
        of one tensor, as in Megatron-LM's checkpoints."""
        state: ShardedStateDict = {}
        for number, expert in enumerate(self.local_experts):
            local, expert_id = f"{prefix}local_experts.{number}.", self.expert_ids[number]
            offsets, key = sharded_offsets, f"{prefix}experts.{expert_id}."
            if not (metadata or {}).get("singleton_local_shards"):
                position = (len(sharded_offsets), expert_id, self.config.num_moe_experts)
                offsets, key = (*sharded_offsets, position), f"{prefix}experts."
            of_expert = expert.sharded_state_dict(local, offsets, metadata)
            replace_prefix_for_sharding(of_expert, local, key)
            # Megatron writes only the copy whose ``replica_id`` is zero.
            for tensor in of_expert.values():
                tensor.replica_id = (*tensor.replica_id[:2], self.copy_numbers[number])
            state.update(of_expert)
        return state


# Notation: T tokens on this rank, E experts, N ranks of the group, H hidden size, S sent rows, R received rows. A row
# is one token for one of its experts.


class _ReplicaTokenDispatcher(MoETokenDispatcher):
    """Sends each token to one copy of each of its experts, and weights the returned outputs by probabilities.

    Args:
        replicas: int64 [E, N], number of copies of each expert on each rank of ``pg_collection.ep``.
        local_experts: distinct experts of this rank, in ascending order.
        backend: decides how many tokens each copy of an expert gets, and orders the tokens for the exchange.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        replicas: torch.Tensor,
        local_experts: list[int],
        backend: DispatchBackend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.replicas = replicas
        self.local_experts = local_experts
        self.backend = backend
        self.group: dist.ProcessGroup = pg_collection.ep
        self.bytes = ExchangeCounter()

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy ``hidden_states`` [sequence, batch, H] to the rows [S, H] that are sent. ``probs`` [T, E] stay local."""
        self._shape = hidden_states.shape
        self._probs = probs
        counts = gather_counts(routing_map, self.group)
        # Copy the matrix to the device of the tokens once, not in every microbatch.
        self.replicas = self.replicas.to(counts.device)
        rank = self.group.rank()
        schedule = self.backend.schedule(counts, self.replicas, rank)
        self._handle: DispatchHandle = self.backend.plan(routing_map, schedule, rank, self.local_experts)
        rows = self.backend.permute(hidden_states.reshape(-1, self._shape[-1]), self._handle)
        return rows, probs

    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send ``rows`` [S, H], and return the R received rows [R, H], with an all-to-all without padding."""
        return send_rows(rows, self._handle, self.group, self.bytes), probs

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
        """Sort ``rows`` [R, H] by local expert. Return (rows by expert, number of rows by expert, ``probs``)."""
        return self.backend.sort_received(rows, self._handle), self._handle.tokens_per_local_expert, probs

    def combine_preprocess(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the rows of each local expert back into their order of arrival, [R, H]."""
        return self.backend.unsort(pieces, self._handle)

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Send ``rows`` [R, H] back and receive [S, H] with the reverse all-to-all."""
        return return_rows(rows, self._handle, self.group, self.bytes)

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the ``rows`` [S, H] of each token, weighted with their probabilities, to [sequence, batch, H]."""
        output = self.backend.unpermute(rows, self._probs, self._handle).view(self._shape)
        # Autograd keeps what the backward pass needs. These references would keep all tensors until the next call.
        del self._probs, self._handle
        return output


class ReplicaMixtureLayer(MixtureLayer):
    """Megatron's MoE layer, built for a placement of expert copies, which can change between iterations.

    Args:
        slots: for each rank of ``pg_collection.ep``, the expert in each of its slots. Several copies of an expert on
            one rank share one set of weights and get a larger share of the tokens.
        backend: dispatch backend.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        slots: Sequence[Sequence[int]],
        backend: DispatchBackend,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        # ``unused`` are values for layers that this project does not have: ``is_mtp_layer`` and ``name``.
        # ``MoELayer.__init__`` is not called: it gives each rank a block of experts, so EP must divide their number.
        MegatronModule.__init__(self, config)
        rank = utils.get_pg_rank(pg_collection.ep)
        assert len(slots) == utils.get_pg_size(pg_collection.ep), "slots must have one row for each rank of the stage"
        self.submodules = submodules
        self.layer_number = layer_number
        self.ep_group, self.tp_group, self.attn_tp_group = pg_collection.ep, pg_collection.tp, pg_collection.tp
        self.local_expert_indices = sorted(set(slots[rank]))
        self.num_local_experts = len(self.local_expert_indices)
        self.use_shared_expert = config.moe_shared_expert_intermediate_size is not None
        # Only Megatron's own dispatchers support this overlap (``set_shared_experts``).
        self.shared_expert_overlap = False
        selective = config.recompute_granularity == "selective"
        self.moe_layer_recompute = selective and "moe" in config.recompute_modules
        self.shared_experts_recompute = selective and "shared_experts" in config.recompute_modules
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()
        self.fwd_execution_map = ["route", "expert_compute", "postprocess"]
        self.router = submodules.router(config=config, pg_collection=pg_collection)
        self.token_dispatcher = _ReplicaTokenDispatcher(
            config,
            replicas=_replica_matrix(slots, config.num_moe_experts),
            local_experts=self.local_expert_indices,
            backend=backend,
            pg_collection=pg_collection,
        )
        self.experts = _ReplicaExperts(
            config,
            versions.submodules_of(submodules.experts),
            expert_ids=self.local_expert_indices,
            holders=[holders(slots, expert) for expert in self.local_expert_indices],
            rank=rank,
            pg_collection=pg_collection,
        )
        self.shared_experts = None
        if self.use_shared_expert:
            self.shared_experts = versions.build_part(
                submodules.shared_experts,
                config=config,
                pg_collection=pg_collection,
                gate=config.moe_shared_expert_gate,
            )

    def replace(self, dropped: int, expert: int) -> None:
        """Record that the tensors of expert ``dropped`` now contain ``expert``. Tokens are sent to the same ranks as
        before until ``use`` is called."""
        place = self.local_expert_indices.index(dropped)
        self.local_expert_indices[place] = self.experts.expert_ids[place] = expert

    def use(self, slots: Sequence[Sequence[int]]) -> None:
        """Send tokens from now on to the ranks that have the experts in ``slots``. Each rank must already have stored
        its experts in order of their ids."""
        rank = utils.get_pg_rank(self.ep_group)
        # In place, because the dispatcher has the same list.
        self.local_expert_indices[:] = sorted(set(slots[rank]))
        self.token_dispatcher.replicas = _replica_matrix(slots, self.config.num_moe_experts)
        self.experts.place(self.local_expert_indices, [holders(slots, e) for e in self.local_expert_indices], rank)


def _replica_matrix(slots: Sequence[Sequence[int]], num_experts: int) -> torch.Tensor:
    """Count the copies of each expert on each rank: int64 [num_experts, ranks]."""
    return torch.from_numpy(copies_per_rank(slots, num_experts))
