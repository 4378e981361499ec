"""Keeps copies of optimizer state on other failure domains, and repeats each update on the copies.

With the distributed optimizer, only one rank has each shard of the non-expert optimizer state. This module copies the
master weights and moments of the shard to f - 1 ranks on other failure domains, where f is ``placement.state_copies``.
Before the vote of every iteration, these ranks receive the reduced gradients of the shard, a third of the bytes of the
state. After the vote, every rank updates its copies together with its own state. So the copies belong to the same
iteration as the rank's own state, and stay bitwise equal to the originals. The update of copies needs no communication:
once a vote is complete, each living rank can finish the iteration, and can update its copies of lost ranks' shards.

All replicas of an expert have its whole optimizer state. If the replicas are on fewer than f failure domains, ranks on
other failure domains get copies of the expert's state in the same way. In a job without replicas, the shard of a rank
contains the optimizer state of its experts, and the whole shard is copied.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.config.job import OptimizerConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.groups import Collectives, exchange_tensors
from megatron_ft.mcore.optimizer.adamw import MASTER, MOMENTS, STEP, Master, masters, state_format_of
from megatron_ft.mcore.optimizer.scaled import StateFormat
from megatron_ft.mcore.state.tensors import expert_of
from megatron_ft.planning.placement.copies import NON_EXPERT, StateCopyPlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.snapshot.repeated_updates import repeat_adamw
from transformer_engine_ext.optimizer import ParameterRange, ScaledAdamW, placeholder

_MAX_VALUES = 1 << 18


@dataclass(kw_only=True)
class _Kept:
    """Copies, on this rank, of optimizer state that rank ``owner`` updates."""

    owner: int
    names: list[str]
    starts: list[int]
    """Index of the first copied element in the flattened parameter, for each parameter."""
    parameters: list[torch.Tensor]
    """Master weights. With ``precision.regime``, these are placeholders that hold the gradients."""
    weight_decays: list[float]
    states: list[dict[str, torch.Tensor]]
    """Tensors of each parameter by component, in the order of ``adamw.state_tensors``."""
    optimizer: ScaledAdamW | None
    """Optimizer that updates the copied ``states`` if they are quantized; None if they are FP32."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all copied tensors by name: ``<name>/master``, ``/exp_avg``, ``/exp_avg_sq``, ``/step``, and scales if
        the state has any."""
        return {
            f"{name}/{kind}": tensor
            for name, state in zip(self.names, self.states, strict=True)
            for kind, tensor in state.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lending:
    """Master weights of this rank whose state is copied to rank ``keeper``, in the order in which it is sent."""

    keeper: int
    masters: list[Master] = field(default_factory=list)


class StateCopies:
    """Copies of optimizer state: of this rank's state on other ranks, and of other ranks' state on this rank.

    The constructor sends the whole state to ranks that lack copies. All ranks of ``group`` must call it together. They
    must also call ``exchange_gradients`` together before every vote. ``update`` does not communicate.

    Args:
        plan: for each shard, the ranks that have its state or a copy of it.
        placement: the assignment of experts to slots for which ``plan`` was made; None without replica slots.
        group: the ranks of the pipeline stage, in the order of the plan.
        former: earlier object of this rank, if its copies have the present state; otherwise None. Its copies are kept
            if ``plan`` assigns copies to the same ranks as before.
    """

    def __init__(
        self,
        model_chunks: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        config: OptimizerConfig,
        *,
        plan: StateCopyPlan,
        placement: PlacementPlan | None,
        group: dist.ProcessGroup,
        former: "StateCopies | None" = None,
    ) -> None:
        self.plan = plan
        self._group = group
        self._clip_grad, self._eps = config.clip_grad, config.adam_eps
        self._betas = config.adam_beta1, config.adam_beta2
        self._ranks = plan.ranks
        self.rank = self._me = plan.ranks[group.rank()]
        """Rank of this process in the job."""
        mine = list(masters(model_chunks, optimizer))
        self._format = state_format_of(optimizer)
        self.ranges = {m.name: (m.start, m.start + m.tensor.numel()) for m in mine}
        """Elements (start, stop) that this rank updates, by parameter. They change only when the job's ranks change."""
        self.kinds = {kind: tensor.dtype for kind, tensor in mine[0].parts.items()} if mine else {}
        """Dtype of each component of the optimizer state. All parameters have the same components."""
        self._lent = self._lendings(mine, plan, placement)
        # If a rank was replaced by a process in another failure domain, the plan may assign copies to other ranks.
        is_current = former is not None and former.plan.operators == plan.operators
        self.kept = self._receive(config, former if is_current else None)

    def exchange_gradients(self) -> None:
        """Send the reduced gradients of this rank's master weights to the ranks with copies, and receive the gradients
        for all copies on this rank. The gradients must be unscaled, but not clipped."""
        outgoing = self._by_rank({lent.keeper: [m.tensor.grad for m in lent.masters] for lent in self._lent})
        # Gradients of an earlier iteration that was skipped or rolled back may remain. They are overwritten.
        for kept in self.kept:
            for parameter in kept.parameters:
                parameter.grad = torch.empty(parameter.shape, device=parameter.device)
        incoming = self._by_rank({kept.owner: [p.grad for p in kept.parameters] for kept in self.kept})
        exchange_tensors(outgoing, incoming, self._group)

    def update(self, grad_norm: float, learning_rate: float) -> None:
        """Apply the update of the iteration to the copies, with the gradient norm from the vote of the iteration. If
        this fails, the copies are unusable."""
        for kept in self.kept:
            # Clip with Megatron's function, so that the gradients are bitwise equal to those on the owner.
            if self._clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(kept.parameters, max_norm=self._clip_grad, total_norm=grad_norm)
            if kept.optimizer is not None:
                for group in kept.optimizer.param_groups:
                    group["lr"] = learning_rate
                kept.optimizer.step()
            else:
                self._repeat_adamw(kept, learning_rate)
            for parameter in kept.parameters:
                parameter.grad = None

    def _repeat_adamw(self, kept: _Kept, learning_rate: float) -> None:
        for decay in sorted(set(kept.weight_decays)):
            rows = [row for row, of_row in enumerate(kept.weight_decays) if of_row == decay]
            repeat_adamw(
                [kept.states[row] for row in rows],
                [kept.parameters[row].grad for row in rows],  # type: ignore[misc]
                lr=learning_rate,
                weight_decay=decay,
                betas=self._betas,
                eps=self._eps,
            )

    def end(self) -> None:
        """Release the references to this rank's master weights before experts move. The copies remain valid until the
        next update, so this object can be used as ``former`` if the move fails."""
        self._lent = []

    # -- parts --------------------------------------------------------------------------------------------

    def _lendings(self, mine: Sequence[Master], plan: StateCopyPlan, placement: PlacementPlan | None) -> list[_Lending]:
        keepers = _keepers(plan, placement, self._me)
        lent: dict[int, _Lending] = {}
        for master in mine:
            expert = None if placement is None else expert_of(master.name)
            for keeper in keepers.get(expert or NON_EXPERT, ()):
                lent.setdefault(keeper, _Lending(keeper=keeper)).masters.append(master)
        return [lent[keeper] for keeper in sorted(lent)]

    def _receive(self, config: OptimizerConfig, former: "StateCopies | None") -> list[_Kept]:
        collectives = Collectives(self._group)
        lacking = {rank for rank, lacks in zip(self._ranks, collectives.gather(former is None), strict=True) if lacks}
        sent = [lent for lent in self._lent if lent.keeper in lacking]
        mine = {str(lent.keeper): [_describe(master) for master in lent.masters] for lent in sent}
        # Only owners know the shapes, because Megatron divides the distributed optimizer's flat buffers at any element.
        offers = collectives.gather(mine)
        received = []
        for position, owner in enumerate(self._ranks):
            described = offers[position].get(str(self._me))
            if described:
                received.append(_make_room(owner, described, config, self._format))
        for part in _rounds([described for offer in offers for described in offer.values()]):
            outgoing = {lent.keeper: [t for m in lent.masters[part] for t in m.parts.values()] for lent in sent}
            incoming = {kept.owner: [t for state in kept.states[part] for t in state.values()] for kept in received}
            exchange_tensors(self._by_rank(outgoing), self._by_rank(incoming), self._group)
        return received if former is None else former.kept

    def _by_rank(self, tensors: Mapping[int, Sequence[Any]]) -> list[Sequence[Any]]:
        return [tensors.get(rank, ()) for rank in self._ranks]


def _keepers(
    plan: StateCopyPlan, placement: PlacementPlan | None, me: int
) -> dict[int | tuple[int, int], tuple[int, ...]]:
    """Return the ranks that receive copies of the state of rank ``me``, by part of the state. The key ``NON_EXPERT``
    stands for the non-expert shard or, without replicas, for the whole shard. The key (layer number, expert) stands for
    an expert whose first replica is on ``me``."""
    found: dict[int | tuple[int, int], tuple[int, ...]] = {}
    position = plan.ranks.index(me)
    for operator in plan.operators:
        if operator.expert == NON_EXPERT:
            found[NON_EXPERT] = tuple(rank for rank in operator.owners[position] if rank != me)
            continue
        assert placement is not None, "a plan with copies of experts needs their placement"
        by_rank = placement.slots[placement.layer_numbers.index(operator.layer_number)]
        holders = [rank for rank, experts in zip(placement.ranks, by_rank, strict=True) if operator.expert in experts]
        others = sorted({rank for owners in operator.owners for rank in owners} - set(holders))
        # All replicas of an expert have the same state, so only the first rank sends it.
        if holders[0] == me and others:
            found[operator.layer_number, operator.expert] = tuple(others)
    return found


def _rounds(described: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[slice]:
    """Yield slices of the lists in ``described``: parameters that one rank sends to another. Each slice is exchanged at
    once, in temporary copies, so it has one parameter per list, or several with at most ``_MAX_VALUES`` values."""
    sizes = [max(math.prod(item["shape"]) for item in row if item) for row in zip_longest(*described)]
    start = 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sum(sizes[start : stop + 1]) > _MAX_VALUES:
            yield slice(start, stop)
            start = stop


def _describe(master: Master) -> dict[str, Any]:
    if master.tensor.dtype is not torch.float32 or STEP not in master.parts:
        raise ConfigError(
            "placement.state_copies: must be null with this optimizer. Copies of its state need torch's AdamW, and "
            f"FP32 master weights or precision.regime; {master.name} has dtype {master.tensor.dtype} and optimizer "
            f"state {sorted(master.state)}"
        )
    return {
        "name": master.name,
        "unique_name": master.unique_name,
        "start": master.start,
        "shape": list(master.tensor.shape),
        "weight_decay": master.weight_decay,
        "kinds": list(master.parts),
    }


def _make_room(
    owner: int, described: Sequence[Mapping[str, Any]], config: OptimizerConfig, state_format: StateFormat | None
) -> _Kept:
    device = torch.cuda.current_device()
    zeros = [torch.zeros(item["shape"], device=device) for item in described]
    parameters = zeros if state_format is None else [placeholder(tensor.shape, device) for tensor in zeros]
    decays = [item["weight_decay"] for item in described]
    optimizer = None
    if state_format is None:
        # Allocated before the first update, because moments and step counts of the owner are received into them.
        moments = ({kind: torch.zeros_like(parameter) for kind in MOMENTS} for parameter in parameters)
        states = [
            {MASTER: parameter, **of_parameter, STEP: torch.tensor(0.0)}
            for parameter, of_parameter in zip(parameters, moments, strict=True)
        ]
    else:
        ranges = {
            id(parameter): ParameterRange(name=item["unique_name"], start=item["start"])
            for parameter, item in zip(parameters, described, strict=True)
        }
        groups = [
            {"params": [parameter], "weight_decay": decay} for parameter, decay in zip(parameters, decays, strict=True)
        ]
        initial = {id(parameter): values for parameter, values in zip(parameters, zeros, strict=True)}
        options: dict[str, Any] = {
            "lr": config.lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
        }
        optimizer = state_format.build(groups, ranges=ranges, initial=initial, **options)
        states = [
            {kind: optimizer.state[parameter][kind] for kind in item["kinds"]}
            for parameter, item in zip(parameters, described, strict=True)
        ]
    return _Kept(
        owner=owner,
        names=[item["name"] for item in described],
        starts=[item["start"] for item in described],
        parameters=parameters,
        weight_decays=decays,
        states=states,
        optimizer=optimizer,
    )
