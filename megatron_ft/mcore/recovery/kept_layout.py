"""Continues training in a membership with the same layout, in which other processes replace the lost ranks.

Ranks that survive keep their tensors in place (``recovery.keep_layout``). ``localized.py`` restores the state. If no
process replaces a lost rank, ``replicas.py`` continues with another layout.
"""

import time
from dataclasses import replace
from typing import Any

from megatron_ft import failpoints
from megatron_ft.events import RecoveryStarted
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.moe.placement_manager import PlacementManager, PlacementState
from megatron_ft.mcore.optimizer.adamw import set_position
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.recovery.localized import Built, KeptLayoutRecovery
from megatron_ft.mcore.recovery.prebuilt import Prebuilder
from megatron_ft.mcore.snapshot.restorer import SNAPSHOT_SERVICE
from megatron_ft.mcore.state.carried import Carried, MembershipStart
from megatron_ft.mcore.state.rank_status import Holding
from megatron_ft.mcore.state.tensors import put_state, take_state
from megatron_ft.mcore.training.trainer import Trainer
from megatron_ft.planning.recovery.prebuild import can_prebuild
from megatron_ft.snapshot.server.client import KeeperClient


class KeptLayoutTrainer(Trainer):
    """A trainer that continues in a membership with the same layout, in the same process."""

    prebuilder: Prebuilder | None = None
    """Engines that this process has built in advance while it waited as a spare; None if it was not a spare."""
    former_copies: StateCopies | None = None
    """Copies of other ranks' optimizer state that remain after a change of placement was undone. They are used until
    new copies are made."""

    def prebuild(self) -> None:
        """Build the engines that this spare needs if it replaces a node. Raise RankLost if this fails."""
        if can_prebuild(self.job):
            self.prebuilder = Prebuilder(self.job, self.context, self.make_engine)
            self.prebuilder.build()

    def _take_prebuilt(self) -> Groups | None:
        # Uses the engine that was built in advance for this rank, if there is one, and returns its groups.
        taken = None if self.prebuilder is None else self.prebuilder.take(self.context.rank)
        if taken is None:
            return None
        self.engine = taken.engine
        return taken.groups

    def undo_migration(self) -> None:
        """Return to the placement before the newest migration, if no iteration has been committed since that migration.
        This needs no communication. Do nothing if the membership does not keep the layout."""
        former, engine = self.previous_placement, self.engine
        if former is None or not self.config.recovery.keep_layout:
            return
        self.previous_placement = None
        if engine.iteration >= former.before_iteration:
            self.placed_from = former.before_iteration
            return
        assert self.placement is not None, "experts have moved in a job without a placement"
        self.placement.plans = former.plans
        self.former_copies = engine.state_copies or former.copies
        engine.end_copies()
        if former.saved is not None:
            engine.return_experts(self.placement.replicas(), former.saved)
            return
        if former.host is not None:  # the migration has failed, so the model or the optimizer may be missing
            state, host = former.state, former.host
        else:
            state, host = {**take_state(engine.model_chunks, engine.optimizer), **former.state}, engine.train_state()
        engine.build(engine.groups, self.placement.replicas(), group_keys=engine.group_keys)
        put_state(engine.model_chunks, engine.optimizer, state)
        engine.restore(host)

    def _recover_in_place(self, carried: Carried | None, groups: Groups, target: int) -> None:
        """Give every rank the state after the iteration ``target``. All ranks must call this.

        Args:
            carried: this rank's state from the previous membership; None on a rank without state.
            target: iteration after which the membership begins. If a policy has stopped the run at this iteration, the
                state before it is restored.

        Raises:
            RecoveryError: a replay is impossible, or computed another state than before the failure.
        """
        self.use(groups)
        recovery = KeptLayoutRecovery(
            self.engine,
            context=self.context,
            collectives=self.collectives,
            carried=carried,
            pp=groups.pg_collection.pp,
            topology=self.topology,
            placement=self._placement_state,
            placed_from=self.placed_from,
            copies=self.engine.state_copies or self.former_copies,
        )
        plan = recovery.plan
        generation = self.context.generation
        self.report(
            RecoveryStarted(generation=generation, strategy=plan.strategy, iteration=plan.target, declined=plan.reasons)
        )
        state, votes, window_plan, group_keys = recovery.share()
        failpoints.hit("reform_build", target)
        engine = self.engine
        engine.continue_after(plan.target, state.newest_vote)
        if recovery.placement is not None:
            # Experts keep their slots, but a joining node may be in another failure domain.
            stage = self.topology.coordinates(self.context.rank).pp
            self.placement = PlacementManager(self.config, stage=stage, before=recovery.placement)
            self.placement.refresh_domains()
            self.placed_from = recovery.plan.placed_from
        is_kept, build_began = engine.is_built, time.monotonic()
        # Only ranks without a model build one. Ranks with a model take no part in this.
        built = None if self.prebuilder is None else self.prebuilder.finish(groups, group_keys)
        if built is None and engine.is_built:
            engine.reconnect(groups)
        elif built is None:
            replicas = None if self.placement is None else self.placement.replicas()
            engine.build(groups, replicas, group_keys=group_keys)
        prepared = Built(
            built=built or ("kept" if is_kept else "all"),
            why_built="" if is_kept or self.prebuilder is None else self.prebuilder.why_not,
            seconds=time.monotonic() - build_began,
        )
        client = self._reopen_snapshot_client()
        failpoints.hit("reform_move", target)
        kept = recovery.recover(
            client,
            votes,
            window_plan,
            open_restorer=lambda region: self.open_restorer(client, region=region),
            break_with=self.break_with,
            report=self.report,
            built=prepared,
        )
        if recovery.lacks_copies:
            # Do not reuse copies on a joining rank: after an interrupted recovery, they may be of another state.
            self.keep_copies(former=None if carried is None else engine.state_copies)
        self.former_copies = None
        if carried is not None:
            carried.before_replay = None
        assert engine.iteration == plan.target, f"the recovery ended at iteration {engine.iteration}, not {plan.target}"
        engine.continue_after(plan.target, state.newest_vote)
        # Each rank keeps its own value, because a save or an evaluation that was due may be done on some ranks only.
        self.rounded_off = state.rounded_off if carried is None else carried.host.rounded_off
        set_position(engine.scheduler, engine.batch.samples_before(plan.target + 1))
        if carried is not None:
            carried.kept = plan.window
        if client is not None:
            resumed = None if kept is None or window_plan is None else (kept, window_plan)
            snapshots, vote = self.take_snapshots(client, resumed), votes.get(plan.target)
            # The window in progress is lost. Without a new window, the next recovery would have to replay all
            # iterations since the window ``kept``: those up to ``plan.target``, and all later ones.
            if resumed is not None and vote is not None and resumed[0].start_iteration < plan.target:
                snapshots.capture_whole(vote)
        self.membership_start = MembershipStart(iteration=target, carried=carried or self._carried())
        # If this rank still has to report the iteration at which a policy stopped the run, ``account`` stops the run.
        if state.stopped is not None and (carried is None or carried.finished is None):
            self.stop(plan.target + 1, state.stopped)

    @property
    def _placement_state(self) -> PlacementState | None:
        placement = self.placement
        return None if placement is None else PlacementState(plans=placement.plans, loads=placement.loads)

    def _reopen_snapshot_client(self) -> KeeperClient | None:
        """Connect to this node's snapshot server in a new membership, and exchange the addresses of all snapshot
        servers. All ranks must call this, because only the ranks of a joining node know the address of its server."""
        if self.config.snapshot.policy is None:
            return None
        context, service = self.context, self.context.sidecars[SNAPSHOT_SERVICE]
        gathered = self.collectives.gather([context.node, service["addresses"][str(context.node)]])
        addresses = {**service["addresses"], **{str(node): address for node, address in gathered}}
        sidecars = {**context.sidecars, SNAPSHOT_SERVICE: {**service, "addresses": addresses}}
        self.context = replace(context, sidecars=sidecars)
        return self._open_snapshot_client()

    def _carried(self) -> Carried:
        # Returns the state of a rank between two iterations. All ranks must be at the same iteration.
        engine = self.engine
        return Carried(
            holdings=(self._holding(None),),
            part=self._part,
            state={},  # the tensors stay in the engine
            host=replace(engine.train_state(), newest_vote=engine.newest_vote, rounded_off=self.rounded_off),
            finished=None,
            batch=engine.batch,
            **self._windows(),
        )

    def _holding(self, placement: PlacementState | None, **more: Any) -> Holding:
        context = self.context
        # Without a placement, a rank has the same state in every membership, so the generation does not matter.
        generation = 0 if placement is None else context.generation
        here = {"rank": context.rank, "part": self._part, "nodes": self.members}
        return Holding(generation=generation, placement=placement, **here, **more)

    @property
    def _part(self) -> int:
        """Model part (pipeline stage and tensor-parallel coordinate) of this rank."""
        return self.topology.model_parts[self.context.rank]

    @property
    def members(self) -> tuple[int, ...]:
        """Nodes of this membership, including nodes without a rank."""
        return self.context.members or tuple(dict.fromkeys(self.nodes))

    def _windows(self) -> dict[str, Any]:
        snapshots = self.snapshots
        return {} if snapshots is None else {"kept": snapshots.kept, "plan": snapshots.plan}
