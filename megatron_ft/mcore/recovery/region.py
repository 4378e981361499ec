"""A rank's part in the replay of neighbouring pipeline stages, while the other stages wait."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.pipeline.communicator import ReplayCommunicator
from megatron_ft.mcore.recovery.replay import open_replay
from megatron_ft.mcore.recovery.upstream_log import keep_room
from megatron_ft.mcore.snapshot.client import open_restorer
from megatron_ft.mcore.snapshot.local_window import LocalWindow
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.localized import LocalizedPlan
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.runtime.execute.replay import carry_out
from megatron_ft.runtime.transport.hang_up import Opening
from megatron_ft.snapshot.server.client import KeeperClient

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a region's replay."""

    kept: StoredWindow
    num_bytes: int
    """Bytes received from the logs of neighbouring stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGroups:
    """The ranks of this rank's region: all of them, and those of its own pipeline."""

    everybody: dist.ProcessGroup
    line: dist.ProcessGroup


def form_region_groups(trainer: "Trainer", plan: LocalizedPlan, stages: Sequence[int]) -> RegionGroups | None:
    """Form the process groups of all regions; every rank of the job must call this.

    Returns the groups of this rank's region, or None if this rank's stage does not replay.

    Args:
        stages: pipeline stage of each rank of the job.
    """
    mine: RegionGroups | None = None
    groups, pg, me = trainer.engine.groups, trainer.engine.pg, trainer.context.rank
    with _breakable(trainer):
        for region in plan.regions:
            rows = [[rank for rank, stage in enumerate(stages) if stage == of_region] for of_region in region]
            members = sorted(rank for row in rows for rank in row)
            # All stages replay: the groups of the job serve, and no rank forms any.
            if len(members) == len(stages):
                return RegionGroups(everybody=groups.vote, line=pg.pp)
            everybody = _add(trainer, members)
            # One stage needs a group of this rank alone in place of ``pp``: where the layout has one, none is formed.
            alone = next((group for group in (pg.cp, pg.tp) if len(region) == 1 and group.size() == 1), None)
            lines = [] if alone is not None else [_add(trainer, line) for line in zip(*rows, strict=True)]
            line = next((found for found in lines if found is not None), alone)
            if me in members:
                assert everybody is not None and line is not None, "a member of the region has no groups"
                mine = RegionGroups(everybody=everybody, line=line)
    return mine


@contextmanager
def _breakable(trainer: "Trainer") -> Iterator[None]:
    # Let a lost rank abort the formation of groups as it aborts collectives.
    groups, opening = trainer.engine.groups, Opening()

    def hang_up(reason: str) -> None:
        groups.transports.hang_up(reason)
        opening.hang_up(reason)

    trainer.break_with(hang_up)
    try:
        yield
    finally:
        opening.close()
        trainer.break_with(groups.transports.hang_up)


def _add(trainer: "Trainer", ranks: Sequence[int]) -> dist.ProcessGroup | None:
    timeout_seconds = trainer.config.training.distributed_timeout_seconds
    return trainer.engine.groups.add(ranks, timeout_seconds=timeout_seconds)


class Region:
    """The replay of ``stages``; all methods are collective over their ranks."""

    def __init__(
        self, trainer: "Trainer", plan: LocalizedPlan, stages: Sequence[int], circle: RegionGroups, client: KeeperClient
    ) -> None:
        self._trainer = trainer
        self._engine = trainer.engine
        self._plan = plan
        self._client = client
        self._stages = tuple(stages)
        self._line = circle.line
        self._collectives = Collectives(circle.everybody)

    def replay(self, votes: Mapping[int, Vote], plan: WindowPlan | None) -> Replayed:
        """Replay from the committed window to the target.

        Args:
            votes: votes of the iterations after the window.
            plan: plan of the windows that are captured from now on.

        Raises:
            RecoveryError: the window is missing or does not fit; the same on all ranks of the region.
        """
        engine = self._engine
        window = self._find()
        # The replay logs again what it sends, for the next failure: there must be room before it starts.
        for needed in (window.plan_in_force, plan or window.plan_in_force):
            keep_room(self._trainer, needed)
        replay = window.replay_plan(until=self._plan.target, votes=votes)
        replayer = open_replay(engine, window, self._collectives)
        with self._alone() as communicator:
            carry_out(replay, replayer)
        return Replayed(kept=window.stored, num_bytes=communicator.num_bytes)

    def _find(self) -> LocalWindow:
        trainer, kept = self._trainer, self._plan.window
        assert kept is not None, "the plan names no window"
        restorer = open_restorer(trainer, self._client, region=self._collectives)
        window = restorer.find(None, only=kept)
        if window is None:
            reasons = "; ".join(restorer.chosen.declined) or "no rank has this window"
            raise RecoveryError(f"window of iteration {kept.start_iteration}: {reasons}")
        return window

    @contextmanager
    def _alone(self) -> Iterator[ReplayCommunicator]:
        engine, pp = self._engine, self._engine.pg.pp
        me, size = pp.rank(), pp.size()
        communicator = ReplayCommunicator(
            pp,
            engine.transformer_config,
            engine.boundaries.log,
            replays_previous=(me - 1) % size in self._stages,
            replays_next=(me + 1) % size in self._stages,
        )
        before, config = engine.p2p, engine.transformer_config
        finalize = config.finalize_model_grads_func
        assert finalize is not None, "the engine has set no finalize_model_grads_func"
        engine.p2p, config.finalize_model_grads_func = communicator, self._finalizing(finalize)
        try:
            yield communicator
        finally:
            engine.p2p, config.finalize_model_grads_func = before, finalize

    def _finalizing(self, finalize: Callable[..., None]) -> Callable[..., None]:
        is_last_here = self._plan.num_stages - 1 in self._stages

        def finalize_alone(model: Any, num_tokens: torch.Tensor | None, *, pg_collection: Any, **others: Any) -> None:
            # Megatron broadcasts the count from the last rank of ``pp``: here another stage, which sees no labels.
            if num_tokens is not None and not is_last_here:
                num_tokens.fill_(self._num_own_tokens())
            # A copy: the schedule still uses the group of the whole pipeline.
            scoped = copy.copy(pg_collection)
            scoped.pp = self._line
            finalize(model, num_tokens, pg_collection=scoped, **others)

        return finalize_alone

    def _num_own_tokens(self) -> int:
        engine, config = self._engine, self._trainer.config
        batch, mine = engine.batch, engine.pg.dp.rank()
        numbers = range(batch.num_microbatches)
        num_real = sum(batch.first_sample(engine.iteration + 1, mine, number) is not None for number in numbers)
        return num_real * batch.micro_batch_size * config.model.seq_length // engine.pg.cp.size()
