"""Copies of optimizer state on other failure domains, kept current by repeating the update.

With the distributed optimizer each shard of the non-expert state lives on one rank. Here f - 1 other ranks, on distinct
failure domains, also keep its master weights and moments. After every update they receive the shard's clipped gradient
(a third of the state's bytes) and apply the same update to the same bits, so the copies stay equal, bit for bit.

Experts are copied by their replicas, which all keep the whole state. If fewer than f failure domains compute an expert,
other ranks keep its state in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.config.optimizer import OptimizerConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.optimizer.masters import MOMENTS, Master, masters
from megatron_ft.mcore.state.tensors import expert_of
from megatron_ft.planning.placement.copies import NON_EXPERT, StateCopyPlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.runtime.transport.exchange import exchange_tensors


@dataclass(kw_only=True)
class Kept:
    """State that this rank copies for ``owner``: masters as parameters of a separate optimizer."""

    owner: int
    names: list[str]
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.AdamW

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return master weights and moments by name: ``<name>/master``, ``<name>/exp_avg``..."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            found[f"{name}/master"] = parameter.detach()
            found |= {f"{name}/{kind}": self.optimizer.state[parameter][kind] for kind in (*MOMENTS, "step")}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lending:
    """Gradients that this rank sends to one holder of a copy, in order."""

    keeper: int
    masters: list[Master] = field(default_factory=list)


class StateCopies:
    """This rank's part in ``plan``: the state that it sends to holders of copies, and the copies that it holds for
    owners.

    Building it moves the state once; ``follow`` must be called after every update. Both are collective over ``group``.

    Args:
        plan: owners of every shard; ``placement`` are the slots for which it was made.
        group: the ranks of the stage, in the plan's order.
    """

    def __init__(
        self,
        model_chunks: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        config: OptimizerConfig,
        *,
        plan: StateCopyPlan,
        placement: PlacementPlan,
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._ranks = plan.ranks
        self._me = plan.ranks[group.rank()]
        self._lent = self._lendings(list(masters(model_chunks, optimizer)), plan, placement)
        self.kept = self._receive(config)

    def follow(self, learning_rate: float) -> int:
        """Repeat the update that owners have just made; return the bytes that this rank sent.

        The gradients of the masters must still be those of the update: clipped and not zeroed yet.
        """
        outgoing = self._by_rank({lent.keeper: [m.tensor.grad for m in lent.masters] for lent in self._lent})
        for kept in self.kept:
            for parameter in kept.parameters:
                parameter.grad = torch.empty_like(parameter)
        incoming = self._by_rank({kept.owner: [p.grad for p in kept.parameters] for kept in self.kept})
        sent_bytes = exchange_tensors(outgoing, incoming, self._group)
        for kept in self.kept:
            # AdamW works element by element: however parameters are grouped, the same gradients give the owner's bits.
            for group in kept.optimizer.param_groups:
                group["lr"] = learning_rate
            kept.optimizer.step()
            kept.optimizer.zero_grad(set_to_none=True)
        return sent_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the copies on this rank for others."""
        tensors = (tensor for kept in self.kept for tensor in kept.tensors().values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # -- parts --------------------------------------------------------------------------------------------

    def _lendings(self, mine: Sequence[Master], plan: StateCopyPlan, placement: PlacementPlan) -> list[_Lending]:
        keepers = _keepers(plan, placement, self._me)
        lent: dict[int, _Lending] = {}
        for master in mine:
            for keeper in keepers.get(expert_of(master.name) or NON_EXPERT, ()):
                lent.setdefault(keeper, _Lending(keeper=keeper)).masters.append(master)
        return [lent[keeper] for keeper in sorted(lent)]

    def _receive(self, config: OptimizerConfig) -> list[Kept]:
        mine = {str(lent.keeper): [_describe(master) for master in lent.masters] for lent in self._lent}
        # Only owners know the shapes: Megatron cuts the distributed optimizer's flat buffers anywhere.
        offers = Collectives(self._group).gather(mine)
        kept = []
        for position, owner in enumerate(self._ranks):
            described = offers[position].get(str(self._me))
            if described:
                kept.append(_make_room(owner, described, config))
        outgoing = {lent.keeper: [t for m in lent.masters for t in _state_of(m.tensor, m.state)] for lent in self._lent}
        incoming = {
            k.owner: [t for p in k.parameters for t in _state_of(p.detach(), k.optimizer.state[p])] for k in kept
        }
        exchange_tensors(self._by_rank(outgoing), self._by_rank(incoming), self._group)
        return kept

    def _by_rank(self, tensors: Mapping[int, Sequence[Any]]) -> list[Sequence[Any]]:
        return [tensors.get(rank, ()) for rank in self._ranks]


def _keepers(plan: StateCopyPlan, placement: PlacementPlan, me: int) -> dict[int | tuple[int, int], tuple[int, ...]]:
    """Return the ranks that hold copies of the state that ``me`` owns: its non-expert shard, and the experts of which
    it is the first holder."""
    found: dict[int | tuple[int, int], tuple[int, ...]] = {}
    position = plan.ranks.index(me)
    for operator in plan.operators:
        if operator.expert == NON_EXPERT:
            found[NON_EXPERT] = tuple(rank for rank in operator.owners[position] if rank != me)
            continue
        by_rank = placement.slots[placement.layer_numbers.index(operator.layer_number)]
        holders = [rank for rank, experts in zip(placement.ranks, by_rank, strict=True) if operator.expert in experts]
        others = sorted({rank for owners in operator.owners for rank in owners} - set(holders))
        # All holders of an expert have the same state: the first one sends it.
        if holders[0] == me and others:
            found[operator.layer_number, operator.expert] = tuple(others)
    return found


def _describe(master: Master) -> dict[str, Any]:
    if master.tensor.dtype is not torch.float32 or "step" not in master.state:
        raise ConfigError(
            "placement.state_copies: needs FP32 master weights and torch's AdamW, whose update another rank can "
            f"repeat; {master.name} has {master.tensor.dtype} and optimizer state {sorted(master.state)}"
        )
    return {"name": master.name, "shape": list(master.tensor.shape), "weight_decay": master.weight_decay}


def _make_room(owner: int, described: Sequence[Mapping[str, Any]], config: OptimizerConfig) -> Kept:
    device = torch.cuda.current_device()
    parameters = [torch.nn.Parameter(torch.zeros(item["shape"], device=device)) for item in described]
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for parameter, item in zip(parameters, described, strict=True):
        groups.setdefault(item["weight_decay"], []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": members, "weight_decay": decay} for decay, members in groups.items()],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    for parameter in parameters:
        # Made here, not by the first step: moments and step count of the owner are received into them.
        zeros = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    return Kept(owner=owner, names=[item["name"] for item in described], parameters=parameters, optimizer=optimizer)


def _state_of(master: torch.Tensor, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [master, *(state[kind] for kind in MOMENTS), state["step"]]
