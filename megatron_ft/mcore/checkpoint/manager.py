"""Saves and loads the dense checkpoints of a job."""

import functools
import importlib.metadata
import io
import pickle
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ft.config.checkpoint import CheckpointConfig
from megatron_ft.config.identity import JobIdentity
from megatron_ft.errors import CheckpointError
from megatron_ft.events import CheckpointFailed, CheckpointLoaded, CheckpointSaved
from megatron_ft.formatting import unlike_tensors
from megatron_ft.mcore.checkpoint.files import (
    RANK_STATE_KEY,
    CheckpointFinder,
    FileSystemJob,
    Job,
    MetadataJob,
    Planner,
    WriteJob,
)
from megatron_ft.mcore.checkpoint.metadata import COMMON_NAME, describe, read_common, read_metadata
from megatron_ft.mcore.checkpoint.state import (
    OURS_KEY,
    DenseState,
    install,
    layout_of,
    leave_histories,
    load_shards,
    other_shape,
    rank_state,
    with_histories,
)
from megatron_ft.mcore.groups import Collectives
from megatron_ft.mcore.model.transformer_config import unwrap
from megatron_ft.mcore.optimizer import adamw
from megatron_ft.mcore.optimizer.adamw import SHARDING_METADATA
from megatron_ft.planning.retention import RetentionPolicy
from megatron_ft.snapshot.capture.capture import Copier, CopyBatch, open_copier
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.files import FileEntry, fsync_directory
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from transformer_engine_ext.recipes import AMAX_HISTORY

_WEIGHTS = ("embedding.", "decoder.", "output_layer.")
_EXTRA_STATE = "._extra_state"
_NOT_USED = ("rng_state", "rerun_state_machine")
"""Keys of objects in Megatron-LM's checkpoints that a load ignores."""


def _torch_bytes(content: dict[str, Any]) -> bytes:
    """Serialize ``content`` with ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@functools.cache
def _software() -> dict[str, str]:
    """Return the versions of Python and of the packages that write the checkpoint."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "numpy")}
    return {"python": platform.python_version(), **packages}


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadResult:
    """Result of loading a checkpoint."""

    iteration: int
    """Iteration after which the checkpoint was saved."""
    rng_restored: bool
    """Whether the random number generators were restored. This is not possible if the parallel layout has changed."""
    manifest: Manifest | None
    """Manifest of the checkpoint; None for a checkpoint of another project."""


@dataclass(kw_only=True)
class _Pending:
    """Progress of the dense checkpoint that this rank is saving."""

    iteration: int
    consumed_samples: int
    directory: Path
    job: WriteJob
    started: float
    blocked_seconds: float = 0.0
    is_written: bool = False
    """Whether all ranks have written their files. It has the same value on all ranks."""
    metadata: MetadataJob | None = None
    """Job of rank 0 that writes the metadata and the manifest, after ``is_written`` has become true."""
    num_bytes: int | None = None
    """Size of the whole checkpoint in bytes; None until the manifest is complete."""
    publication: FileSystemJob | None = None
    """Job that rank 0 begins after the commit. It flushes the manifest and makes the checkpoint the ``latest`` one."""

    @property
    def jobs(self) -> list[Job]:
        """Jobs of this save that this rank has started so far, in the order of their start."""
        return [job for job in (self.job, self.metadata, self.publication) if job is not None]


class CheckpointManager:
    """Saves dense checkpoints in the background, and loads them.

    All ranks of ``group``, the whole job, must call the same methods in the same order. A save is complete when all
    ranks have written their files. If a save fails on any rank, it is reported as ``checkpoint_failed``, its directory
    is removed, and training continues.
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
        """Create the manager of one rank. ``dp_cp_group`` contains the ranks with the same dense (non-expert) weights
        as this rank. ``report`` sends an event to the sinks; only rank 0 calls it."""
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
        self._common: dict[str, Any] = {}
        """The part of the newest save's state that is the same on all ranks. Only rank 0 writes it."""
        self._pending: _Pending | None = None
        self._copier: Copier | None = None
        self._before_update: list[Callable[[], None]] = []
        """Functions that the engine calls before an update. A save adds ``settle``, which waits for its copies."""
        self._cleaning: FileSystemJob | None = None
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
        """Begin to save the current ``state``. Without ``checkpoint.async_save``, wait for the end of this save. Before
        the save begins, finish an earlier save that is in progress, and wait for the threads of abandoned saves."""
        assert iteration == state.host.iteration, (
            f"cannot save the state of iteration {state.host.iteration} as iteration {iteration}"
        )
        self.finish()
        started = time.monotonic()
        self._await_abandoned()
        directory = self._open_directory(iteration)
        if directory is None:
            return
        job, batch = self._prepare(state, directory)
        self._pending = _Pending(
            iteration=iteration, consumed_samples=state.consumed_samples, directory=directory, job=job, started=started
        )
        self._copy(batch, state.before_update)
        self._pending.blocked_seconds += time.monotonic() - started
        if not self._config.async_save:
            self.finish()

    def _copy(self, batch: CopyBatch, before_update: list[Callable[[], None]] | None) -> None:
        # Begins to copy ``batch``. When the copies are complete, the thread writes the files.
        assert self._pending is not None, "there is no save in progress"
        if not batch.sources:
            self._pending.job.submit()
            return
        if self._copier is None:
            self._copier = open_copier(batch.sources[0].device)
        self._copier.start(batch, after=self._pending.job.submit)
        if before_update is None:
            self._copier.wait()
        else:
            before_update.append(self.settle)
            self._before_update = before_update

    def settle(self) -> None:
        """Wait until the save in progress, if there is one, has copied the state. Afterwards the state may change."""
        began = time.monotonic()
        if self._copier is not None:
            self._copier.wait()
        if self.settle in self._before_update:
            self._before_update.remove(self.settle)
        if self._pending is not None:
            self._pending.blocked_seconds += time.monotonic() - began

    def forget_plan(self) -> None:
        """Drop earlier saves' plan. All ranks must call this before experts move, and while no save copies tensors."""
        self._planner.forget()

    def poll(self) -> None:
        """Advance the save in progress by one step, if this is possible without waiting for storage."""
        # All ranks have the same save in progress, at the same step, so they call the same collectives.
        pending = self._pending
        if pending is None:
            return
        self.settle()
        began = time.monotonic()
        if not pending.is_written:
            if self._collectives.all(pending.job.done):
                self._collect(pending)
        elif pending.num_bytes is None:
            self._commit(pending)
        else:
            self._complete(pending, began)
        pending.blocked_seconds += time.monotonic() - began

    def finish(self) -> None:
        """Wait for the save in progress, if there is one, and complete it. Wait until old checkpoints are deleted."""
        self.settle()
        while self._pending is not None:
            began = time.monotonic()
            self._pending.jobs[-1].wait()
            self._pending.blocked_seconds += time.monotonic() - began
            self.poll()
        self._end_cleaning()

    def abandon(self) -> Path | None:
        """Abandon the save in progress, if there is one, without communication and without waiting for storage.

        After this call, the abandoned save does not write its manifest. The next save of this process waits until the
        threads of the abandoned save have ended, and removes the files of that save.

        Returns:
            Directory of the abandoned save. Its checkpoint is complete if rank 0 had already written the manifest.
        """
        self.settle()
        if self._copier is not None:
            self._copier.close()
        pending, self._pending = self._pending, None
        cleaning, self._cleaning = self._cleaning, None
        jobs = [] if pending is None else pending.jobs
        for job in [*jobs, *([] if cleaning is None else [cleaning])]:
            job.abandon()
        return None if pending is None else pending.directory

    def _await_abandoned(self) -> None:
        # Waits until no rank writes for an abandoned save: the next save may use the same directory.
        Job.await_abandoned()
        # A barrier. After it, no thread of any rank writes for the abandoned save.
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

    def _prepare(self, state: DenseState, directory: Path) -> tuple[WriteJob, CopyBatch]:
        """Return the job that writes this rank's files, and the batch of tensor copies. The copies must be complete
        before the job is submitted."""
        tensors = state.tensors()
        # The engine sets the scheduler's position before an iteration. Checkpoints have the position after it.
        adamw.set_position(state.scheduler, state.consumed_samples)
        # Either all ranks plan, or none, because Megatron's planning is collective.
        reuse = self._collectives.gather([self._planner.can_repeat(tensors), self._planner.has_names(tensors)])
        if all(can_repeat for can_repeat, _ in reuse):
            planned, batch = self._planner.repeat(rank_state(state.host), state.buffers())
            adamw.refresh_groups(state.optimizer, self._common.get("optimizer", {}))
            self._common |= state.common_state()
        else:
            if not all(has_names for _, has_names in reuse):
                self._planner.forget()
            metadata = self._metadata()
            # The process group is left out, because it cannot be stored.
            content_metadata = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
            tree = {
                **state.build_shards(metadata, is_loading=False),
                **state.common_state(),
                RANK_STATE_KEY: rank_state(state.host),
                "content_metadata": content_metadata,
            }
            # Skip Megatron's check, which would gather the metadata of all tensors as pickled objects at every save.
            shards, self._common = save_preprocess(tree, validate_access_integrity=False)
            planned, batch = self._planner.plan(shards, directory, tensors), CopyBatch.of([], [])
        whole_files = {}
        if self._collectives.rank == 0:
            whole_files[COMMON_NAME] = _torch_bytes(self._common)
        return WriteJob(planned, directory, whole_files), batch

    def _metadata(self) -> dict[str, Any]:
        return {
            **SHARDING_METADATA,
            "dp_cp_group": self._dp_cp_group,
            # Store each expert as tensors of its own, so that a rank may have any experts.
            "singleton_local_shards": True,
            "non_homogeneous_layers": True,
        }

    def _collect(self, pending: _Pending) -> None:
        """Collect the results of all ranks after all files are written, and begin to write the metadata."""
        error = self._collectives.errors(pending.job.error)
        if error is not None:
            self._discard(pending, error)
            return
        written = self._collectives.gather(
            {"results": pending.job.results, "entries": [asdict(entry) for entry in pending.job.entries]}
        )
        pending.is_written = True
        if self._collectives.rank == 0:
            manifest_of = partial(self._manifest, pending.iteration, pending.consumed_samples)
            pending.metadata = MetadataJob(pending.directory, pending.job.planned, written, manifest_of)
            pending.metadata.submit()

    def _commit(self, pending: _Pending) -> None:
        """Complete the checkpoint if rank 0 has written metadata and manifest. Then begin to publish the checkpoint."""
        outcome: list[Any] | None = None
        if pending.metadata is not None and pending.metadata.done:
            error = pending.metadata.error
            try:
                if error is None:
                    pending.metadata.commit()
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
            outcome = [error, pending.metadata.num_bytes]
        outcome = self._collectives.from_first(outcome)
        if outcome is None:
            return
        error, num_bytes = outcome
        if error is not None:
            self._discard(pending, f"rank 0: {error}")
            return
        pending.num_bytes = num_bytes
        if self._collectives.rank == 0:
            pending.publication = FileSystemJob(partial(self._publish, pending.directory, pending.iteration))
            pending.publication.submit()

    def _publish(self, directory: Path, iteration: int) -> None:
        # Runs in a thread of rank 0.
        fsync_directory(directory)
        checkpoints.move_latest(self.folder, directory, iteration)

    def _complete(self, pending: _Pending, began: float) -> None:
        """Report the checkpoint if its publication (flush and ``latest``) has ended, and begin to delete older
        checkpoints. ``began`` is the time at which the call of ``poll`` began."""
        published = pending.publication is not None and pending.publication.done
        outcome = self._collectives.from_first([pending.publication.error] if published else None)
        if outcome is None:
            return
        if outcome[0] is not None:
            self._discard(pending, f"rank 0: {outcome[0]}")
            return
        # Reset only after the collective: if it fails because ranks are lost, the save is reported as abandoned.
        self._pending = None
        self.last_saved_iteration = pending.iteration
        self._tell(
            CheckpointSaved(
                iteration=pending.iteration,
                path=str(pending.directory),
                num_bytes=pending.num_bytes or 0,
                seconds=time.monotonic() - pending.started,
                blocked_seconds=pending.blocked_seconds + time.monotonic() - began,
            ).to_record()
        )
        # Delete older checkpoints only after the commit, because before it no newer checkpoint is complete.
        if self._collectives.rank == 0:
            self._cleaning = FileSystemJob(partial(self._clean, pending.iteration))
            self._cleaning.submit()

    def _end_cleaning(self) -> None:
        """Wait until rank 0 has deleted old checkpoints. Report a failure of the deletion."""
        cleaning, self._cleaning = self._cleaning, None
        if cleaning is None:
            return
        cleaning.wait()
        if cleaning.error is not None:
            iteration = self.last_saved_iteration or 0
            self._say_failed(
                iteration,
                self.folder / checkpoints.directory_name(iteration),
                f"the checkpoint is saved, but older checkpoints could not be removed: {cleaning.error}",
            )

    def _manifest(self, iteration: int, consumed_samples: int, files: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(
            run_id=self._identity.run_id,
            run_name=self._identity.run_name,
            generation=self._generation,
            topology=self._topology,
            iteration=iteration,
            consumed_samples=consumed_samples,
            settings=self._identity.settings,
            software=_software(),
            files=files,
        )

    def _discard(self, pending: _Pending, error: str) -> None:
        self._pending = None
        # Keep the files if the manifest exists: then the checkpoint is complete, and only ``latest`` was not moved.
        if self._collectives.rank == 0 and not (pending.directory / MANIFEST_NAME).exists():
            try:
                checkpoints.delete(pending.directory)
            except OSError as failure:
                error += f"; its directory could not be removed: {failure}"
        self._say_failed(pending.iteration, pending.directory, error)

    def _clean(self, iteration: int) -> None:
        # Applies the retention policy. Runs in a thread of rank 0.
        checkpoints.sweep(self.folder, before_iteration=iteration)
        stored = [entry for entry in checkpoints.list_checkpoints(self.folder) if entry.complete]
        names = [(entry.iteration, entry.path.name) for entry in stored]
        for name in self._retention.removable(names, in_use=self._in_use([name for _, name in names])):
            checkpoints.delete(self.folder / name)

    def _in_use(self, complete: list[str]) -> tuple[str, ...]:
        """Return in a tuple which checkpoint must not be deleted: that from which this run resumed, if it is among the
        last two of ``complete``, the names of complete checkpoints, oldest first. Otherwise, the tuple is empty."""
        # This run has read this checkpoint, but no later one. If a later one is damaged, a restart needs this one.
        return tuple(name for name in complete[-2:] if name == self._resumed_from)

    # -- loading

    def newest(self, folder: Path | None = None) -> Path | None:
        """Return the newest undamaged checkpoint of this run in ``folder``, or None if there is none.

        ``folder=None`` means the run's own folder. Newer checkpoints that are damaged are reported and renamed.

        Raises:
            CheckpointError: the newest undamaged checkpoint has other data, or another model, optimizer or schedule
                than this job.
            UnreadableError: the storage could not read a file of the checkpoint that would be used.
        """
        return self._finder.newest(folder or self.folder)

    @property
    def foreign(self) -> tuple[str, ...]:
        """Reasons why ``newest`` has skipped checkpoints of other runs, one per checkpoint."""
        return tuple(self._finder.foreign.values())

    def set_foreign_aside(self) -> None:
        """Rename and report the checkpoints of other runs that ``newest`` has skipped."""
        self._finder.set_foreign_aside()

    def unusable(self, folder: Path) -> tuple[str, ...]:
        """List the checkpoints in ``folder`` that were renamed because they were damaged, each with the reason."""
        return self._finder.unusable(folder)

    def load(self, state: DenseState, directory: Path) -> _LoadResult:
        """Verify the checkpoint in ``directory``, then fill ``state`` from it. Raise CheckpointError if the checkpoint
        is damaged, if it is from another project and ``checkpoint.trust`` is false, or if its tensors are not exactly
        those of this model and optimizer."""
        began = time.monotonic()
        # Verify first, because ``.metadata`` and ``common.pt`` are pickles, which can run code when they are opened.
        manifest = self._finder.check(directory, trust=self._config.trust)
        same_layout = manifest is not None and manifest.topology == self._topology
        layout = {} if manifest is not None else layout_of(directory, weights_only=False)
        frame = state.build_shards(self._metadata() | layout, is_loading=True)
        for name, shards in frame.items():
            if name != "optimizer":
                leave_histories(shards, directory)
        self._check_shapes(frame, directory)
        # Random number generators belong to coordinates in a layout. In another layout, no rank has the same ones.
        wanted: dict[str, Any] = {RANK_STATE_KEY: rank_state()} if same_layout else {}
        loaded = load_shards(
            frame,
            wanted,
            directory,
            self._dp_cp_group,
            fully_parallel=self._config.fully_parallel,
            ignored=() if manifest is not None else _NOT_USED,
        )
        install(state, frame, loaded)
        iteration = state.host.iteration
        if manifest is not None and manifest.iteration != iteration:
            raise CheckpointError(
                f"{directory} contains the state of iteration {iteration}, but its manifest is of iteration "
                f"{manifest.iteration}"
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
        return _LoadResult(iteration=iteration, rng_restored=same_layout, manifest=manifest)

    def load_weights(
        self, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer | None, directory: Path
    ) -> None:
        """Load the weights of the model from the checkpoint in ``directory``. Other state in the checkpoint is ignored.
        All ranks must call this. ``optimizer`` is None for a model that is not trained.

        Raises:
            CheckpointError: the checkpoint is damaged, it is from another project and ``checkpoint.trust`` is false, or
                its weights are not exactly those of the model.
        """
        manifest = self._finder.check(directory, trust=self._config.trust)
        # Check the metadata first: Megatron would run code in it, and would not name a wrong file or offset.
        read_metadata(directory)
        read_common(directory)
        metadata = self._metadata() | ({} if manifest is not None else layout_of(directory, weights_only=True))
        frames = [unwrap(chunk).sharded_state_dict(metadata=metadata) for chunk in model_chunks]
        # Megatron's layers also have objects, e.g. scales of FP8, which checkpoints of other projects may lack.
        wanted = {
            str(number): {key: shard for key, shard in frame.items() if not isinstance(shard, ShardedObject)}
            for number, frame in enumerate(frames)
        }
        for shards in wanted.values():
            leave_histories(shards, directory)
        self._check_shapes(wanted, directory)
        try:
            loaded, unclaimed, absent = dist_checkpointing.load(
                wanted, str(directory), strict=StrictHandling.RETURN_ALL
            )
        # ``CheckpointException`` contains the errors of all ranks. It is not a subclass of ``Exception``.
        except (CheckpointingException, CheckpointException, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{directory}: cannot be loaded: {describe(error)}") from error
        # ``unclaimed`` contains only tensors that no rank has requested. So it has no layers of other ranks.
        left = [key for key in unclaimed if key.startswith(_WEIGHTS) and not key.endswith(AMAX_HISTORY)]
        left = [key for key in left if _EXTRA_STATE not in key]
        everywhere = self._collectives.gather(left)
        unknown = sorted(set.intersection(*map(set, everywhere)))
        if absent or unknown:
            raise CheckpointError(f"{directory} does not match this model: {unlike_tensors(absent, unknown)}")
        for number, (chunk, frame) in enumerate(zip(model_chunks, frames, strict=True)):
            others = {key: None for key, shard in frame.items() if isinstance(shard, ShardedObject)}
            tensors = with_histories(chunk, loaded[str(number)])
            unwrap(chunk).load_state_dict({**tensors, **others}, strict=True)
        # The master weights are still copies of the initial weights, so they are copied again.
        if optimizer is not None:
            optimizer.reload_model_params()

    def _check_shapes(self, frame: dict[str, Any], directory: Path) -> None:
        error = other_shape(frame, directory)
        # Only the first and the last pipeline stage have an embedding or head, but all ranks must raise the error.
        everywhere = self._collectives.errors(error)
        if everywhere is not None:
            raise CheckpointError(everywhere if error is None else error)

    def read_extra(self, directory: Path) -> dict[str, Any]:
        """Read ``DenseState.extra`` and the entries of ``TrainState.history`` from the checkpoint in ``directory``,
        without loading tensors. The result is empty for a checkpoint of another project. Raise CheckpointError if the
        checkpoint is damaged, or if it is from another project and ``checkpoint.trust`` is false."""
        self._finder.check(directory, trust=self._config.trust)
        common = read_common(directory)
        extra: dict[str, Any] = common.get(OURS_KEY, {}).get("extra", {})
        return extra

    # -- reporting

    def _say_failed(self, iteration: int, path: Path, error: str) -> None:
        self._tell(CheckpointFailed(iteration=iteration, error=error, path=str(path)).to_record())

    def _tell(self, record: dict[str, Any]) -> None:
        if self._collectives.rank == 0:
            self._report(record)
