"""Finds, together with all other ranks, the state from which the job continues; verifies and replays it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_ft.config.identity import JobIdentity
from megatron_ft.errors import CheckpointError, ControlError, RecoveryError
from megatron_ft.events import Record, RecoveryStarted, SnapshotProblem, WindowReplayed
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.recovery.replay import open_replay
from megatron_ft.mcore.snapshot.local_window import CONFIG, LocalWindow
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.recovery.sources import RecoverySource, StoredWindow, choose_source
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.runtime.execute.replay import ReplayResult, carry_out
from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.snapshot.storage.checkpoints import is_named, iteration_of
from megatron_ft.snapshot.storage.rejected_windows import RejectedWindow, add_rejected, read_rejected, window_digest
from megatron_ft.snapshot.storage.run_settings import other_window
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Window
from megatron_ft.strict_json import parse_json

_Result = TypeVar("_Result")


class SnapshotRestorer:
    """Finds and restores the newest state. Public methods are collective over the ranks of ``collectives``.

    Args:
        collectives: collectives of all ranks, or of those of a few pipeline stages.
        client: connection to the node's snapshot server; None if the job takes no snapshots.
        folder: persisted windows; None if the run has none.
        topology: parallel sizes, as in manifests.
        run_dir: the run's folder, in which rank 0 records the rejected windows.
        identity: identity of this job; windows of other runs are not used, and newer ones with other settings end the
            start.
        settings: ``local_window.replay_config`` of this job.
        report: takes records; called on every rank.
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
        self._committed_buffer: int | None = None
        self._rejected: list[str] = []
        self._chosen_digest = ""
        self.chosen = RecoverySource(kind="nothing", iteration=0)
        """Result of ``find``, with the reasons for all sources that were not used."""
        self.unusable: tuple[str, ...] = ()
        """Reasons why ``find`` could not use windows with committed iterations; the same on every rank, and empty if
        ``find`` has found a window."""

    def find(self, checkpoint: Path | None, *, only: WindowKey | None = None) -> LocalWindow | None:
        """Find the newest window that every rank can load, verified; None if the checkpoint is at least as new.

        Damaged and previously rejected windows are reported and skipped.

        Args:
            checkpoint: the newest dense checkpoint that verifies.
            only: consider no other window.

        Raises:
            CheckpointError: the list of rejected windows cannot be read; or a window newer than the found state was
                captured by this run with other data, or with another model, optimizer or schedule.
        """
        if self._client is None and self._folder is None:
            return None
        mine = [asdict(window) for window in self._held_windows()]
        # From here on every rank computes with the same lists, and so takes the same decisions.
        everyone = self._collectives.gather([mine, self._other_settings])
        stored = [[StoredWindow.from_json(window) for window in windows] for windows, _ in everyone]
        other_settings: list[tuple[int, str]] = everyone[0][1]
        by_rank = [[window for window in windows if only in (None, window.key)] for windows in stored]
        at = None if checkpoint is None else iteration_of(checkpoint)
        reasons = [reason for last, reason in self._foreign if at is None or last > at]
        rejected = self._rejected_windows()
        while True:
            source = choose_source(by_rank, at, reasons=reasons)
            newer = [text for last, text in other_settings if last > source.iteration]
            if newer and only is None:
                raise CheckpointError(newer[-1])
            if not source.places:
                self._choose(source)
                if source.kind == "nothing":
                    self._note_unusable(reasons)
                return None
            # Ranks open their parts alone, and must then agree: if one part is bad, all ranks try the next source.
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
            # By content: a window that was captured again under the same name may be sound.
            self._chosen_digest = window_digest(self._collectives.gather(window.digest))
            rejection = rejected.get(self._chosen_digest)
            if rejection is None:
                self._choose(source)
                return window
            for windows, place in zip(by_rank, source.places, strict=True):
                windows.remove(place)
            text = (
                f"{source.kind} window of iteration {rejection.start_iteration}: was rejected before: "
                f"{rejection.reason}"
            )
            if text not in self._rejected:  # each copy in memory is the same window
                self._rejected.append(text)
                reasons.append(text)

    def choose_nothing(self, reason: str) -> None:
        """Record that the job starts at iteration 0, and the reason why it continues from no saved state."""
        self._choose(RecoverySource(kind="nothing", iteration=0, declined=(reason,)))

    def report_start(self, checkpoint: Path | None, generation: int) -> None:
        """Report the state from which ranks continue, the chosen window or ``checkpoint``; a new run reports
        nothing."""
        chosen, strategy, iteration = self.chosen, "nothing", 0
        if chosen.places:
            strategy, iteration = "window", chosen.iteration
        elif checkpoint is not None:
            strategy, iteration = "checkpoint", iteration_of(checkpoint) if is_named(checkpoint) else 0
        if strategy != "nothing" or chosen.declined or generation > 0:
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
        """Turn ``window`` into the dense state of ``engine``, which was just built for the window's placement.

        Raises:
            RecoveryError: the window was captured with other element ranges, or a replayed iteration differs. Then the
                state of ``engine`` is unusable, and the window is recorded as rejected, so that another start chooses
                an older source.
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

    def set_aside_later(self, iteration: int, *, is_new_job: bool) -> None:
        """Rename persisted windows of other runs, and windows after ``iteration`` that may be written again: by another
        job, or by this one if it resumes from before a rejected window."""

        def rename(folder: WindowFolder) -> None:
            folder.set_aside(self._other_runs)
            self._other_runs = []
            if is_new_job or self._rejected:
                folder.set_aside_from(iteration + 1)

        folder = self._folder
        self._on_first(lambda: None if folder is None else rename(folder))

    def _on_first(self, work: Callable[[], _Result]) -> _Result | None:
        # Do ``work`` on rank 0 and return its result there; its CheckpointError is raised on every rank.
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
        # A window that some rank never finished to write is not among them: it was never complete.
        everywhere = self._collectives.gather([*reasons, *self._damaged])
        self.unusable = tuple(dict.fromkeys(reason for found in everywhere for reason in found))

    def _carry_out(self, engine: TrainingEngine, window: LocalWindow) -> ReplayResult:
        return carry_out(window.replay_plan(), open_replay(engine, window, self._collectives))

    def _rejected_windows(self) -> dict[str, RejectedWindow]:
        rejected = self._on_first(lambda: read_rejected(self._run_dir))
        known = self._collectives.from_first([asdict(window) for window in rejected or ()])
        return {window.digest: window for window in map(RejectedWindow.from_json, known)}

    def _reject(self, window: LocalWindow, reason: str) -> None:
        # Record the window as rejected, so that no later start tries it; no rank ends before that is on disk.
        key = window.window.key
        if self._collectives.rank == 0:
            self._report_problem("replay", f"window of iteration {key.start_iteration}: {reason}")
        rejection = RejectedWindow(**asdict(key), digest=self._chosen_digest, reason=reason)
        try:
            self._on_first(lambda: add_rejected(self._run_dir, rejection))
        except CheckpointError as error:
            raise CheckpointError(
                f"{reason}; this rejection could not be recorded in the run folder: {error}"
            ) from error

    def _choose(self, source: RecoverySource) -> None:
        source.validate()
        self.chosen = source

    def _report_problem(self, what: str, error: str) -> None:
        self._report(SnapshotProblem(iteration=0, node=self._node, what=what, error=error))

    def _held_windows(self) -> list[StoredWindow]:
        found = [] if self._client is None else self._client.inventory(self._rank, ask_peers=True)
        self._damaged = [
            f"window of iteration {window.start_iteration} in memory of node {window.node}: was committed, but "
            "some ranks no longer have it"
            for window in found
            if window.committed
        ]
        own = [window.buffer for window in found if window.committed and self._is_in_arena(window)]
        self._committed_buffer = own[0] if own else None
        return [*found, *self._persisted_windows()]

    def _is_in_arena(self, window: StoredWindow) -> bool:
        return window.where == "own" and window.node == self._node

    def _persisted_windows(self) -> list[StoredWindow]:
        # Return this rank's readable files with this job's layout; others are reported or noted.
        found = []
        self._other_runs, self._other_settings = [], []
        for stored in [] if self._folder is None else self._folder.list_windows():
            try:
                with self._folder.open(stored, self._rank) as opened:  # type: ignore[union-attr]
                    window = opened.window
                other = self._other_run(window)
                settings = other_window(window, opened.path, self._identity.settings)
            except CheckpointError as error:
                self._report_problem("load persisted", str(error))
                if not isinstance(error.__cause__, FileNotFoundError):  # a missing file was perhaps never written
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
        # Open and verify this rank's part; return it, or the problem with it.
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
            raise CheckpointError(f"persisted window of iteration {place.start_iteration}: was deleted in the meantime")
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
        """Check that this job can replay a window exactly. Raises CheckpointError with the difference."""
        difference = self._difference(window) or self._other_key(window)
        if difference is not None:
            raise CheckpointError(f"{where}: {difference}")

    def _difference(self, window: Window) -> str | None:
        # Return the difference in run or layout between the window and this job; None without.
        if (other := self._other_run(window)) is not None:
            return other
        if window.rank != self._rank:
            return f"belongs to rank {window.rank}"
        before, now = window.topology, self._topology
        changed = [
            f"{name} {before.get(name)}, now {now[name]}" for name in sorted(now) if before.get(name) != now[name]
        ]
        if not changed:
            return None
        return (
            f"was captured with another layout ({', '.join(changed)}); start the run once with that layout, on as "
            "many nodes as you like, and continue from the dense checkpoint that it saves"
        )

    def _other_run(self, window: Window) -> str | None:
        run_id, version = window.run_id, window.format_version
        return self._identity.not_of_run(run_id=run_id, run_name="of another name", format_version=version)

    def _other_key(self, window: Window) -> str | None:
        # With another value of any of these keys a replay would compute another state.
        before = parse_json(window.slices[0].header.get(CONFIG, "{}"))
        now = self._settings
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if not changed:
            return None
        key = changed[0]
        return f"was trained with {key}={before.get(key)!r}, but this job has {now.get(key)!r}"
