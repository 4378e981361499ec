"""Saves and loads dense checkpoints of a job."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from megatron_ft.config.checkpoint import CheckpointConfig
from megatron_ft.config.identity import JobIdentity
from megatron_ft.errors import CheckpointError
from megatron_ft.events import CheckpointFailed, CheckpointLoaded, CheckpointSaved
from megatron_ft.mcore.checkpoint.committing import COMMON_NAME, commit_files, software, torch_bytes
from megatron_ft.mcore.checkpoint.finding import CheckpointFinder
from megatron_ft.mcore.checkpoint.loading import load_shards
from megatron_ft.mcore.checkpoint.optimizer_state import SHARDING_METADATA
from megatron_ft.mcore.checkpoint.state import (
    OURS_KEY,
    RANK_STATE_KEY,
    DenseState,
    build_shards,
    common_state,
    install,
    rank_state,
)
from megatron_ft.mcore.checkpoint.writer import Planner, WriteJob
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.planning.retention import RetentionPolicy
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.files import FileEntry
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Result of a load."""

    iteration: int
    """Last iteration in the checkpoint."""
    rng_restored: bool
    """Whether every rank restored its generators; False with another layout, where they keep their seeded state."""
    manifest: Manifest | None
    """None for a checkpoint of another project."""


@dataclass(kw_only=True)
class _Pending:
    """A save in progress."""

    iteration: int
    consumed_samples: int
    directory: Path
    job: WriteJob
    started: float
    blocked_seconds: float


class CheckpointManager:
    """Saves in the background, completes a save when all ranks have written, and loads.

    All methods are collective over ``group`` (the whole job) and are called by every rank in the same order. A save
    that fails on any rank is reported as ``checkpoint_failed``, its directory is removed, and training continues;
    earlier checkpoints do not change.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        run_dir: Path,
        identity: JobIdentity,
        topology_record: dict[str, int],
        group: dist.ProcessGroup,
        dp_cp_group: dist.ProcessGroup,
        report: Callable[[dict[str, Any]], None],
        generation: int = 0,
    ) -> None:
        """``dp_cp_group``: ranks with the same dense weights. ``report`` is called with records on rank 0."""
        self.folder = run_dir / "checkpoints"
        self._config = config
        self._identity = identity
        self._topology = dict(topology_record)
        self._collectives = Collectives(group)
        self._dp_cp_group = dp_cp_group
        self._report = report
        self._generation = generation
        self._planner = Planner(dp_cp_group, fully_parallel=config.fully_parallel)
        self._retention = RetentionPolicy(
            keep_last=config.keep_last, keep_every_iterations=config.keep_every_iterations
        )
        self._pending: _Pending | None = None
        self._resumed_from: str | None = None
        self._finder = CheckpointFinder(
            self._collectives, identity, self._say_failed, allow_other_data=config.allow_other_data
        )
        self.last_saved_iteration: int | None = None
        """Iteration of the newest checkpoint that this manager completed or loaded."""

    @property
    def pending_iteration(self) -> int | None:
        """Iteration of the save in progress; None if there is none."""
        return None if self._pending is None else self._pending.iteration

    # -- saving

    def save(self, state: DenseState, iteration: int) -> None:
        """Start to save ``state`` as it is now; wait for the end unless ``checkpoint.async_save``.

        Before that, a save in progress is finished, and all writing for an abandoned save has ended.
        """
        assert iteration == state.host.iteration, (
            f"cannot save the state of iteration {state.host.iteration} as iteration {iteration}"
        )
        self.finish()
        started = time.monotonic()
        self._await_given_up()
        directory = self._open_directory(iteration)
        if directory is None:
            return
        job = self._start(state, directory)
        self._pending = _Pending(
            iteration=iteration,
            consumed_samples=state.consumed_samples,
            directory=directory,
            job=job,
            started=started,
            blocked_seconds=time.monotonic() - started,
        )
        if not self._config.async_save:
            self.finish()

    def poll(self) -> None:
        """Complete a save whose writing has ended on all ranks; returns at once otherwise."""
        # Every rank has the same save pending: all enter this collective, and all commit after the same iteration.
        if self._pending is not None and self._collectives.all(self._pending.job.done):
            self._complete(self._pending)

    def finish(self) -> None:
        """Wait for the save in progress, if any, and complete it."""
        if self._pending is not None:
            began = time.monotonic()
            self._pending.job.wait()
            self._pending.blocked_seconds += time.monotonic() - began
            self._complete(self._pending)

    def abandon(self) -> Path | None:
        """Abandon the save in progress, if any, without communication and without waiting for storage.

        It gets no manifest from here on. The next save of this process waits until all writing for the abandoned one
        has ended, and removes its files.

        Returns:
            Directory of the save. It is complete if rank 0 had written the manifest before ranks were lost.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.job.give_up()
        return pending.directory

    def _await_given_up(self) -> None:
        # Wait until no rank writes for an abandoned save, because that may use the folder that is about to be created
        # again.
        WriteJob.await_given_up()
        # A barrier: once every rank is here, no thread of any rank writes for the abandoned save.
        self._collectives.all(True)

    def _open_directory(self, iteration: int) -> Path | None:
        name: str | None = None
        error: str | None = None
        if self._collectives.rank == 0:
            try:
                name = checkpoints.start_directory(self.folder, iteration).name
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
        name, error = self._collectives.from_first([name, error])
        if error is not None:
            self._say_failed(iteration, self.folder / checkpoints.directory_name(iteration), error)
            return None
        return self.folder / name

    def _start(self, state: DenseState, directory: Path) -> WriteJob:
        metadata = self._metadata()
        # A process group cannot be stored.
        content_metadata = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
        tree = {
            **build_shards(state, metadata, is_loading=False),
            **common_state(state),
            RANK_STATE_KEY: rank_state(state.host),
            "content_metadata": content_metadata,
        }
        # Megatron's check would gather the metadata of all tensors as pickled objects at every save.
        shards, common = save_preprocess(tree, validate_access_integrity=False)
        whole_files = {}
        if self._collectives.rank == 0:
            whole_files[COMMON_NAME] = torch_bytes(common)
        return WriteJob(self._planner.plan(shards, directory), directory, whole_files)

    def _metadata(self) -> dict[str, Any]:
        return {
            **SHARDING_METADATA,
            "dp_cp_group": self._dp_cp_group,
            # One stored tensor for each expert, so that ranks may hold any subset of them.
            "singleton_local_shards": True,
            "non_homogeneous_layers": True,
        }

    def _complete(self, pending: _Pending) -> None:
        began = time.monotonic()
        error = self._collectives.errors(pending.job.error)
        if error is None:
            written = self._collectives.gather(
                {"results": pending.job.results, "entries": [asdict(entry) for entry in pending.job.entries]}
            )
            error, num_bytes = self._commit(pending, written)
        # Only now: where ranks are lost in a collective above, the save is still pending, and is reported as abandoned.
        self._pending = None
        if error is not None:
            self._discard(pending, error)
            return
        self.last_saved_iteration = pending.iteration
        self._tell(
            CheckpointSaved(
                iteration=pending.iteration,
                path=str(pending.directory),
                num_bytes=num_bytes,
                seconds=time.monotonic() - pending.started,
                blocked_seconds=pending.blocked_seconds + time.monotonic() - began,
            ).to_record()
        )
        # Only after the commit: until then the checkpoints before are all there is.
        if self._collectives.rank == 0:
            self._clean(pending)

    def _commit(self, pending: _Pending, written: list[dict[str, Any]]) -> tuple[str | None, int]:
        # Complete the save: rank 0 writes the remaining files, the manifest last; all ranks receive the result.
        error, num_bytes = None, 0
        if self._collectives.rank == 0:
            try:
                num_bytes = commit_files(
                    pending.directory, pending.job.planned, written, partial(self._manifest, pending)
                )
                checkpoints.move_latest(self.folder, pending.directory, pending.iteration)
            except OSError as failure:
                error = f"rank 0: {type(failure).__name__}: {failure}"
        error, num_bytes = self._collectives.from_first([error, num_bytes])
        return error, num_bytes

    def _manifest(self, pending: _Pending, files: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(
            run_id=self._identity.run_id,
            run_name=self._identity.run_name,
            generation=self._generation,
            topology=self._topology,
            iteration=pending.iteration,
            consumed_samples=pending.consumed_samples,
            settings=self._identity.settings,
            software=software(),
            files=files,
        )

    def _discard(self, pending: _Pending, error: str) -> None:
        # With a manifest the checkpoint is complete, and only ``latest`` could not be moved: the files stay.
        if self._collectives.rank == 0 and not (pending.directory / MANIFEST_NAME).exists():
            try:
                checkpoints.delete(pending.directory)
            except OSError as failure:
                error += f"; its directory could not be removed: {failure}"
        self._say_failed(pending.iteration, pending.directory, error)

    def _clean(self, pending: _Pending) -> None:
        # Apply the retention policy. A failed deletion costs only space, so it is just reported.
        try:
            checkpoints.sweep(self.folder, before_iteration=pending.iteration)
            stored = [entry for entry in checkpoints.list_checkpoints(self.folder) if entry.complete]
            names = [(entry.iteration, entry.path.name) for entry in stored]
            for name in self._retention.removable(names, in_use=self._in_use([name for _, name in names])):
                checkpoints.delete(self.folder / name)
        except OSError as failure:
            self._say_failed(
                pending.iteration, pending.directory, f"saved, but older checkpoints could not be removed: {failure}"
            )

    def _in_use(self, complete: list[str]) -> tuple[str, ...]:
        """The checkpoint that this run resumed from, until two newer ones are complete; ``complete``: oldest first."""
        # It is the only one that has been read. If the first newer one is damaged on disk, a restart needs it.
        return tuple(name for name in complete[-2:] if name == self._resumed_from)

    # -- loading

    def newest(self, folder: Path | None = None) -> Path | None:
        """Find the newest checkpoint in ``folder`` (default: of this run) that verifies and belongs to this run; None
        if there is none.

        Damaged newer ones are reported and renamed.

        Raises:
            CheckpointError: it was written with other data, or with another model, optimizer or schedule than the job
                has.
        """
        return self._finder.newest(folder or self.folder)

    @property
    def foreign(self) -> tuple[str, ...]:
        """Return the reasons why checkpoints of other runs were skipped, one for each."""
        return tuple(self._finder.foreign.values())

    def set_foreign_aside(self) -> None:
        """Rename the checkpoints that ``newest`` has found to belong to other runs, and report them."""
        self._finder.set_foreign_aside()

    def unusable(self, folder: Path) -> tuple[str, ...]:
        """List complete checkpoints of ``folder`` that were damaged and renamed, each with the reason."""
        return self._finder.unusable(folder)

    def load(self, state: DenseState, directory: Path) -> LoadResult:
        """Verify ``directory``, then fill ``state`` from it; Megatron opens no file before.

        Raises CheckpointError when it is damaged, is from another project and ``checkpoint.trust`` is false, or does
        not contain exactly the tensors that this model and optimizer need.
        """
        began = time.monotonic()
        # First: ``.metadata`` and ``common.pt`` are pickle, which can run code when Megatron opens them.
        manifest = self._finder.check(directory, trust=self._config.trust)
        same_layout = manifest is not None and manifest.topology == self._topology
        frame = build_shards(state, self._metadata(), is_loading=True)
        # Generators belong to ranks: in another layout no rank is the one that saved them.
        wanted: dict[str, Any] = {RANK_STATE_KEY: rank_state()} if same_layout else {}
        loaded = load_shards(frame, wanted, directory, self._dp_cp_group, fully_parallel=self._config.fully_parallel)
        install(state, frame, loaded)
        iteration = state.host.iteration
        if manifest is not None and manifest.iteration != iteration:
            raise CheckpointError(
                f"{directory}: contains iteration {iteration}, but its manifest names iteration {manifest.iteration}"
            )
        self.last_saved_iteration = iteration
        self._resumed_from = directory.name if directory.parent == self.folder else None
        self._tell(
            CheckpointLoaded(
                iteration=iteration,
                path=str(directory),
                seconds=time.monotonic() - began,
                generators_restored=same_layout,
                differences=() if manifest is None else self._finder.differences(directory, manifest),
            ).to_record()
        )
        return LoadResult(iteration=iteration, rng_restored=same_layout, manifest=manifest)

    def read_extra(self, directory: Path) -> dict[str, Any]:
        """Read ``DenseState.extra`` and the history as saved in ``directory``, without building anything.

        Raises CheckpointError as ``load`` does; a checkpoint of another project has no such values.
        """
        self._finder.check(directory, trust=self._config.trust)
        common = dist_checkpointing.load_common_state_dict(str(directory))
        extra: dict[str, Any] = common.get(OURS_KEY, {}).get("extra", {})
        return extra

    # -- reporting

    def _say_failed(self, iteration: int, path: Path, error: str) -> None:
        self._tell(CheckpointFailed(iteration=iteration, error=error, path=str(path)).to_record())

    def _tell(self, record: dict[str, Any]) -> None:
        if self._collectives.rank == 0:
            self._report(record)
