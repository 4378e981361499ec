"""Builds model, gradient buffers and optimizer on a spare before a node is lost.

For each model part that ``planning/recovery/prebuild.py`` names, a spare creates process groups without connections,
and builds an engine on them. This needs no communication. When the spare replaces a node, it uses the engine for the
model part of this node: it connects the engine's groups, and drops the other engines. If it has no such engine, it
builds one. Then the recovery fills the engine with state.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import RankLost
from megatron_ft.events import PartBuilt
from megatron_ft.mcore.groups import Groups, GroupsPutAway
from megatron_ft.mcore.optimizer.adamw import GroupKeys, allocate_state
from megatron_ft.mcore.state.tensors import free_state, state_bytes
from megatron_ft.mcore.state.train_state import TrainState, restore_rng, seed_rng
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.recovery.prebuild import PrebuildPlan


@dataclass(frozen=True, slots=True)
class _Built:
    """An engine that this process has built in advance."""

    rank: int
    """Rank for which the engine was built."""
    engine: TrainingEngine
    groups: GroupsPutAway
    state: TrainState
    """The engine's state directly after the build, except parameters and optimizer, e.g. random number generators."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An engine, built in advance, that this process uses from now on, and the engine's process groups."""

    engine: TrainingEngine
    groups: Groups
    """Process groups of this rank, not connected yet."""
    has_moved: bool
    """Whether the engine was built for another rank of the same model part."""


class Prebuilder:
    """Builds engines on a rank of a spare node, and returns the engine for the model part of a lost rank.

    Args:
        config: configuration with which the job was started.
        make_engine: creates an engine that is not built yet.
    """

    def __init__(self, config: JobConfig, context: RankContext, make_engine: Callable[[], TrainingEngine]) -> None:
        self._config, self._context, self._make_engine = config, context, make_engine
        self._plan = PrebuildPlan.of(config)
        self._built: dict[int, _Built] = {}
        self._taken: Taken | None = None
        self.why_not = "nothing was built in advance"
        """Reason why ``take`` has found no engine that was built in advance for a rank's model part."""

    def build(self) -> None:
        """Build an engine for each model part that is planned for this node. Begin no further engine after a membership
        with this node has begun. Complete an engine in progress, because the membership often needs it.

        Raises:
            RankLost: an engine could not be built, so this node cannot join.
        """
        for part in self._plan.of_node(self._context.node):
            if self._context.worker.membership_is_due():
                return
            try:
                self._build(part)
            # Raise RankLost: any other error would count as a rank's failure, and could end a job that can do without
            # this spare.
            except Exception as error:
                raise RankLost(
                    f"this node cannot join: the build of its part of the model failed: {error!r}"
                ) from error

    def _build(self, part: int) -> None:
        began, size = time.monotonic(), self._config.launch.ranks_per_node
        rank = self._plan.parts[part][0] * size + self._context.local_rank
        groups = Groups.form_offline(self._config.parallel, rank=rank, **self._about_groups())
        engine = self._make_engine()
        engine.build(groups, is_offline=True)
        allocate_state(engine.optimizer)
        self._built[part] = _Built(rank, engine, groups.put_away(), engine.train_state())
        self._context.worker.report(
            PartBuilt(
                node=self._context.node,
                local_rank=self._context.local_rank,
                stage=engine.pg.pp.rank(),
                places=self._plan.parts[part],
                state_bytes=state_bytes(engine.model_chunks, engine.optimizer),
                seconds=time.monotonic() - began,
            ).to_record()
        )

    def take(self, rank: int) -> Taken | None:
        """Return the engine that was built for the model part of ``rank``, and register its groups with torch and
        Megatron. Drop all other engines. Return None if there is no such engine."""
        part = self._plan.part_of(rank // self._config.launch.ranks_per_node)
        built, self._built = self._built, {}
        found = built.pop(part, None)
        for other in built.values():
            # Free the memory now, because the garbage collector would free it much later.
            free_state(other.engine.model_chunks, other.engine.optimizer)
        if found is None:
            if built:
                self.why_not = f"model parts {sorted(built)} were built in advance, but rank {rank} needs part {part}"
            return None
        groups, has_moved = found.groups.put_back(), found.rank != rank
        if has_moved:
            groups = groups.move(self._config.parallel, rank=rank, **self._about_groups())
            seed_rng(self._config.training.seed, groups.pg_collection)
        else:
            assert found.state.rng is not None, "the state after the build has no random number generators"
            restore_rng(found.state.rng)
        self._taken = Taken(found.engine, groups, has_moved)
        return self._taken

    def finish(self, groups: Groups, group_keys: GroupKeys) -> str | None:
        """Give ``groups``, which are now connected, to the engine that ``take`` has returned. Return the engine's value
        of ``StageRecovery.built``; None if ``take`` has returned no engine, or if this was called before.

        Args:
            group_keys: keys of the optimizer's parameter groups, from a rank with state.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            return None
        return "optimizer" if taken.engine.use_built(groups, group_keys, has_moved=taken.has_moved) else "in_advance"

    def _about_groups(self) -> dict[str, Any]:
        timeout_seconds = self._config.training.distributed_timeout_seconds
        return {"world_size": self._config.world_size, "timeout_seconds": timeout_seconds}
