"""Replays a region of adjacent pipeline stages, while the other stages wait."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.control.node.worker_client import Abort
from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.pipeline.communicator import ReplayCommunicator
from megatron_ft.mcore.recovery.replay import Replayer
from megatron_ft.mcore.recovery.upstream_log import keep_room
from megatron_ft.mcore.snapshot.local_window import LocalWindow
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.localized import LocalizedPlan
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.records import Record
from megatron_ft.runtime.execute.replay import carry_out
from megatron_ft.runtime.transport.hang_up import Opening


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replayed:
    """Result of the replay of a region on one rank."""

    kept: StoredWindow
    """The window that was replayed."""
    num_bytes: int
    """Number of bytes received from the logs of stages outside the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionGroups:
    """Process groups of a region for one rank."""

    everybody: dist.ProcessGroup
    """All ranks of the region."""
    line: dist.ProcessGroup
    """The ranks of the region in the same pipeline as this rank, one per stage."""


def form_region_groups(
    engine: TrainingEngine, plan: LocalizedPlan, stages: Sequence[int], *, break_with: Callable[[Abort], None]
) -> _RegionGroups | None:
    """Form the process groups of all regions. Every rank of the job must call this.

    Args:
        stages: pipeline stage of each rank of the job.
        break_with: registers the function that breaks the connections of this rank.

    Returns:
        The groups of this rank's region; None if this rank's stage does not replay.
    """
    mine: _RegionGroups | None = None
    groups, pg, me = engine.groups, engine.pg, engine.groups.vote.rank()
    with _breakable(groups, break_with):
        for region in plan.regions:
            rows = [[rank for rank, stage in enumerate(stages) if stage == of_region] for of_region in region]
            members = sorted(rank for row in rows for rank in row)
            # If all stages replay, the groups of the job are used, and no group is formed.
            if len(members) == len(stages):
                return _RegionGroups(everybody=groups.vote, line=pg.pp)
            everybody = _add(engine, members)
            # The pipeline of a region of one stage is a group of only this rank. An existing group is used if possible.
            alone = next((group for group in (pg.cp, pg.tp) if len(region) == 1 and group.size() == 1), None)
            lines = [] if alone is not None else [_add(engine, line) for line in zip(*rows, strict=True)]
            line = next((found for found in lines if found is not None), alone)
            if me in members:
                assert everybody is not None and line is not None, "a member of the region has no groups"
                mine = _RegionGroups(everybody=everybody, line=line)
    return mine


@contextmanager
def _breakable(groups: Groups, break_with: Callable[[Abort], None]) -> Iterator[None]:
    # The loss of a rank must end the formation of groups, as it ends collectives.
    opening = Opening()

    def hang_up(reason: str) -> None:
        groups.transports.hang_up(reason)
        opening.hang_up(reason)

    break_with(hang_up)
    try:
        yield
    finally:
        opening.close()
        break_with(groups.transports.hang_up)


def _add(engine: TrainingEngine, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    timeout_seconds = engine.config.training.distributed_timeout_seconds
    return engine.groups.add(ranks, timeout_seconds=timeout_seconds)


class Region:
    """The replay of one region, the pipeline stages ``stages``. All ranks of the region must make the same calls."""

    def __init__(
        self,
        engine: TrainingEngine,
        plan: LocalizedPlan,
        stages: Sequence[int],
        groups: _RegionGroups,
        *,
        open_restorer: Callable[[Collectives], SnapshotRestorer],
        report: Callable[[Record], None],
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._open_restorer = open_restorer
        self._report = report
        self._stages = tuple(stages)
        self._line = groups.line
        self._collectives = Collectives(groups.everybody)

    def replay(self, votes: Mapping[int, Vote], plan: WindowPlan | None) -> _Replayed:
        """Load the newest committed window, and replay the iterations up to the target.

        Args:
            votes: votes of the iterations after the window.
            plan: plan of the windows that are captured after the recovery.

        Raises:
            RecoveryError: the window is missing or does not match this job, on all ranks of the region; or a replayed
                iteration differs from its vote.
        """
        engine = self._engine
        window = self._find()
        # The replay logs the messages that it sends, for the next failure. So the log must be large enough before it.
        for needed in (window.plan_in_force, plan or window.plan_in_force):
            keep_room(engine, needed, self._report)
        replay = window.replay_plan(until=self._plan.target, votes=votes)
        replayer = Replayer.open(engine, window, self._collectives)
        with self._alone() as communicator:
            carry_out(replay, replayer)
        return _Replayed(kept=window.stored, num_bytes=communicator.num_bytes)

    def _find(self) -> LocalWindow:
        kept = self._plan.window
        assert kept is not None, "the plan names no window"
        restorer = self._open_restorer(self._collectives)
        window = restorer.find(None, only=kept)
        if window is None:
            reasons = "; ".join(restorer.chosen.declined) or "no rank has this window"
            raise RecoveryError(f"cannot load the committed window of iteration {kept.start_iteration}: {reasons}")
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
            # Megatron broadcasts the number of tokens from the last rank of ``pp``. In a region without the last stage,
            # this rank has no labels, so the number is computed.
            if num_tokens is not None and not is_last_here:
                num_tokens.fill_(self._num_own_tokens())
            # Copied, because the schedule still uses the group of the whole pipeline.
            scoped = copy.copy(pg_collection)
            scoped.pp = self._line
            finalize(model, num_tokens, pg_collection=scoped, **others)

        return finalize_alone

    def _num_own_tokens(self) -> int:
        engine, config = self._engine, self._engine.config
        batch, mine = engine.batch, engine.pg.dp.rank()
        numbers = range(batch.num_microbatches)
        num_real = sum(batch.first_sample(engine.iteration + 1, mine, number) is not None for number in numbers)
        return num_real * batch.micro_batch_size * config.model.seq_length // engine.pg.cp.size()
