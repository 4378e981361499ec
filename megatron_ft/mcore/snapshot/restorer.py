"""Finds the newest window (snapshot) that all ranks can load, verifies it and replays it."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_ft.config.identity import JobIdentity
from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import CheckpointError, ControlError, RecoveryError
from megatron_ft.events import ExpertUpdatesLost, Record, RecoveryStarted, SnapshotProblem, WindowReplayed
from megatron_ft.mcore.groups import Collectives
from megatron_ft.mcore.snapshot.expert_levels import take_newer_experts
from megatron_ft.mcore.snapshot.local_window import CONFIG, LocalWindow, Replayer, ReplayResult, carry_out
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.recovery.sources import RecoverySource, StoredWindow
from megatron_ft.planning.snapshot.lost_tokens import Rows
from megatron_ft.planning.snapshot.memory import PeerAssignment
from megatron_ft.planning.snapshot.partial_experts import planned_tokens, stores_fewer_experts
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.snapshot.storage.checkpoints import is_named, iteration_of
from megatron_ft.snapshot.storage.run_settings import other_window
from megatron_ft.snapshot.storage.window_folder import RejectedWindow, WindowFolder, persist_url, window_digest
from megatron_ft.snapshot.window import Window

SNAPSHOT_SERVICE = "keeper"
_Result = TypeVar("_Result")


def open_client(
    config: JobConfig,
    context: RankContext,
    nodes: Sequence[int],
    *,
    assignment: PeerAssignment,
    topology: Mapping[str, Any],
    run_id: str,
) -> KeeperClient:
    """Connect to the snapshot server of this rank's node. ``snapshot.policy`` must not be null.

    Args:
        nodes: node number of each rank.
        assignment: the nodes that store copies of each node's windows.
        topology: parallel sizes of this membership, as JSON values.

    Raises:
        ControlError: the snapshot server does not answer, or refuses this rank.
    """
    service = context.sidecars[SNAPSHOT_SERVICE]
    # Nodes have the same order as in ``config_of``.
    present = list(dict.fromkeys(nodes)) if config.recovery.keep_layout else sorted(set(nodes))
    peers = assignment.peers[present.index(context.node)]
    hello = {
        "token": service["token"],
        "rank": context.rank,
        "world_size": context.world_size,
        "node": context.node,
        # The server may have windows of an earlier job, so generations of windows rise over all jobs of the run.
        "generation": int(service.get("first_generation", 0)) + context.generation,
        "run_id": run_id,
        "topology": topology,
        "peers": service["addresses"],
        "peer_nodes": [present[peer] for peer in peers],
        "persist_every": 0 if stores_fewer_experts(config) else config.snapshot.persist_interval_windows,
        "persist_url": persist_url(config, context.run_dir),
        "num_persisted": config.snapshot.keep_persisted,
        "send_gradients": bool((config.snapshot.policy or {}).get("send_gradients")),
    }
    return KeeperClient(service["socket"], hello=hello)


class SnapshotRestorer:
    """Finds and restores the newest window. All ranks of ``collectives`` must make the same calls.

    Args:
        run_dir: run folder, in which rank 0 records the rejected windows.
        identity: identity of this job. Windows of other runs are skipped. A window of this run with other settings is
            an error if it is newer than the state that ``find`` chooses.
        topology: parallel sizes of this job, to compare with those in a window.
        settings: ``local_window.replay_config`` of this job.
        collectives: collectives of the ranks that restore: of the whole job, or of the pipeline stages that replay.
        client: connection to the snapshot server of this node; None if the job captures no windows.
        folder: folder of persisted windows; None if persisted windows are not used.
        report: sends an event to the sinks; called on every rank.
    """

    def __init__(
        self,
        *,
        rank: int,
        node: int,
        run_dir: Path,
        identity: JobIdentity,
        topology: dict[str, int],
        settings: dict[str, Any],
        collectives: Collectives,
        client: KeeperClient | None,
        folder: WindowFolder | None,
        report: Callable[[Record], None],
    ) -> None:
        self._rank = rank
        self._node = node
        self._run_dir = run_dir
        self._identity = identity
        self._topology = topology
        self._settings = settings
        self._collectives = collectives
        self._client = client
        self._folder = folder
        self._report = report
        self._foreign: list[tuple[int, str]] = []
        self._other_runs: list[WindowKey] = []
        self._other_settings: list[tuple[int, str]] = []
        self._damaged: list[str] = []
        self._in_memory: list[StoredWindow] = []
        self._committed_buffer: int | None = None
        self._rejected: list[str] = []
        self._chosen_digest = ""
        self.chosen = RecoverySource(kind="nothing", iteration=0)
        """Source of the state that ``find`` has chosen, with the reasons why newer states were not used."""
        self.unusable: tuple[str, ...] = ()
        """Reasons why no window was usable, the same on all ranks; empty if ``find`` chose a window or checkpoint."""

    def find(self, checkpoint: Path | None, *, only: WindowKey | None = None) -> LocalWindow | None:
        """Find the newest window that every rank can load, verify it, and return this rank's part. Return None if there
        is no such window, or if ``checkpoint`` is at least as new.

        Damaged windows, and windows that an earlier start rejected, are skipped and reported.

        Args:
            checkpoint: newest checkpoint that was verified; None if there is no checkpoint.
            only: key of the only window to consider; None to consider all windows.

        Raises:
            CheckpointError: the list of rejected windows cannot be read. Or a window of this run is newer than the
                found state, but was captured with other data, or another model, optimizer or schedule.
        """
        if self._client is None and self._folder is None:
            return None
        mine = [asdict(window) for window in self._held_windows()]
        # After this gather all ranks have the same lists, so they take the same decisions.
        unreachable = [] if self._client is None else self._client.unreachable
        everyone = self._collectives.gather([mine, self._other_settings, unreachable])
        stored = [[StoredWindow.from_json(window) for window in windows] for windows, *_ in everyone]
        silent = dict.fromkeys(text for *_, texts in everyone for text in texts)
        other_settings: list[tuple[int, str]] = everyone[0][1]
        by_rank = [[window for window in windows if only in (None, window.key)] for windows in stored]
        at = None if checkpoint is None else iteration_of(checkpoint)
        reasons = [reason for last, reason in self._foreign if at is None or last > at]
        rejected = self._rejected_windows()
        while True:
            source = RecoverySource.choose(by_rank, at, reasons=reasons, unreachable=silent)
            newer = [text for last, text in other_settings if last > source.iteration]
            if newer and only is None:
                raise CheckpointError(newer[-1])
            if not source.places:
                self._choose(source)
                if source.kind == "nothing":
                    self._note_unusable(reasons)
                return None
            # Each rank opens its own part. If one part is damaged, all ranks must try the next source together.
            window, error = self._open(source)
            if error is not None:
                self._report_problem(f"load {source.kind}", error)
            errors = self._collectives.gather(error)
            for rank, text in enumerate(errors):
                if text is not None:
                    by_rank[rank].remove(source.places[rank])
                    reasons.append(f"{source.kind} window, rank {rank}: {text}")
            if any(errors):
                continue
            assert window is not None, "no window was opened, and no error was reported"
            # Recognize rejected windows by content, because a job may have captured a new window with the same key.
            self._chosen_digest = window_digest(self._collectives.gather(window.digest))
            rejection = rejected.get(self._chosen_digest)
            if rejection is None:
                self._choose(source)
                return self._with_newer_experts(window)
            for windows, place in zip(by_rank, source.places, strict=True):
                windows.remove(place)
            text = (
                f"{source.kind} window of iteration {rejection.start_iteration} was rejected by an earlier start: "
                f"{rejection.reason}"
            )
            if text not in self._rejected:  # copies of the same window give the same text
                self._rejected.append(text)
                reasons.append(text)

    def _with_newer_experts(self, window: LocalWindow) -> LocalWindow:
        # If the memory of some ranks is lost, other ranks may have newer states of their experts than the file.
        if self.chosen.kind != "persisted" or window.at_risk is None:
            return window
        key = window.window.key
        found = [held for held in self._in_memory if held.complete and held.generation == key.generation]
        in_memory = []
        # A rank has at most three windows. Use the nearest copy of each window.
        for start in sorted({held.start_iteration for held in found}):
            place = min(
                (held for held in found if held.start_iteration == start),
                key=lambda held: (not self._is_in_arena(held), held.where, held.node),
            )
            try:
                local = self._fetch(place)
                if local.window.num_slices == 1:
                    in_memory.append((local.window, local.slices[0]))
            except (CheckpointError, ControlError, OSError) as error:
                self._report_problem("load memory", str(error))
        try:
            return take_newer_experts(window, in_memory, self._collectives)
        except RecoveryError as error:
            self._report_problem("load memory", str(error))
            return window

    def choose_nothing(self, reason: str) -> None:
        """Record that the job starts at iteration 0, and the ``reason`` why no saved state is used."""
        self._choose(RecoverySource(kind="nothing", iteration=0, declined=(reason,)))

    def report_start(self, checkpoint: Path | None, generation: int) -> None:
        """Report the state from which the run continues: the chosen window, or otherwise ``checkpoint``. Report nothing
        for a new run that had no saved state."""
        chosen, strategy, iteration = self.chosen, "start_over", 0
        if chosen.places:
            strategy, iteration = "rollback", chosen.iteration
        elif checkpoint is not None:
            strategy, iteration = "checkpoint", iteration_of(checkpoint) if is_named(checkpoint) else 0
        if strategy != "start_over" or chosen.declined or generation > 0:
            self._report(
                RecoveryStarted(
                    generation=generation,
                    strategy=strategy,
                    iteration=iteration,
                    source=chosen.kind if chosen.places else None,
                    declined=chosen.declined,
                )
            )

    def replay(self, engine: TrainingEngine, window: LocalWindow) -> None:
        """Load ``window`` into ``engine``, which was just built for the window's placement, and replay its iterations.

        Raises:
            RecoveryError: the window has other element ranges of the parameters than the ranks, or a replayed iteration
                has other results than its vote. Then the state of ``engine`` is unusable. The window is recorded as
                rejected, so the next start chooses an older state.
        """
        began = time.monotonic()
        try:
            result = self._carry_out(engine, window)
        except RecoveryError as error:
            self._reject(window, str(error))
            raise
        self._report(
            WindowReplayed(
                iteration=result.final_iteration,
                start_iteration=window.window.start_iteration,
                num_iterations=result.num_iterations,
                seconds=time.monotonic() - began,
            )
        )
        if window.at_risk is not None:
            self._report_lost(engine, window.at_risk, window.from_memory)

    def _report_lost(self, engine: TrainingEngine, lost: Rows, from_memory: Collection[tuple[int, int]]) -> None:
        tokens = engine.history.tokens
        assert tokens is not None, "the tokens of experts were not counted"
        in_memory = sum(lost[row][number] for row, number in from_memory)
        self._report(
            ExpertUpdatesLost(
                iteration=engine.iteration,
                num_experts=sum(number > 0 for row in lost for number in row),
                num_tokens=sum(map(sum, lost)),
                num_stored_tokens=sum(map(sum, lost)) - in_memory if self.chosen.kind == "persisted" else 0,
                num_memory_experts=len(from_memory),
                lost_share=tokens.lost_share(planned_tokens(engine.config)),
                momentary_lost_tokens=tokens.momentary(lost),
            )
        )

    def set_aside_later(self, iteration: int, *, is_new_job: bool) -> None:
        """Rename persisted windows that must not be used again, so that this job can write windows with the same names:
        all windows of other runs and, if the job is new or a window was rejected, all windows after ``iteration``."""

        def rename(folder: WindowFolder) -> None:
            folder.set_aside(self._other_runs)
            self._other_runs = []
            if is_new_job or self._rejected:
                folder.set_aside_from(iteration + 1)

        folder = self._folder
        self._on_first(lambda: None if folder is None else rename(folder))

    def _on_first(self, work: Callable[[], _Result]) -> _Result | None:
        # Runs ``work`` on rank 0 and returns its result there. If ``work`` raises CheckpointError, all ranks raise it.
        result = error = None
        if self._collectives.rank == 0:
            try:
                result = work()
            except CheckpointError as failure:
                error = str(failure)
        error = self._collectives.errors(error)
        if error is not None:
            raise CheckpointError(error)
        return result

    def _note_unusable(self, reasons: Sequence[str]) -> None:
        # ``_damaged`` lacks windows that were never completely written, because these were never usable.
        everywhere = self._collectives.gather([*reasons, *self._damaged])
        self.unusable = tuple(dict.fromkeys(reason for found in everywhere for reason in found))

    def _carry_out(self, engine: TrainingEngine, window: LocalWindow) -> ReplayResult:
        return carry_out(window.replay_plan(), Replayer.open(engine, window, self._collectives))

    def _rejected_windows(self) -> dict[str, RejectedWindow]:
        rejected = self._on_first(lambda: RejectedWindow.read_all(self._run_dir))
        known = self._collectives.from_first([asdict(window) for window in rejected or ()])
        return {window.digest: window for window in map(RejectedWindow.from_json, known)}

    def _reject(self, window: LocalWindow, reason: str) -> None:
        # Records the window as rejected, so that no later start tries it. All ranks wait until the record is on disk.
        key = window.window.key
        if self._collectives.rank == 0:
            self._report_problem("replay", f"window of iteration {key.start_iteration}: {reason}")
        rejection = RejectedWindow(**asdict(key), digest=self._chosen_digest, reason=reason)
        try:
            self._on_first(lambda: rejection.add_to(self._run_dir))
        except CheckpointError as error:
            raise CheckpointError(
                f"{reason}; this window could not be recorded as rejected in the run folder, so the next start will "
                f"try it again: {error}"
            ) from error

    def _choose(self, source: RecoverySource) -> None:
        source.validate()
        self.chosen = source

    def _report_problem(self, what: str, error: str) -> None:
        self._report(SnapshotProblem(iteration=0, node=self._node, what=what, error=error))

    def _held_windows(self) -> list[StoredWindow]:
        found = [] if self._client is None else self._client.inventory(self._rank, ask_peers=True)
        self._damaged = [
            f"window of iteration {window.start_iteration} in the memory of node {window.node}: it was committed, but "
            "the parts of some ranks are lost"
            for window in found
            if window.committed
        ]
        own = [window.buffer for window in found if window.committed and self._is_in_arena(window)]
        self._committed_buffer = own[0] if own else None
        self._in_memory = found
        return [*found, *self._persisted_windows()]

    def _is_in_arena(self, window: StoredWindow) -> bool:
        return window.where == "own" and window.node == self._node

    def _persisted_windows(self) -> list[StoredWindow]:
        # Returns this rank's persisted windows that this job can load. Reports windows that cannot be read. Records why
        # the other windows cannot be loaded, for ``find``.
        found = []
        self._other_runs, self._other_settings = [], []
        for stored in [] if self._folder is None else self._folder.list_windows():
            try:
                with self._folder.open(stored, self._rank) as opened:  # type: ignore[union-attr]
                    window = opened.window
                other = self._other_run(window)
                own = self._identity
                settings = other_window(window, opened.path, own.settings, allowed=own.allow_change)
            except CheckpointError as error:
                self._report_problem("load persisted", str(error))
                if not isinstance(error.__cause__, FileNotFoundError):  # this file may never have been written
                    self._damaged.append(str(error))
                continue
            if other is not None:
                self._other_runs.append(stored)
            elif settings is not None:
                self._other_settings.append((window.last_iteration, settings))
                continue
            difference = other or self._difference(window)
            if difference is not None:
                where = f"persisted window of iteration {window.start_iteration}"
                self._foreign.append((window.last_iteration, f"{where}: {difference}"))
                continue
            slices = window.num_slices
            found.append(StoredWindow(**asdict(stored), num_slices=slices, num_held=slices, where="persisted"))
        return found

    def _open(self, source: RecoverySource) -> tuple[LocalWindow | None, str | None]:
        # Opens and verifies this rank's part of the window. Returns the part, or the problem with it.
        place = source.places[self._collectives.rank]
        try:
            window = self._read(place) if place.where == "persisted" else self._fetch(place)
            window.replay_plan()
            return window, None
        except (CheckpointError, ControlError, OSError, RecoveryError) as error:
            return None, str(error)

    def _read(self, place: StoredWindow) -> LocalWindow:
        assert self._folder is not None, "there is no folder of persisted windows"
        if place.key not in self._folder.list_windows():
            raise CheckpointError(
                f"persisted window of iteration {place.start_iteration} was deleted while this rank was starting"
            )
        with self._folder.open(place.key, self._rank) as opened:
            self._check(opened.window, opened.path)
            opened.verify()
            slices = tuple(opened.read_slice(index) for index in range(opened.window.num_slices))
        return LocalWindow(window=opened.window, slices=slices, stored=replace(place, buffer=self._committed_buffer))

    def _fetch(self, place: StoredWindow) -> LocalWindow:
        assert self._client is not None, "there is no snapshot client"
        window, payload = self._client.fetch(self._rank, place.key, node=place.node)
        where = f"window of iteration {place.start_iteration} on node {place.node}"
        self._check(window, where)
        slices = tuple(payload[part.offset : part.end] for part in window.slices)
        for part, content in zip(window.slices, slices, strict=True):
            part.check_payload(content, where)
        if not self._is_in_arena(place):
            place = replace(place, where="copy", buffer=self._committed_buffer)
        return LocalWindow(window=window, slices=slices, stored=place)

    def _check(self, window: Window, where: str) -> None:
        """Check that this job can replay ``window`` with the same results. Raises CheckpointError if it cannot."""
        difference = self._difference(window) or self._other_key(window)
        if difference is not None:
            raise CheckpointError(f"{where}: {difference}")

    def _difference(self, window: Window) -> str | None:
        # Returns the difference between the window and this job in run, rank or layout, or None.
        if (other := self._other_run(window)) is not None:
            return other
        if window.rank != self._rank:
            return f"it belongs to rank {window.rank}, not to rank {self._rank}"
        before, now = window.topology, self._topology
        changed = [
            f"{name} {before.get(name)}, now {now[name]}" for name in sorted(now) if before.get(name) != now[name]
        ]
        if not changed:
            return None
        return (
            f"it was captured with another layout ({', '.join(changed)}); to use it, start the run once with that "
            "layout, on any number of nodes, and continue from the checkpoint that this run saves"
        )

    def _other_run(self, window: Window) -> str | None:
        run_id, version = window.run_id, window.format_version
        return self._identity.not_of_run(run_id=run_id, run_name="of another name", format_version=version)

    def _other_key(self, window: Window) -> str | None:
        # Describes the first configuration key whose value differs, or returns None if the values are equal.
        before = parse_json(window.slices[0].header.get(CONFIG, "{}"))
        now = self._settings
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if not changed:
            return None
        key = changed[0]
        return (
            f"it was captured with {key}={before.get(key)!r}, but this job has {now.get(key)!r}; only a job with the "
            "same value can replay it"
        )
