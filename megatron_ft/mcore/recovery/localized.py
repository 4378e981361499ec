"""Recovers with the same layout: ranks that replace lost ranks receive state, or their pipeline stages replay.

``planning/recovery/localized_replay.py`` makes the plan. Ranks that survive keep model, gradient buffers and optimizer;
only their connections are replaced. If living ranks have all state of a stage, joining ranks of the stage receive this
state (``living_places.py``). Otherwise the stage replays, and stages that do not replay compute nothing. Adjacent
stages that replay form a region. A region loads the newest committed window and runs the later iterations again. Its
ranks communicate with each other as usual, and receive logged messages from stages outside the region. To detect a
wrong recovery, ranks that had state before the replay compare the digests of that state and of the result.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.control.node.worker_client import Abort, RankContext
from megatron_ft.errors import RecoveryError
from megatron_ft.events import StageRecovery
from megatron_ft.mcore.groups import Collectives, Groups
from megatron_ft.mcore.moe.placement_manager import PlacementState
from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.optimizer.state_copies import StateCopies
from megatron_ft.mcore.pipeline.communicator import ReplayCommunicator, serve
from megatron_ft.mcore.recovery.living_places import LivingPlaces, Received
from megatron_ft.mcore.recovery.upstream_log import keep_room
from megatron_ft.mcore.snapshot.local_window import PLACEMENT, LocalWindow, Replayer, carry_out
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer
from megatron_ft.mcore.state.carried import Carried
from megatron_ft.mcore.state.optimizer_shards import Shards
from megatron_ft.mcore.state.tensors import is_non_expert, state_bytes, take_state, tensor_digests
from megatron_ft.mcore.state.train_state import TrainState, generators_digest
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.operators import is_moe_layer
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.recovery.localized_replay import (
    LocalizedPlan,
    Standing,
    experts_unit,
    needs_of,
    shard_unit,
    units_of,
)
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowKey, WindowPlan
from megatron_ft.planning.state.declined import Declined
from megatron_ft.records import Record
from megatron_ft.runtime.transport.abort import Opening
from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Report of what a rank has built for a recovery, why, and how long this took (event ``StageRecovery``)."""

    built: str
    why_built: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replayed:
    """Result of the replay of a region on one rank."""

    kept: StoredWindow
    """The window that was replayed."""
    num_bytes: int
    """Number of bytes that this rank has received from the logs of stages outside the region."""
    staged_bytes: int
    """Largest number of bytes that this rank has sent and received at one time while it loaded the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionGroups:
    """Process groups of this rank's region (adjacent pipeline stages that replay)."""

    everybody: dist.ProcessGroup
    """Group of all ranks of the region."""
    line: dist.ProcessGroup
    """Group of this rank's pipeline within the region: one rank per stage."""


def _form_region_groups(
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
            # If all stages replay, use the groups of the job, and form none.
            if len(members) == len(stages):
                return _RegionGroups(everybody=groups.vote, line=pg.pp)
            everybody = _add(engine, members)
            # If the region is one stage, ``line`` is this rank alone. Use an existing group of one rank, if any.
            alone = next((group for group in (pg.cp, pg.tp) if len(region) == 1 and group.size() == 1), None)
            lines = [] if alone is not None else [_add(engine, line) for line in zip(*rows, strict=True)]
            line = next((found for found in lines if found is not None), alone)
            if me in members:
                assert everybody is not None and line is not None, "a member of the region has no groups"
                mine = _RegionGroups(everybody=everybody, line=line)
    return mine


@contextmanager
def _breakable(groups: Groups, break_with: Callable[[Abort], None]) -> Iterator[None]:
    # If a rank is lost, the formation of groups must end with an error, as collectives do.
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


class _Region:
    """Replays one region: the pipeline stages ``stages``. All ranks of the region must make the same calls."""

    def __init__(
        self,
        engine: TrainingEngine,
        plan: LocalizedPlan,
        stages: Sequence[int],
        groups: _RegionGroups,
        *,
        open_restorer: Callable[[Collectives], SnapshotRestorer],
        report: Callable[[Record], None],
        placement: PlacementState | None,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._placement = placement
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
            RecoveryError: the window is missing or does not match this job; then all ranks of the region raise this
                error. Or the results of a replayed iteration differ from its vote.
        """
        engine = self._engine
        window = self._find()
        self._check_placement(window)
        # The replay logs the messages that it sends, for the next failure. So enlarge the log before the replay.
        for needed in (window.plan_in_force, plan or window.plan_in_force):
            keep_room(engine, needed, self._report)
        replay = window.replay_plan(until=self._plan.target, votes=votes)
        replayer = Replayer.open(engine, window, self._collectives)
        with self._alone() as communicator:
            carry_out(replay, replayer)
        return _Replayed(kept=window.stored, num_bytes=communicator.num_bytes, staged_bytes=replayer.staged_bytes)

    def _find(self) -> LocalWindow:
        kept = self._plan.window
        assert kept is not None, "the recovery plan names no window to replay"
        restorer = self._open_restorer(self._collectives)
        window = restorer.find(None, only=kept)
        if window is None:
            reasons = "; ".join(restorer.chosen.declined) or "no rank has this window"
            raise RecoveryError(f"cannot load the committed window of iteration {kept.start_iteration}: {reasons}")
        return window

    def _check_placement(self, window: LocalWindow) -> None:
        """Raise RecoveryError if experts had another placement when ``window`` was captured."""
        recorded = window.header(0, PLACEMENT)
        plans = None if recorded is None else PlacementState.from_json(recorded).plans
        if plans is not None and self._placement is not None:
            slots = [[plan.slots for plan in placed] for placed in (plans, self._placement.plans)]
            if slots[0] != slots[1]:
                raise RecoveryError(
                    f"the window of iteration {window.window.start_iteration} has another placement of experts than "
                    "the present one, so it cannot be replayed; all ranks must start again"
                )

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
            # Megatron broadcasts the number of tokens from the last rank of ``pp``, here ``_line``. If the region lacks
            # the pipeline's last stage, that rank has no labels, so each rank computes the number itself.
            if num_tokens is not None and not is_last_here:
                num_tokens.fill_(self._num_loss_tokens())
            # Change a copy, because the schedule still uses the group of the whole pipeline.
            scoped = copy.copy(pg_collection)
            scoped.pp = self._line
            finalize(model, num_tokens, pg_collection=scoped, **others)

        return finalize_alone

    def _num_loss_tokens(self) -> int:
        number = self._engine.iteration + 1
        return self._engine.reader("train", number).num_loss_tokens(number)


def _stored(client: KeeperClient, rank: int, key: WindowKey) -> StoredWindow:
    """Return where the committed window ``key`` of ``rank`` is stored: in the memory of the rank's node or, if it is
    not there, in that of a peer. If no node has it, return a ``StoredWindow`` without slices."""
    for ask_peers in (False, True):
        for found in client.inventory(rank, ask_peers=ask_peers):
            if found.complete and found.key == key and (found.where == "own" or ask_peers):
                # If only peers have the window, no buffer on this node has to be kept.
                return replace(found, where="copy", buffer=None) if ask_peers else found
    return StoredWindow(**asdict(key), num_slices=0, num_held=0, where="copy")


class KeptLayoutRecovery:
    """Recovers one rank in a membership with the same layout as the previous one. All ranks must make the same calls.

    Args:
        engine: engine of this rank. It must be built before ``recover``.
        context: context of this rank in the new membership.
        collectives: collectives over all ranks of the job.
        carried: this rank's state from the previous membership; None on a rank without state.
        pp: process group of this rank's pipeline.
        topology: coordinates of the ranks in the layout.
        placement: placement of expert replicas; None without replicas, or on a rank that has had no placement yet.
        placed_from: first iteration that was committed with this placement.
        copies: copies of other ranks' optimizer state on this rank.

    Raises:
        RecoveryError: the ranks lack a state, a window or a log that the recovery needs. All ranks raise this error.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        *,
        context: RankContext,
        collectives: Collectives,
        carried: Carried | None,
        pp: dist.ProcessGroup,
        topology: Topology,
        placement: PlacementState | None,
        placed_from: int,
        copies: StateCopies | None,
    ) -> None:
        self._engine = engine
        self._copies = copies
        self._context = context
        self._collectives = collectives
        self._carried = carried
        self._topology = topology
        config, log = engine.config, engine.boundaries.log
        # With replicas, a rank may have copies of an owner's experts only. Then it has no copy of the owner's shard.
        is_whole = config.placement.algorithm is None
        kept_here = copies.kept if copies else ()
        owners = {kept.owner for kept in kept_here if is_whole or any(map(is_non_expert, kept.names))}
        held = (*self._units(context.rank, placement), *map(shard_unit, sorted(owners)))
        mine = Standing(
            stage=pp.rank(),
            iteration=None if carried is None else carried.host.iteration,
            is_overwritten=carried is not None and carried.digests is not None,
            is_copied=carried is not None and carried.before_replay is not None,
            has_whole_weights=carried is None or carried.has_whole_weights,
            window=None if carried is None else carried.kept,
            holds=() if carried is None else held,
            copy_plan="" if config.placement.state_copies is None else self._copy_plan(),
            placed_from=placed_from,
            has_first_generators=not engine.is_built or engine.first_generators == generators_digest(),
            logged=() if log is None else log.iterations,
            voted=() if log is None else tuple(sorted(log.votes)),
        )
        self._standings = [Standing.from_json(record) for record in collectives.gather(mine.to_json())]
        self.placement = self._share_placement(placement)
        """Placement of expert replicas after the target iteration, the same on all ranks; None without replicas."""
        needs = [self._units(rank, self.placement, needs_of) for rank in range(topology.world_size)]
        plan = LocalizedPlan.of(
            self._standings,
            num_stages=pp.size(),
            is_ring=config.parallel.virtual_pipeline_model_parallel_size is not None,
            needs=needs if config.recovery.may_use("living_state") else None,
            may_replay=config.recovery.may_use("localized_replay"),
        )
        if isinstance(plan, Declined):
            raise RecoveryError(f"generation {context.generation} cannot keep its layout: {plan.summary()}")
        self.plan = plan

    def _copy_plan(self) -> str | None:
        copies = self._engine.state_copies
        return None if self._carried is None or copies is None else copies.plan.digest

    def _units(
        self, rank: int, placement: PlacementState | None, units: Callable[..., tuple[str, ...]] = units_of
    ) -> tuple[str, ...]:
        config, topology = self._engine.config, self._topology
        stage, is_sharded = topology.coordinates(rank).pp, config.parallel.use_distributed_optimizer
        found = units(rank, topology, plan=placement and placement.plans[stage], is_sharded=is_sharded)
        if any(is_moe_layer(config.model, layer) for layer in topology.stage_layers(config.model.num_layers, stage)):
            return found
        return tuple(unit for unit in found if unit != experts_unit(rank, topology))

    def _share_placement(self, placement: PlacementState | None) -> PlacementState | None:
        if self._engine.config.placement.algorithm is None:
            return None
        first = next(rank for rank, standing in enumerate(self._standings) if standing.iteration is not None)
        shared = self._collectives.from_rank(first, None if placement is None else placement.to_json())
        return PlacementState.from_json(shared)

    def share(self) -> tuple[TrainState, dict[int, Vote], WindowPlan | None, adamw.GroupKeys]:
        """Broadcast four values of the rank ``LocalizedPlan.voter``, and return them: its ``TrainState``, its logged
        votes, its plan of windows (None if no windows are planned yet), and the keys of its parameter groups. The
        ``TrainState`` contains no random number generators: each rank restores its own, or the replay computes them."""
        # ``_standings`` is the same on all ranks, so they choose the same sender.
        first = self.plan.voter(self._standings)
        log, carried, mine = self._engine.boundaries.log, self._carried, None
        if carried is not None:
            mine = {
                "state": carried.host.to_json(own=False),
                "votes": [] if log is None else [vote.to_record() for vote in log.votes.values()],
                "plan": None if carried.plan is None else carried.plan.to_json(),
                "group_keys": self._engine.group_keys,
            }
        shared = self._collectives.from_rank(first, mine)
        votes = [Vote.from_record(record) for record in shared["votes"]]
        window_plan = None if shared["plan"] is None else WindowPlan.from_json(shared["plan"])
        group_keys = adamw.group_keys_from_json(shared["group_keys"])
        return TrainState.from_json(shared["state"]), {vote.iteration: vote for vote in votes}, window_plan, group_keys

    def recover(
        self,
        client: KeeperClient | None,
        votes: dict[int, Vote],
        window_plan: WindowPlan | None,
        *,
        open_restorer: Callable[[Collectives], SnapshotRestorer],
        break_with: Callable[[Abort], None],
        report: Callable[[Record], None],
        built: Built,
    ) -> StoredWindow | None:
        """Give this rank the state after the target iteration, and report its part of the recovery.

        Args:
            client: this rank's connection to the snapshot server; None in a job without windows.
            votes: logged votes, by iteration.
            window_plan: plan of the windows that are captured from now on.
            open_restorer: creates a ``SnapshotRestorer`` for the ranks of the given collectives.
            break_with: registers the function that breaks the connections of this rank.
            report: reports an event once for the job.
            built: what this rank has built for this recovery.

        Returns:
            The committed window, which must be kept until the next window is committed; None if there is none.

        Raises:
            RecoveryError: a replay computed another state than before the failure, or its window is missing. All ranks
                raise this error.
        """
        engine, context, plan, pp = self._engine, self._context, self.plan, self._engine.pg.pp
        began, started, forwards = time.time(), time.monotonic(), engine.num_forward_passes
        requests: list[Any] = []
        kept, error = None, None
        role = self._role
        # Receive state first, because a stage that receives state may also send its log to a stage that replays.
        received = self._receive(votes, window_plan, report)
        num_bytes, staged_bytes = received.num_bytes, received.staged_bytes
        try:
            region = plan.region_of(pp.rank())
            stages = [standing.stage for standing in self._standings]
            groups = _form_region_groups(engine, plan, stages, break_with=break_with)
            if region is None or groups is None:
                # Begin to send before this rank restores its own state, because the region waits for the messages.
                requests, served_bytes = self._serve()
                num_bytes += served_bytes
                kept = self._stay(client)
            else:
                self._copy_state()
                self._note_digests()
                # A replay cannot update copies of optimizer state, because ranks outside the region send no gradients.
                engine.end_copies()
                about = {"open_restorer": open_restorer, "report": report, "placement": self.placement}
                replay = _Region(engine, plan, region, groups, **about)
                replayed = replay.replay(votes, window_plan)
                num_bytes, staged_bytes, kept = replayed.num_bytes, replayed.staged_bytes, replayed.kept
                self._compare()
        except RecoveryError as failure:
            error = str(failure)
        # A rank that has failed takes part in this collective, too. Otherwise the other ranks would wait for it.
        error = self._collectives.errors(error)
        if error is not None:
            raise RecoveryError(f"generation {context.generation}: the localized replay failed: {error}")
        if self._carried is not None:
            self._carried.digests, self._carried.has_whole_weights = None, True
        # The sends read the memory of the log. Training must not overwrite this memory before the sends have ended.
        for request in requests:
            request.wait()
        replays = role == "replays"
        context.worker.report(
            StageRecovery(
                generation=context.generation,
                rank=context.rank,
                stage=pp.rank(),
                role=role,
                start_iteration=plan.window.start_iteration if replays and plan.window is not None else plan.target,
                iteration=plan.target,
                num_iterations=len(plan.iterations) if replays else 0,
                num_forward_passes=engine.num_forward_passes - forwards,
                bytes_moved=num_bytes,
                is_kept=built.built == "kept",
                built=built.built,
                why_built=built.why_built,
                build_seconds=built.seconds,
                state_bytes=state_bytes(engine.model_chunks, engine.optimizer),
                staged_bytes=staged_bytes,
                began_unix_seconds=began,
                seconds=time.monotonic() - started,
            ).to_record()
        )
        return kept

    @property
    def lacks_copies(self) -> bool:
        """Whether the ranks of this rank's stage must call ``TrainingEngine.keep_copies`` after ``recover``."""
        return self.plan.lacks_copies(self._standings[self._context.rank].stage, self._standings)

    @property
    def _role(self) -> str:
        plan, standing = self.plan, self._standings[self._context.rank]
        if plan.replays(standing.stage):
            return "replays"
        if not standing.has_state:
            return "receives"
        return "serves" if plan.serves(standing.stage) or standing.stage in plan.receiving else "waits"

    def _receive(
        self, votes: Mapping[int, Vote], window_plan: WindowPlan | None, report: Callable[[Record], None]
    ) -> Received:
        """Send tensors and ``TrainState`` of living ranks to ranks without state, in all stages that receive state."""
        engine, me = self._engine, self._context.rank
        if not self.plan.receiving:
            return Received()
        places = LivingPlaces(
            engine,
            self.plan,
            collectives=self._collectives,
            standings=self._standings,
            topology=self._topology,
            has_replicas=self.placement is not None,
            copies=self._copies,
        )
        received = places.fill()
        parts = self._topology.model_parts
        first = {part: rank for rank, part in reversed(list(enumerate(parts))) if self._standings[rank].has_state}
        is_sender = self._carried is not None and first.get(parts[me]) == me
        mine = self._carried.host.to_json(own=False) if is_sender and self._carried is not None else None
        hosts = self._collectives.gather(mine)
        if self._role == "receives":
            # Random number generators are not sent: all ranks of the stage have confirmed that their generators never
            # changed (``Standing.has_first_generators``). So a new process has the same generators as the lost process.
            engine.restore(TrainState.from_json(hosts[first[parts[me]]]))
            if window_plan is not None:
                keep_room(engine, window_plan, report)
            if engine.boundaries.log is not None:
                for vote in votes.values():
                    engine.boundaries.log.commit(vote)
        return received

    def _serve(self) -> tuple[list[Any], int]:
        engine = self._engine
        requests, num_bytes = [], 0
        for direction, _ in self.plan.serves(engine.pg.pp.rank()):
            log = engine.boundaries.log
            assert log is not None, "this rank must send its upstream log, but has none"
            rank = engine.p2p.next_rank if direction == "forward" else engine.p2p.prev_rank
            begun, size = serve(log, engine.pg.pp, direction, rank, self.plan.iterations)
            requests += begun
            num_bytes += size
        return requests, num_bytes

    def _stay(self, client: KeeperClient | None) -> StoredWindow | None:
        """Keep the state of this rank, whose stage does not replay. Return the newest committed window."""
        engine, key, stage = self._engine, self.plan.window, self._engine.pg.pp.rank()
        if self._role != "receives":
            assert self._carried is not None, "a rank outside the replaying regions has no state"
            engine.restore(self._carried.host)
        # If an iteration was finished after the failure, this rank has updated only its shard of the parameters. If one
        # rank must gather the other shards, all ranks of its stage must. Stages that receive state have gathered.
        is_whole = all(standing.has_whole_weights for standing in self._standings if standing.stage == stage)
        if not is_whole and stage not in self.plan.receiving:
            adamw.gather(engine.optimizer, engine.model_chunks)
        if key is None:
            return None
        assert client is not None, "a window is committed in a job without snapshots"
        return _stored(client, self._context.rank, key)

    def _copy_state(self) -> None:
        # If another rank is lost in the replay and no process replaces it, the job continues with fewer lanes from the
        # state of its living ranks. The replay is about to overwrite this state, so it is copied. The copy costs
        # memory. It is made only if this state is complete, and if the job may have fewer lanes.
        engine, carried, copies = self._engine, self._carried, self._copies
        config = engine.config
        is_sharded = config.parallel.use_distributed_optimizer
        if carried is None or carried.digests is not None or not config.may_change_layout or not self.plan.may_copy:
            return
        if is_sharded and copies is None:
            return
        state = take_state(engine.model_chunks, engine.optimizer)
        shards = None
        if is_sharded and copies is not None:
            shards = Shards.split_off(state, copies, self._topology.model_parts)
        carried.before_replay = (state, shards)

    def _note_digests(self) -> None:
        # Call this before a replay overwrites the tensors. After a replay that failed, keep the digests from before it.
        engine, carried = self._engine, self._carried
        if carried is not None and carried.digests is None:
            carried.digests = tensor_digests(engine.model_chunks, engine.optimizer)

    def _compare(self) -> None:
        """Raise RecoveryError if the state after the replay differs from this rank's state before the failure."""
        engine, carried = self._engine, self._carried
        if carried is None or carried.digests is None:
            return
        now = tensor_digests(engine.model_chunks, engine.optimizer)
        # Weights outside this rank's shard are compared only if they were up to date (``Carried.has_whole_weights``).
        names = [name for name in now if "/" in name or carried.has_whole_weights]
        other = [name for name in names if now[name] != carried.digests.get(name)]
        other += engine.train_state().differences(carried.host)
        if other:
            rank, shown = self._context.rank, ", ".join(other[:3])
            raise RecoveryError(
                f"rank {rank}: the state after the replay differs from the state before the failure in {len(other)} "
                f"tensors or fields, for example {shown}"
            )
