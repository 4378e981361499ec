"""Sends state of living ranks to the ranks that replace lost ranks. Living ranks keep their own state in place.

``LocalizedPlan`` names the stages whose ranks receive state. Each rank has reported its units of state, for example
experts or an optimizer shard. Joining ranks list the tensors that they need. From these reports and lists, all ranks
compute the same ``TransferPlan``. A joining rank receives each element once. Ranks that have the same unit of state
divide the sending of this unit among themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ft.mcore.groups import Collectives, exchange_tensors
from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.state.tensors import distinct_state, expert_of
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.operators import operator_of
from megatron_ft.planning.recovery.localized_replay import (
    LocalizedPlan,
    Standing,
    expert_unit,
    experts_unit,
    part_unit,
    shard_unit,
)
from megatron_ft.planning.state.holdings import Holding, Holdings, Need, Needs
from megatron_ft.planning.state.tensors import StateTensor, TensorIndex
from megatron_ft.planning.state.transfers import STAGING_BYTES, TransferPlan
from megatron_ft.topology import Topology

_Tensors = dict[tuple[str, str], torch.Tensor]
"""Flattened tensors of a rank, by unit of state and name. They are views of the tensors with which the rank trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Cost of a transfer of state on one rank."""

    num_bytes: int = 0
    """Bytes that this rank has sent and received."""
    staged_bytes: int = 0
    """Largest number of bytes that this rank has sent and received in one round of the transfer."""


class LivingPlaces:
    """Transfer of state in one recovery. All ranks of the job must make the same calls.

    Args:
        engine: engine of this rank, with model and optimizer.
        collectives: collectives over all ranks of the job.
        standings: progress and state that each rank has reported, by rank.
        has_replicas: whether experts have replicas. If so, each expert is a separate unit of state.
        copies: copies of other ranks' optimizer state on this rank.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        plan: LocalizedPlan,
        *,
        collectives: Collectives,
        standings: Sequence[Standing],
        topology: Topology,
        has_replicas: bool,
        copies: StateCopies | None,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._collectives = collectives
        self._standings = standings
        self._topology = topology
        self._has_replicas = has_replicas
        self._kept = [] if copies is None else copies.kept
        self._rank = collectives.rank
        self._is_sharded = engine.config.parallel.use_distributed_optimizer

    def fill(self, *, limit_bytes: int = STAGING_BYTES) -> Received:
        """Fill the tensors of the joining ranks. A rank sends and receives at most ``limit_bytes`` at a time."""
        mine = self._tensors()
        rows = list(self._needed(mine)) if self._receives(self._rank) else []
        plan, units = self._transfers(self._collectives.gather(rows), limit_bytes)
        received = self._carry_out(plan, units, mine | self._copies())
        if self._standings[self._rank].stage in self._plan.receiving and not self._has_whole_weights:
            adamw.refresh_weights(self._engine.optimizer, self._engine.model_chunks)
        return received

    def _receives(self, rank: int) -> bool:
        standing = self._standings[rank]
        return standing.stage in self._plan.receiving and not standing.has_state

    @property
    def _has_whole_weights(self) -> bool:
        """Whether the living ranks of this rank's stage have up-to-date compute weights of the whole stage, including
        those of experts. If not, the ranks round their master weights to compute weights, and gather these."""
        stage = self._standings[self._rank].stage
        living = [found for found in self._standings if found.stage == stage and found.has_state]
        if not all(standing.has_whole_weights for standing in living):
            return False
        if self._has_replicas or not self._is_sharded:
            return True  # ``LocalizedPlan`` has checked that living ranks have all experts
        held = {unit for standing in living for unit in standing.holds}
        return all(experts_unit(rank, self._topology) in held for rank in self._topology.stage_ranks(stage))

    def _needed(self, mine: _Tensors) -> Iterator[list[Any]]:
        # Yields [unit, name, number of elements, bytes per element] for each tensor that this rank receives.
        dtypes = {name: tensor.dtype for (_, name), tensor in mine.items() if "/" not in name}
        for (unit, name), tensor in mine.items():
            parameter, _, kind = name.partition("/")
            if self._is_sharded and not self._is_replica(name):
                if not kind and not self._has_whole_weights:
                    continue  # not sent, but rounded from the master weights and gathered
                if kind == "master" and self._has_whole_weights and dtypes[parameter] is torch.float32:
                    continue  # part of the FP32 weight, which is received as a whole
            yield [unit, name, tensor.numel(), tensor.element_size()]

    def _is_replica(self, name: str) -> bool:
        return self._has_replicas and expert_of(name) is not None

    def _tensors(self) -> _Tensors:
        chunks, optimizer, found = self._engine.model_chunks, self._engine.optimizer, _Tensors()
        for name, tensor in distinct_state(chunks, optimizer):
            # Buffers are sent in ``TrainState`` instead, because their dtype can differ in a new model.
            is_of_shard = self._is_sharded and "/" in name and not self._is_replica(name)
            if not name.startswith("buffer.") and not is_of_shard:
                found[self._unit_of(name), name] = tensor.detach().view(-1)
        for master in adamw.masters(chunks, optimizer) if self._is_sharded else ():
            if not self._is_replica(master.name):
                # Not ``master.state``: for quantized state, it also has empty tensors, which no plan can contain.
                of_master = master.parts.items()
                found |= {(shard_unit(self._rank), f"{master.name}/{kind}"): tensor for kind, tensor in of_master}
        return found

    def _copies(self) -> _Tensors:
        # Returns this rank's copies of other ranks' shards. Leaves out experts, if ranks receive these from replicas.
        return {
            (shard_unit(kept.owner), name): tensor.view(-1)
            for kept in self._kept
            for name, tensor in kept.tensors().items()
            if not self._is_replica(name)
        }

    def _unit_of(self, name: str) -> str:
        expert = expert_of(name)
        if expert is None:
            return part_unit(self._rank, self._topology)
        return expert_unit(*expert) if self._has_replicas else experts_unit(self._rank, self._topology)

    def _transfers(self, rows: Sequence[Sequence[Any]], limit_bytes: int) -> tuple[TransferPlan, list[str]]:
        units = sorted({unit for of_rank in rows for unit, *_ in of_rank})
        num_layers, iteration = self._engine.config.model.num_layers, self._plan.target
        tensors = {
            (unit, name): StateTensor(
                operator=operator_of(name.partition("/")[0], num_layers),
                parameter=name,
                tensor_part=units.index(unit),
                kind="state",
                num_elements=num_elements,
                item_bytes=item_bytes,
            )
            for of_rank in rows
            for unit, name, num_elements, item_bytes in of_rank
        }
        index = TensorIndex.of(tensors.values())
        needs = Needs.of(
            index,
            (
                Need(rank=rank, tensor=tensors[unit, name], start=0, stop=size, iteration=iteration)
                for rank, of_rank in enumerate(rows)
                for unit, name, size, _ in of_rank
            ),
        )
        holders = {
            unit: [rank for rank, found in enumerate(self._standings) if found.has_state and unit in found.holds]
            for unit in units
        }
        held = Holdings.of(
            index,
            (
                Holding(rank=rank, domain="", tensor=tensor, start=0, stop=tensor.num_elements, iteration=iteration)
                for (unit, _), tensor in tensors.items()
                for rank in holders[unit]
            ),
        )
        plan = TransferPlan.of(held, needs, limit_bytes=limit_bytes)
        assert isinstance(plan, TransferPlan), f"the recovery plan needs state that no rank has: {plan.summary()}"
        return plan, units

    def _carry_out(self, plan: TransferPlan, units: Sequence[str], mine: _Tensors) -> Received:
        group, transfers = self._engine.groups.world, list(plan.transfers(self._rank))
        num_bytes, staged_bytes = 0, 0
        for turn in range(plan.num_rounds):
            outgoing: list[list[torch.Tensor]] = [[] for _ in self._standings]
            incoming: list[list[torch.Tensor]] = [[] for _ in self._standings]
            in_turn = 0
            for transfer in (found for found in transfers if found.round == turn):
                whole = mine[units[transfer.tensor.tensor_part], transfer.tensor.parameter]
                assert whole.numel() == transfer.tensor.num_elements, f"{transfer.tensor} has another size on this rank"
                part = whole[transfer.start : transfer.stop]
                (outgoing[transfer.target] if transfer.source == self._rank else incoming[transfer.source]).append(part)
                in_turn += part.numel() * part.element_size()
            with torch.no_grad():
                exchange_tensors(outgoing, incoming, group)
            num_bytes, staged_bytes = num_bytes + in_turn, max(staged_bytes, in_turn)
        return Received(num_bytes=num_bytes, staged_bytes=staged_bytes)
