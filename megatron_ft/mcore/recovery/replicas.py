"""Forms the process groups of the next membership in the same processes, and restores state from expert replicas.

Experts of lost ranks have replicas on other ranks of the stage. All other state is the same on all ranks of a model
part (pipeline stage and tensor coordinate). A rank whose model part stays the same keeps its state and random number
generators. Ranks that join, or that change to another model part, receive the state of this part from other ranks. In a
membership with the same layout as the previous one (``NextMembership.keeps_layout``), ``kept_layout.py`` restores state
instead.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_ft import failpoints
from megatron_ft.config.membership import MembershipChange, config_of
from megatron_ft.errors import RecoveryError
from megatron_ft.events import CheckpointFailed, MembershipChanged, RecoveryStarted
from megatron_ft.mcore.data.batches import check_newcomers_data, note_run_data
from megatron_ft.mcore.groups import Collectives, Groups, dissolve_groups, open_store
from megatron_ft.mcore.moe.placement_manager import PlacementManager, PlacementState
from megatron_ft.mcore.optimizer.adamw import set_position
from megatron_ft.mcore.recovery.kept_layout import KeptLayoutTrainer
from megatron_ft.mcore.state.carried import (
    Carried,
    MembershipMove,
    MembershipStart,
    Moved,
    context_in,
    expert_like,
    first_of,
    hand_over,
    seed_newcomer,
)
from megatron_ft.mcore.state.optimizer_shards import ShardMove, Shards
from megatron_ft.mcore.state.rank_status import Holding, Key, Previous, RankStatus, choose_holding, resolve_iteration
from megatron_ft.mcore.state.tensors import NamedState, by_expert, held_state, move_experts, put_state
from megatron_ft.planning.placement.migration import MigrationPlan
from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
from megatron_ft.planning.recovery.membership import NextMembership, Target
from megatron_ft.planning.state.declined import Declined
from megatron_ft.runtime.transport.abort import Opening
from megatron_ft.snapshot.storage.checkpoints import iteration_of
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME


class ElasticTrainer(KeptLayoutTrainer):
    """A trainer that continues in other memberships, of any layout, in the same process."""

    evacuated: Shards | None = None
    """Optimizer shards that this rank has received from leaving ranks, for the next membership."""
    spared: tuple[int, ...] = ()
    """Generations (numbers of memberships) in which this process was a hot spare, so had no rank."""

    def join_job(self) -> dist.Store:
        """Form the process groups of generation 0, and build this trainer on them. All ranks must call this.

        Returns:
            The store of generation 0, which closes when the last reference to it is dropped.
        """
        timeout_seconds = self.job.launch.start_timeout_seconds
        store = open_store(self.context, timeout_seconds=timeout_seconds)
        device = self.device.type
        self.build(Groups.join(self.config, self.context, device=device, timeout_seconds=timeout_seconds, store=store))
        # ``build`` has checked that all ranks have the same data. Joining ranks compare their data with this record.
        if self.context.rank == 0 and self.job.may_lose_nodes:
            note_run_data(self.samples["train"], self.context.run_dir)
        return store

    def reconfigure(self, following: NextMembership, *, store: dist.Store | None = None) -> None:
        """Continue in the membership ``following``, from the state after its target iteration.

        All ranks of ``following`` must call this. The current process groups are not used, because they may have
        failed.

        Args:
            store: store of ``following``, if this process has opened it already.

        Raises:
            RecoveryError: a part of the state is lost, or ranks have different placements.
            DataError: a rank reads other data, and the job cannot continue without this rank.
            RuntimeError: the membership could not be formed, because ranks were lost or read other data. This rank
                keeps its state for the next membership.
            TrainingStopped: a policy stopped the run at the iteration that was in progress.
        """
        began, in_place = time.monotonic(), following.keeps_layout
        carried = self.carry(following.target, in_place=in_place)
        # Set this first, so that this rank still has its state if a later step fails.
        self.membership_start = MembershipStart(iteration=following.target.iteration, carried=carried)
        former = self._release_groups(keeps_engine=in_place and self.engine.is_built)
        self.config = config = config_of(self.job, following.nodes, keeps_layout=in_place)
        self.context, self.nodes = context_in(self.context, following, config), following.nodes
        if in_place:
            former = former or self._take_prebuilt()
        self.engine.use(config)
        failpoints.enter(following.generation, rank=self.context.rank)
        groups = self._join(store, former)
        present, fingerprints, moved, stated = self._present(carried, groups)
        key, previous = choose_holding(
            present,
            range(following.world_size) if in_place else following.nodes,
            following.generation,
            is_whole=lambda key, previous: self._move(present, key, previous, moved).is_whole(carried, groups),
        )
        check_newcomers_data(self.job, self.context, fingerprints, first_of(previous))
        move = self._move(present, key, previous, moved)
        if in_place:
            self._recover_in_place(carried, groups, following.target.iteration)
        else:
            self._check_parts(move)
            shards = self._shard_move(carried, stated, following.target.iteration)
            if previous[self.context.rank] is None:
                carried = None  # this rank lacks the state from which the other ranks continue
            self._go_on(carried, move, groups, shards)
        iteration = self.engine.iteration
        self.report(
            MembershipChanged(
                generation=following.generation,
                world_size=following.world_size,
                nodes=following.members,
                reason=following.reason,
                iteration=iteration,
                seconds=time.monotonic() - began,
                joining=move.joining,
                schedule=self.membership_start.changes,
            )
        )
        if self.placement is not None and not in_place:
            self.report_placement("membership")
        # Rank 0 may have just joined. Then it has no record of the finished iteration and of abandoned saves.
        self.reporting_rank = move.reporting_rank
        self._report_abandoned_saves()
        if carried is not None and carried.finished is not None:
            finished, carried.finished = carried.finished, None
            self.account(finished, finished.seconds, carried.batch)
        self.reporting_rank = 0

    def stand_by(self, following: NextMembership) -> None:
        """Become a hot spare in ``following``, a membership in which this process has no rank. Drop all state."""
        self._release_groups(keeps_engine=False)
        self.engine.in_progress = self.membership_start = self.previous_placement = self.evacuated = None
        self.spared = (*self.spared, following.generation)
        self.context = replace(self.context, generation=following.generation, is_joining=False)

    def leave(self) -> None:
        """Release all resources without communication, because other ranks may have left already."""
        self.teardown()
        dissolve_groups()

    def _release_groups(self, *, keeps_engine: bool) -> Groups | None:
        # Releases the current groups, if there are any, and all objects that use them. With ``keeps_engine``, keeps the
        # engine, its placement and its groups, disconnects these groups, and returns them.
        if not keeps_engine:
            self.placement = self.former_copies = self.engine.boundaries.log = None
        if dist.is_initialized():
            self.teardown(keeps_engine=keeps_engine)
        if keeps_engine:
            self.engine.groups.disconnect()
            return self.engine.groups
        dissolve_groups()
        return None

    def _join(self, store: dist.Store | None, former: Groups | None) -> Groups:
        # Forms the groups of the new membership. If a rank is lost meanwhile, this must fail, as collectives do.
        failpoints.hit("reform_join", self.engine.iteration)
        opening = Opening()
        self.break_with(opening.hang_up)
        try:
            groups = Groups.join(
                self.config,
                self.context,
                device=self.device.type,
                timeout_seconds=self.config.recovery.reconfigure_timeout_seconds,
                store=store,
                opening=opening,
                former=former,
            )
        finally:
            opening.close()
        self.break_with(groups.transports.hang_up)
        return groups

    def _present(
        self, carried: Carried | None, groups: Groups
    ) -> tuple[list[RankStatus], list[str], list[Moved | None], list[dict[str, Any] | None]]:
        """Gather four values of each rank. Return four lists with one entry for each rank: its status; the fingerprint
        of its samples; its model part and experts, or None unless experts have moved since its placement was recorded;
        the description of its optimizer shards (``Shards.statement``), or None without shards."""
        status = RankStatus.of(() if carried is None else carried.holdings, self.spared).to_json()
        has_moved = carried is not None and carried.has_moved
        experts = [carried.part, list(by_expert(carried.state))] if carried is not None and has_moved else None
        shards = None if carried is None or carried.shards is None else carried.shards.statement()
        mine = [status, self.samples["train"].fingerprint(), experts, shards]
        statuses, fingerprints, moved, stated = zip(*Collectives(groups.vote).gather(mine), strict=True)
        return (
            [RankStatus.from_json(found) for found in statuses],
            list(fingerprints),
            [None if found is None else (found[0], frozenset(map(tuple, found[1]))) for found in moved],
            list(stated),
        )

    def _move(
        self, present: Sequence[RankStatus], key: Key, previous: Previous, moved: Sequence[Moved | None]
    ) -> MembershipMove:
        former = tuple(
            None if rank is None else presence.part_in(key) for rank, presence in zip(previous, present, strict=True)
        )
        joining = [
            node
            for node, rank, presence in zip(self.nodes, previous, present, strict=True)
            if rank is None and key[0] not in presence.spared
        ]
        return MembershipMove(
            key=key,
            previous=previous,
            former=former,
            topology=self.topology,
            moved=tuple(moved),
            joining=tuple(dict.fromkeys(joining)),
        )

    def _check_parts(self, move: MembershipMove) -> None:
        """Raise RecoveryError if no rank has the state of a model part."""
        if move.lost_parts:
            lost = "; ".join(map(move.topology.describe_part, move.lost_parts))
            raise RecoveryError(
                f"generation {self.context.generation} cannot continue from the state of the remaining ranks: no rank "
                f"has the state of {lost}"
            )

    def _shard_move(
        self, carried: Carried | None, stated: Sequence[dict[str, Any] | None], iteration: int
    ) -> ShardMove | None:
        """Return the ``ShardMove`` for all ranks' optimizer shards; None if each rank has the whole state. Raise
        RecoveryError if the ranks together lack a part of the state."""
        if not self.config.parallel.use_distributed_optimizer:
            return None
        mine = None if carried is None else carried.shards
        parts, num_layers = self.topology.model_parts, self.config.model.num_layers
        known = {part for statement in stated if statement is not None for part, _ in statement["sizes"]}
        if lacking := sorted(set(parts) - known):
            reason = f"no rank has optimizer state of {'; '.join(map(self.topology.describe_part, lacking))}"
        else:
            move = ShardMove.of(mine, stated, parts=parts, iteration=iteration, num_layers=num_layers)
            missing = move.missing()
            if missing is None:
                return move
            reason = missing.summary()
        raise RecoveryError(
            f"generation {self.context.generation} cannot continue from the state of the remaining ranks: {reason}"
        )

    def _go_on(self, carried: Carried | None, move: MembershipMove, groups: Groups, shards: ShardMove | None) -> None:
        """Send state to ranks that lack it, then build and fill model and optimizer. All ranks must call this.

        Args:
            carried: this rank's state; None if the rank lacks the state from which the other ranks continue.
            shards: move of the distributed optimizer's shards; None without a distributed optimizer.
        """
        host, held, shapes = move.share(carried, groups)
        assert held.placement is not None, "the former membership had no placement"
        stage = self.topology.coordinates(self.context.rank).pp
        manager = PlacementManager(self.config, stage=stage, before=held.placement)
        migrations = self._follow(manager, move)
        generation = self.context.generation
        is_short = self.job.recovery.keep_layout and len(move.parts) < self.job.world_size
        declined = ("keeping the layout of the job's start: no node has replaced a lost node",) if is_short else ()
        self.report(
            RecoveryStarted(generation=generation, strategy="living_state", iteration=host.iteration, declined=declined)
        )
        me = self.context.rank
        former = move.former[me]
        old: NamedState = {} if carried is None or former is None else carried.of_part(former)[0]
        failpoints.hit("reform_move", host.iteration)
        state = dict(old) if me in move.staying else {}
        if shapes:
            state |= hand_over(old, shapes, move.former, move.parts, groups.world)
            if move.keeps_stage(me):  # all tensor parts of a stage have the same experts
                state |= {name: old[name] for names in by_expert(old).values() for name in names}
        like = expert_like(next(iter(shapes.values()))) if shapes else None
        transfers = [transfer for migration in migrations for transfer in migration.transfers]
        move_experts(old, transfers, groups.world, range(len(move.parts)), into=state, like=like)
        del old  # if this rank changes its model part, ``membership_start`` has these tensors until it has formed
        self.placement = manager
        self.use(groups)
        engine = self.engine
        engine.continue_after(host.iteration, host.newest_vote)
        failpoints.hit("reform_build", engine.iteration)
        engine.build(groups, manager.replicas(), state=state)
        put_state(engine.model_chunks, engine.optimizer, state, has_shards=shards is not None)
        del state  # it still has the experts that this rank has sent away
        if shards is not None:
            failpoints.hit("reform_move", engine.iteration)
            shards.restore(engine.model_chunks, engine.optimizer, groups)
        # ``restore`` restores generators only if ``host.rng`` is not None. Only this rank's own state has ``rng``.
        if not move.keeps_generators(me):
            host = replace(host, rng=None)
            seed_newcomer(self.job.training.seed, engine.iteration, groups)
        engine.restore(host)
        set_position(engine.scheduler, engine.batch.samples_before(engine.iteration + 1))
        self.rounded_off = host.rounded_off
        formed = self._note_formed(held, move, is_stopped=host.stopped is not None)
        # A barrier. After it, all ranks have all state of this membership, so no rank returns to its former state.
        self.collectives.any(False)
        if formed is not None:  # its tensors need memory, and the optimizer will change them
            formed.holdings, formed.state, formed.former = (), {}, {}
        self.keep_copies()
        self._restart_snapshots()
        # A barrier. After it, all ranks have copies of their shards, so the membership can be reported.
        self.collectives.any(False)
        if formed is not None:
            formed.shards = None
        # If this rank still has to report the iteration at which a policy stopped the run, ``account`` stops the run.
        if host.stopped is not None and (carried is None or carried.finished is None):
            self.stop(engine.iteration + 1, host.stopped)

    def _note_formed(self, held: Holding, move: MembershipMove, *, is_stopped: bool) -> Carried | None:
        # Returns the former state of this rank if the membership trains; None if the rank had none.
        beginning = self.membership_start
        assert beginning is not None, "no membership is being formed"
        change = MembershipChange.between(held.nodes, self.members, move.joining, beginning.iteration + 1)
        changes = (*held.changes, change.to_text())
        # If a policy stops the run, this membership does not train. After a failure, ranks use their earlier state.
        self.membership_start = replace(beginning, changes=changes, is_formed=not is_stopped)
        return None if is_stopped else beginning.carried

    def _follow(self, manager: PlacementManager, move: MembershipMove) -> tuple[MigrationPlan, ...]:
        found = manager.follow(move.holders(manager.plans))
        if isinstance(found, Declined):
            generation = self.context.generation
            raise RecoveryError(
                f"generation {generation} cannot continue from the state of the remaining ranks: {found.summary()}"
            )
        return found

    def _restart_snapshots(self) -> None:
        """Create the ``Snapshotter``, which copies windows to nodes of the new membership. All ranks must call this."""
        client = self._reopen_snapshot_client()
        if client is not None:
            self.take_snapshots(client, None)

    def _report_abandoned_saves(self) -> None:
        # Every rank clears its list, because a later membership may have another reporting rank.
        abandoned, self.abandoned_saves = self.abandoned_saves, []
        for path in abandoned:
            error = (
                "ranks were lost while the checkpoint was written; the remaining ranks save their current state instead"
            )
            if (path / MANIFEST_NAME).exists():
                error = (
                    "ranks were lost just after the checkpoint was complete; the remaining ranks also save their "
                    "current state"
                )
            self.report(CheckpointFailed(iteration=iteration_of(path), error=error, path=str(path)))

    def repeat_abandoned_save(self) -> None:
        """Save a checkpoint if a rank has abandoned one in an earlier membership. All ranks must call this."""
        # If any rank has abandoned a save, all ranks must save, because saving is collective.
        if self.context.generation > 0 and self.collectives.any(self.is_save_due):
            self.save()
            # Reset only here. If ranks are lost before the save has begun, the next membership must still save.
            self.is_save_due = False

    def drain_experts(self, leaving: Sequence[int]) -> None:
        """Move experts and optimizer shards, so that the nodes that stay have all of them when ``leaving`` have left.
        All ranks must call this."""
        placement, engine = self.placement, self.engine
        assert placement is not None, "a node can leave a job only if the job has expert replicas"
        staying = self._ranks_without(leaving)
        self._evacuate_shards([rank for rank in range(len(self.nodes)) if rank not in staying])
        change = placement.evacuation(staying)
        # ``evacuation`` has the same result on all ranks, so all of them return here, or none does.
        if change is None:
            return
        self.context.worker.progress(engine.iteration + 1, "migrate")
        if self.snapshots is not None:
            self.snapshots.pause()
        self.move(change, engine.iteration + 1, is_evacuation=True)
        placement.adopt(change)
        self.report_placement("evacuation")

    def _ranks_without(self, leaving: Sequence[int]) -> frozenset[int]:
        """Return the ranks of this membership whose processes still have a rank when the nodes ``leaving`` are gone."""
        size = self.job.launch.ranks_per_node
        processes = [node * size + local for node, local in zip(self.nodes, self.context.local_ranks, strict=True)]
        now = MembershipLayout.of(self.members, processes, size)
        # The next layout is computed from ``now``, the newest layout whose ranks all have their state.
        after = JobLayouts.of(self.job).on([node for node in self.members if node not in leaving], now)
        # The control plane refuses to let nodes leave if the other nodes are too few.
        assert isinstance(after, MembershipLayout), "too few nodes would remain"
        return frozenset(rank for rank, process in enumerate(processes) if after.rank_of(process) is not None)

    def _evacuate_shards(self, leaving: Sequence[int]) -> None:
        engine = self.engine
        if not leaving or engine.state_copies is None or not self.config.parallel.use_distributed_optimizer:
            return
        parts, num_layers = self.topology.model_parts, self.config.model.num_layers
        mine = Shards.split_off(held_state(engine.model_chunks, engine.optimizer), engine.state_copies, parts)
        stated = self.collectives.gather(mine.statement())
        move = ShardMove.of(mine, stated, parts=parts, iteration=engine.iteration, num_layers=num_layers)
        self.evacuated = move.evacuate(leaving, engine.groups)

    def carry(self, target: Target, *, in_place: bool = False) -> Carried | None:
        """Return this rank's state after the iteration of ``target``; None if the rank has no state. Call this before
        the process groups are destroyed. If the membership has committed no iteration, the result is the state with
        which the rank began the membership, and the state that the rank has for the membership's placement. The latter
        is left out if the rank has not received all of it.

        Args:
            in_place: whether the next membership keeps the layout. The tensors then stay in the engine. Otherwise the
                result references them, so the engine must not be used any more.
        """
        beginning, engine = self.membership_start, self.engine
        if beginning is None or beginning.iteration != target.iteration:
            is_moving = self.previous_placement is not None and self.previous_placement.host is not None
            return self._take(target, (), in_place=in_place) if engine.is_built or is_moving else None
        if beginning.is_formed:
            return self._take(target, beginning.changes, in_place=in_place, is_new=True).after(beginning.carried)
        carried = beginning.carried
        if self.config.recovery.keep_layout:
            engine.abort()  # the engine has the only copy of the state
            self.undo_migration()
            if carried is not None and not in_place:
                carried = self._with_tensors(carried)
        self.previous_placement = None
        return carried

    def _with_tensors(self, carried: Carried) -> Carried | None:
        # Adds the engine's tensors: while the layout is kept, no others exist. They are unusable if a replay has
        # begun to overwrite them, or if new state copies were not made after the replay. Then copies from before the
        # replay are used. Without these, returns None: the rank must receive all its state.
        engine, placement = self.engine, self.placement
        copies, is_sharded = engine.state_copies or self.former_copies, self.config.parallel.use_distributed_optimizer
        assert placement is not None, "another number of ranks needs expert replicas"
        if carried.before_replay is not None:
            state, shards = carried.before_replay
        elif carried.digests is not None or (is_sharded and copies is None):
            return None
        else:
            state = held_state(engine.model_chunks, engine.optimizer)
            shards = None if copies is None else Shards.split_off(state, copies, self.topology.model_parts)
        in_force = PlacementState(plans=placement.plans, loads=placement.loads)
        holdings = (self._holding(in_force),)
        return replace(carried, holdings=holdings, state=state, shards=shards, digests=None, before_replay=None)

    def _take(self, target: Target, changes: tuple[str, ...], *, in_place: bool, is_new: bool = False) -> Carried:
        # Returns the state of a rank that has all state of its membership. ``changes``: see ``Holding.changes``.
        # ``is_new``: whether the membership has committed no iteration.
        engine = self.engine
        finished = resolve_iteration(engine, target)
        # The other ranks have observed the loads of this iteration already. All ranks must plan from the same loads.
        if finished is not None:
            self.observe(finished)
        self.undo_migration()
        former, self.previous_placement = self.previous_placement, None
        if former is None or former.host is None:
            state = {} if in_place else held_state(engine.model_chunks, engine.optimizer)
            host = engine.train_state()
        else:  # a migration failed, so the model or the optimizer may be missing
            state, host = {}, former.host
        # If the layout is kept, the trainer keeps its placement for the next membership, so the holding needs none.
        placement = None if in_place else self.placement
        in_force = None
        if placement is not None:
            in_force = PlacementState(plans=placement.plans, loads=placement.loads)
        holdings, has_replaced = (self._holding(in_force, changes=changes),), False
        copies = engine.state_copies or self.former_copies  # the latter if a migration was undone in a kept layout
        if placement is not None and former is not None and engine.iteration < former.before_iteration:
            # No iteration was committed with the newest placement, so the previous placement is used again.
            state = {**state, **former.state}
            before = PlacementState(plans=former.plans, loads=placement.loads)
            evacuated = (self._holding(in_force, changes=changes, is_evacuation=True),)
            has_moved = former.is_evacuation and former.host is None
            holdings = (self._holding(before, changes=changes), *(evacuated if has_moved else ()))
            has_replaced = former.is_in_place
            copies = copies or former.copies
        shards, evacuated_shards = None, self.evacuated
        self.evacuated = None
        # Without a placement, the layout stays the same, and so do the shards.
        if placement is not None and self.config.parallel.use_distributed_optimizer:
            if copies is not None:
                shards = Shards.split_off(state, copies, self.topology.model_parts).and_also(evacuated_shards)
            else:  # the copies were not made, so the shards of the former membership are still there
                assert is_new, "this rank keeps no copies of shards"
                Shards.remove_from(state)
        stops = finished is not None and finished.decision.action == "stop"
        return Carried(
            holdings=holdings,
            part=self._part,
            state=state,
            shards=shards,
            host=replace(
                host,
                newest_vote=engine.newest_vote,
                rounded_off=self.rounded_off,
                stopped=finished.decision.reason if finished is not None and stops else None,
            ),
            finished=finished,
            batch=engine.batch,
            has_moved=has_replaced,
            has_whole_weights=finished is None or not self.config.parallel.use_distributed_optimizer,
            **self._windows(),
        )
