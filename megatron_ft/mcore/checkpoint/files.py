"""Finds and verifies checkpoints on all ranks together, and writes each rank's files in a thread of the rank.

This module copies the tensors when a save begins. A thread of the rank writes the copies while training continues. No
process is forked. Megatron's own background writer forks processes, which continue to run if the rank is killed. A fork
also copies locks that threads of gloo and gRPC hold at that moment.
"""

import io
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat, _StorageInfo, _write_item
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ft.config.identity import Difference, JobIdentity
from megatron_ft.errors import CheckpointError, UnreadableError
from megatron_ft.mcore.checkpoint.metadata import FORMAT_NAME, METADATA_NAME
from megatron_ft.mcore.groups import Collectives
from megatron_ft.mcore.versions import plan_save
from megatron_ft.snapshot.capture.capture import CopyBatch
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.files import FileEntry, HashedFile, write_file, write_temporary
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.run_settings import other_checkpoint


class CheckpointFinder:
    """Finds and verifies checkpoints. Each rank reads a share of the files. All ranks must call the same methods."""

    def __init__(
        self,
        collectives: Collectives,
        identity: JobIdentity,
        report_damage: Callable[[int, Path, str], None],
        *,
        allow_other_data: bool = False,
    ) -> None:
        """Create a finder. The finder renames damaged checkpoints. For each of them, it calls ``report_damage`` with
        iteration, directory and reason."""
        self._collectives = collectives
        self._allow_other_data = allow_other_data
        self._identity = identity
        self._report_damage = report_damage
        self._verified: tuple[Path, Manifest] | None = None
        self.foreign: dict[Path, str] = {}
        """Checkpoints that ``newest`` skipped, with the reason: another run, or a wrong iteration in the name."""
        self._reasons: dict[str, str] = {}
        """Maps a renamed checkpoint (its new name) to the reason for the renaming; only rank 0 has entries."""

    def newest(self, folder: Path) -> Path | None:
        """Return the newest undamaged checkpoint of this run in ``folder``, or None if there is none.

        Damaged checkpoints that are newer are reported and renamed. Newer checkpoints are added to ``foreign`` if they
        belong to another run, or if the iteration in their name differs from that in their manifest.

        Raises:
            CheckpointError: the newest undamaged checkpoint has other data, or another model, optimizer or schedule
                than this job.
            UnreadableError: the storage could not read a file of the checkpoint that would be used. The checkpoint is
                not renamed, because it may be undamaged.
        """
        self.foreign = {}
        while True:
            found = [entry.path for entry in checkpoints.list_checkpoints(folder) if entry.complete]
            names = [path.name for path in found if path not in self.foreign]
            # All ranks use the list of rank 0, because a shared file system may briefly show them different contents.
            name: str | None = self._collectives.from_first(names[-1] if names else None)
            if name is None:
                return None
            path = folder / name
            try:
                manifest = self.verify(path)
            except UnreadableError as error:
                raise UnreadableError(
                    f"{error}. The checkpoint may be undamaged, so it keeps its name. Start again when the storage can "
                    f"be read, or move {path} to another folder to continue from an older checkpoint",
                    path,
                ) from error
            except CheckpointError as error:
                self._set_aside(path, str(error), "damaged")
                continue
            # Only the result of rank 0 counts. If ranks had different results, they would wait for each other forever.
            own, ignores_data = self._identity, self._allow_other_data
            allowed = own.allow_change
            other = other_checkpoint(path, manifest, own.settings, ignores_data=ignores_data, allowed=allowed)
            reason, error = self._collectives.from_first([self._not_own(path, manifest), other])
            if reason is not None:
                self.foreign[path] = reason
                continue
            if error is not None:
                raise CheckpointError(error)
            return path

    def set_foreign_aside(self) -> None:
        """Rename the checkpoints in ``foreign``, which belong to other runs or have a wrong name. Otherwise this run
        would treat them as its own when it names new checkpoints and when it deletes old ones."""
        for path, reason in self.foreign.items():
            self._set_aside(path, reason, "foreign")
        self.foreign = {}

    def differences(self, directory: Path, manifest: Manifest) -> tuple[str, ...]:
        """List the differences between this job and the job that saved the checkpoint in ``directory``."""
        notes = [self._not_own(directory, manifest)]
        if manifest.format_version == 1:
            notes.append(
                "the manifest has format_version=1, which does not record data, model, optimizer and schedule, so "
                "these cannot be compared"
            )
        else:
            notes += map(str, Difference.between(manifest.settings, self._identity.settings))
        return tuple(note for note in notes if note is not None)

    def _not_own(self, path: Path, manifest: Manifest) -> str | None:
        # Returns why the checkpoint is of another run, or has another iteration than its name; otherwise None.
        if checkpoints.is_named(path) and (renamed := checkpoints.other_iteration(path, manifest)) is not None:
            return renamed
        reason = self._identity.not_of_run(
            run_id=manifest.run_id, run_name=manifest.run_name, format_version=manifest.format_version
        )
        return None if reason is None else f"{path}: {reason}"

    def unusable(self, folder: Path) -> tuple[str, ...]:
        """List the checkpoints in ``folder`` that were renamed because they were damaged, each with the reason."""
        reasons = []
        if self._collectives.rank == 0:
            for path in checkpoints.list_set_aside(folder):
                reasons.append(f"{path}: {self._reasons.get(path.name, 'damaged, renamed by an earlier start')}")
        return tuple(self._collectives.from_first(reasons))

    def _set_aside(self, path: Path, reason: str, kind: Literal["damaged", "foreign"]) -> None:
        moved, error = None, None
        if self._collectives.rank == 0:
            try:
                moved = checkpoints.set_aside(path, kind)
            except OSError as failure:
                error = f"{path} is {kind} ({reason}). Move it to another folder, because renaming it failed: {failure}"
        error = self._collectives.errors(error)
        if error is not None:
            raise CheckpointError(error)
        if moved is not None:
            self._reasons[moved.name] = reason
            self._report_damage(checkpoints.iteration_of(path), path, f"{kind}, renamed to {moved.name}: {reason}")

    def verify(self, directory: Path) -> Manifest:
        """Verify all files of ``directory``. Each rank reads a share of the files. Raise CheckpointError on every rank
        if any rank finds damage, otherwise UnreadableError on every rank if the storage fails a read of any rank."""
        manifest: Manifest | None = None
        errors: dict[type[CheckpointError], str] = {}
        try:
            manifest = self._read_share(directory)
        except CheckpointError as failure:
            errors[type(failure)] = str(failure)
        for kind in (CheckpointError, UnreadableError):
            everywhere = self._collectives.errors(errors.get(kind))
            if everywhere is not None:
                raise kind(errors.get(kind, everywhere))
        assert manifest is not None, "there is neither a manifest nor an error"
        self._verified = (directory, manifest)
        return manifest

    def _read_share(self, directory: Path) -> Manifest:
        part, num_parts = self._collectives.rank, self._collectives.num_ranks
        try:
            return Manifest.verified(directory, part=part, num_parts=num_parts)
        except UnreadableError:
            # Look again, because some errors are gone at once, such as a stale handle of a network file system.
            return Manifest.verified(directory, part=part, num_parts=num_parts)

    def check(self, directory: Path, *, trust: bool) -> Manifest | None:
        """Verify the files of ``directory``, and return its manifest. If the last call of ``newest`` or ``verify`` has
        verified ``directory``, the next ``check`` does not verify it again. If there is no manifest, verify nothing:
        with ``trust``, return None; otherwise raise CheckpointError. Damaged files raise CheckpointError, too."""
        if not checkpoints.has_manifest(directory, trust=trust):
            return None
        # Use an earlier verification only once, because the files may change later.
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == directory:
            return verified[1]
        return self.verify(directory)


BACKEND, BACKEND_VERSION = "torch_dist", 1


@dataclass(kw_only=True)
class PlannedWrite:
    """Plan of the files that this rank writes, with copies of the tensors."""

    files: list[tuple[str, list[tuple[Any, Any]]]]
    """Name of each file, and the file's content as a list of (write item, bytes or CPU tensor)."""
    writer: Any
    """Megatron's storage writer, which makes the metadata at the end of the save."""
    metadata: Metadata | None
    """Metadata of the whole checkpoint; None on all ranks except rank 0."""

    def metadata_bytes(self, results: list[list[list[Any]]]) -> bytes:
        """Return the content of the file ``.metadata``: the plan, with the file and the offset of every written item.
        ``results`` contains the ``WriteJob.results`` of every rank."""
        capture = _Capture()
        writer = self.writer
        writer.fs, writer.sync_files = capture, False
        writer.finish(self.metadata, [[_from_json(record) for record in of_rank] for of_rank in results])
        return capture.content


class SavedTensors(NamedTuple):
    """Names and addresses of the tensors that this rank saves. While both stay the same, saves can reuse a plan."""

    names: tuple[str, ...]
    """Names of the parameters with layer numbers and expert ids that are unique in the whole model."""
    addresses: tuple[int, ...]
    """Addresses of the memory of all parameters, buffers and optimizer state."""


RANK_STATE_KEY = "rank_state"
"""Key under which a checkpoint stores the states of each rank's random number generators."""


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Megatron's save strategy, changed to plan only: it stores the plan in ``planned`` and writes nothing."""

    planned: PlannedWrite
    given: frozenset[int] = frozenset()
    """Addresses of the storages of the tensors to be saved."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *unused: Any) -> AsyncRequest:
        # ``unused`` is the name of the writer, which Megatron passes in some releases.
        buckets = _on_host(writer)
        files = [(name, [*bytes_items, *self._copies(tensors)]) for _, name, (bytes_items, tensors) in buckets]
        writer.write_buckets = None  # only ``PlannedWrite`` keeps the copies
        self.planned = PlannedWrite(files=files, writer=writer, metadata=save_state_dict_ret[1])
        return AsyncRequest(None, (), [])

    def _copies(self, items: list[tuple[Any, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
        """Copy each tensor that training changes in place. Megatron has already copied views and GPU tensors."""
        return [(item, tensor.detach().clone() if _storage(tensor) in self.given else tensor) for item, tensor in items]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_host(writer: Any) -> Any:
    if not writer.write_buckets:
        return []
    return writer.preload_tensors(writer.write_buckets, True)


_Sources = dict[tuple[str, tuple[int, ...]], torch.Tensor]
"""Maps (name, offset) to a part of a tensor on this rank. ``offset`` is the index of the part's first element."""


class Planner:
    """Plans saves with Megatron. With ``fully_parallel``, the ranks of ``dp_cp_group`` divide the writing among
    themselves. While the saved tensors keep their names and addresses, later saves reuse the plan and the memory of
    the copies. These saves plan nothing, and copy most tensors during the next iteration."""

    def __init__(self, dp_cp_group: dist.ProcessGroup, *, fully_parallel: bool) -> None:
        self._base = _PlanningStrategy(BACKEND, BACKEND_VERSION, thread_count=1)
        self._strategy: Any = self._base
        if fully_parallel:
            self._strategy = FullyParallelSaveStrategyWrapper(self._base, dp_cp_group, do_cache_distribution=True)
        self._planned: PlannedWrite | None = None
        self._batch: CopyBatch | None = None
        """Copies for which training does not wait. They cover all tensors of the newest plan except those in
        ``_at_once``. None until ``repeat`` is called."""
        self._at_once: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs (copy, source) of the tensors that ``repeat`` copies before it returns."""
        self._sources: _Sources = {}
        self._tensors: SavedTensors | None = None
        """Names and addresses of the tensors for which the newest plan was made."""

    def can_repeat(self, tensors: SavedTensors) -> bool:
        """Return whether a save of ``tensors`` can use the newest plan of this rank again."""
        return self._planned is not None and self._tensors == tensors

    def has_names(self, tensors: SavedTensors) -> bool:
        """Return whether the newest plan is for parameters with the names of ``tensors``."""
        return self._tensors is not None and self._tensors.names == tensors.names

    def forget(self) -> None:
        """Drop the plan, all references to tensors, and the division of the writing among ranks. All ranks must call
        this if any rank has other parameters, e.g. other experts: otherwise a later save could leave tensors out."""
        if self._strategy is not self._base:
            self._strategy.cached_distribution = None
        self._planned = self._batch = self._tensors = None
        self._at_once, self._sources, self._base.given = [], {}, frozenset()

    def plan(self, shards: dict[str, Any], directory: Path, tensors: SavedTensors) -> PlannedWrite:
        """Plan the save of ``shards`` into ``directory``, and copy this rank's tensors. All ranks must call this.

        Args:
            tensors: names and addresses of this rank's parameters, buffers and optimizer state. If tensors in
                ``shards`` have other addresses, Megatron has copied them, and later saves cannot reuse this plan.
        """
        leaves = [leaf for leaf in nested_values(shards) if isinstance(leaf, ShardedTensor) and leaf.data is not None]
        self._sources = {(leaf.key, tuple(leaf.global_offset)): leaf.data for leaf in leaves}
        self._base.given = frozenset(map(_storage, self._sources.values()))
        # A plan that contains copies made by Megatron cannot be used again: a later save would write old values.
        is_live = self._base.given <= set(tensors.addresses)
        # A plan with bytes of Megatron's layers, such as scales of FP8, cannot be used again for the same reason.
        objects = (leaf for leaf in nested_values(shards) if isinstance(leaf, ShardedObject))
        is_fixed = all(leaf.data is None for leaf in objects if leaf.key != RANK_STATE_KEY)
        with _without_manager_process():
            plan_save(self._strategy, shards, directory)
        planned = self._base.planned
        del self._base.planned
        self._planned, self._tensors = planned if is_live and is_fixed else None, tensors
        self._batch = None
        return replace(planned)

    @torch.no_grad()
    def repeat(self, own: ShardedObject, buffers: frozenset[int]) -> tuple[PlannedWrite, CopyBatch]:
        """Return (newest plan, batch of copies of this rank's tensors). The caller must make the copies in the batch
        before the state changes, and before it writes the files.

        Args:
            own: object with the state that only this rank has; its present value is saved.
            buffers: addresses of storages that a forward pass may change. Their tensors are copied before this returns.
        """
        assert self._planned is not None, "there is no plan"
        if self._batch is None:
            self._batch = self._with_targets(self._planned, buffers)
        for copy, source in self._at_once:
            copy.copy_(source)
        files = [
            (name, [(item, _renewed(item, data, own)) for item, data in items]) for name, items in self._planned.files
        ]
        return replace(self._planned, files=files), self._batch

    def _with_targets(self, planned: PlannedWrite, buffers: frozenset[int]) -> CopyBatch:
        """Return the batch of all copies that can be made while training runs. List all other copies in ``_at_once``.
        If the state is on a GPU, the copies are in pinned memory."""
        sources, targets, self._at_once = [], [], []
        for _, items in planned.files:
            for place, (item, copy) in enumerate(items):
                if not isinstance(copy, torch.Tensor) or copy.numel() == 0:
                    continue
                source = self._sources[item.index.fqn, tuple(item.index.offset)]
                if source.is_cuda:
                    # Copies of CUDA tensors to other memory would block training.
                    copy = torch.empty_like(copy, pin_memory=True)
                    items[place] = (item, copy)
                is_fixed = _storage(source) not in buffers
                if is_fixed and source.is_contiguous() and source.dtype == copy.dtype:
                    sources.append(source.detach())
                    targets.append(copy.view(-1).view(torch.uint8))
                else:
                    self._at_once.append((copy, source))
        return CopyBatch.of(sources, targets)


def _renewed(item: Any, data: Any, own: ShardedObject) -> Any:
    """Return what a save with a reused plan writes for ``item``: ``own`` if it is this rank's state, else ``data``."""
    if not item.index.fqn.startswith(f"{RANK_STATE_KEY}/"):
        return data
    content = io.BytesIO()
    torch.save([own.data], content)
    return content


@contextmanager
def _without_manager_process() -> Iterator[None]:
    # Megatron's planning would create a manager process with a queue, which a writer thread does not need.
    module: Any = filesystem_async
    before, module._results_queue = module._results_queue, object()
    try:
        yield
    finally:
        module._results_queue = before


class _Abandoned(Exception):
    """The save was cancelled while its files were written."""


class Job:
    """A job of the thread that writes the checkpoints of this process. The thread runs jobs in the order in which they
    were submitted. When ``done`` is true, ``error`` has its final value: a text, or None after success."""

    _queue: ClassVar["queue.SimpleQueue[Job]"]
    _thread: ClassVar[threading.Thread | None] = None
    _abandoned: ClassVar[list["Job"]] = []
    """Jobs of this process's abandoned saves. These jobs may still be writing files in a later membership."""

    def __init__(self, errors: type[BaseException] = BaseException) -> None:
        """Create the job. If it raises an exception of type ``errors``, ``error`` is the text of that exception."""
        self.error: str | None = None
        self._errors = errors
        self._ended = threading.Event()

    def submit(self) -> None:
        """Queue the job."""
        # Use one thread for all jobs: a new thread begins to run before ``start`` returns, which would delay training.
        if Job._thread is None or not Job._thread.is_alive():
            Job._queue = queue.SimpleQueue()
            # A daemon thread, so that a process that fails ends without waiting for storage.
            Job._thread = threading.Thread(
                target=self._run_all, args=(Job._queue,), name="checkpoint-writer", daemon=True
            )
            Job._thread.start()
        Job._queue.put(self)

    @property
    def done(self) -> bool:
        """Whether the job has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until ``done`` is true."""
        self._ended.wait()

    def abandon(self) -> None:
        """Mark the job as abandoned: ``await_abandoned`` waits for it."""
        self._abandoned.append(self)

    @classmethod
    def await_abandoned(cls) -> None:
        """Wait until the jobs of all abandoned saves of this process have ended."""
        while cls._abandoned:
            cls._abandoned.pop().wait()

    @staticmethod
    def _run_all(jobs: "queue.SimpleQueue[Job]") -> None:
        while True:
            jobs.get()._run_one()

    def _run_one(self) -> None:
        try:
            self._run()
        except self._errors as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._ended.set()

    def _run(self) -> None:
        raise NotImplementedError


class WriteJob(Job):
    """Writes the files of a :class:`PlannedWrite`, and the files ``whole_files`` (name and content of each).
    ``entries`` and ``results`` are final when ``done`` is true."""

    def __init__(self, planned: PlannedWrite, directory: Path, whole_files: dict[str, bytes]) -> None:
        self.planned = planned
        self.entries: list[FileEntry] = []
        self.results: list[list[Any]] = []
        self._directory = directory
        self._whole_files = whole_files
        self._cancelled = threading.Event()
        super().__init__()

    def abandon(self) -> None:
        """Cancel the save without waiting. The job ends after the current item."""
        self._cancelled.set()
        super().abandon()

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise _Abandoned(f"the save to {self._directory} was cancelled while its files were written")

    def _run(self) -> None:
        try:
            for name, content in self._whole_files.items():
                self._check_wanted()
                self.entries.append(write_file(self._directory, name, content))
            for name, items in self.planned.files:
                self._check_wanted()
                self._write(name, items)
        finally:
            # Free the copies now, without waiting for other ranks.
            self.planned.files = []
            self._whole_files = {}

    def _write(self, name: str, items: list[tuple[Any, Any]]) -> None:
        with HashedFile(self._directory, name) as file:
            try:
                for item, data in items:
                    self._check_wanted()
                    self.results.append(_to_json(self._write_one(file, name, item, data)))
            except RuntimeError:
                if file.failure is not None:  # the error of the file is the cause of the error of torch's writer
                    raise file.failure from None
                raise
            self.entries.append(file.commit())

    def _write_one(self, file: HashedFile, name: str, item: Any, data: Any) -> WriteResult:
        transforms = self.planned.writer.transforms
        return _write_item(transforms, file, data, item, name, serialization_format=SerializationFormat.TORCH_SAVE)


class MetadataJob(Job):
    """Writes Megatron's metadata and the manifest, on rank 0. The manifest has a temporary name until ``commit``.

    Args:
        directory: directory of the checkpoint.
        planned: plan of rank 0.
        written: ``WriteJob.results`` and ``WriteJob.entries`` of every rank, in rank order.
        manifest_of: function that makes the manifest from the entries (names, sizes and checksums) of all files.
    """

    def __init__(
        self,
        directory: Path,
        planned: PlannedWrite,
        written: list[dict[str, Any]],
        manifest_of: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> None:
        self.num_bytes = 0
        """Size of all files of the checkpoint in bytes."""
        self._manifest = Path()
        self._directory, self._planned, self._written, self._manifest_of = directory, planned, written, manifest_of
        super().__init__()

    def commit(self) -> None:
        """Complete the checkpoint: give the manifest its final name. Raises OSError if the file system fails."""
        os.rename(self._manifest, self._directory / MANIFEST_NAME)

    def _run(self) -> None:
        entries = [FileEntry(**entry) for of_rank in self._written for entry in of_rank["entries"]]
        content = self._planned.metadata_bytes([of_rank["results"] for of_rank in self._written])
        entries.append(write_file(self._directory, METADATA_NAME, content))
        form = json.dumps(asdict(CheckpointingConfig(BACKEND, BACKEND_VERSION))).encode()
        entries.append(write_file(self._directory, FORMAT_NAME, form))
        self.num_bytes = sum(entry.num_bytes for entry in entries)
        manifest = self._manifest_of(tuple(sorted(entries, key=lambda entry: entry.name)))
        manifest.validate()
        self._manifest, _ = write_temporary(self._directory, MANIFEST_NAME, manifest.to_bytes())
        # All files must be durable before the manifest gets its final name, because this name completes the checkpoint.
        checkpoints.sync_directory(self._directory)


class FileSystemJob(Job):
    """Calls ``change``, which changes files. If it raises OSError, ``error`` is the text of the exception."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change = change
        super().__init__(OSError)

    def _run(self) -> None:
        self._change()


class _Capture(FileSystem):
    """File system that keeps the metadata file in memory. The storage writer's ``finish`` writes no other file."""

    content = b""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with io.BytesIO() as stream:
            yield stream
            self.content = stream.getvalue()

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        return None


def _to_json(result: WriteResult) -> list[Any]:
    index, place = result.index, result.storage_data
    assert place.transform_descriptors is None, "a write result with transform descriptors cannot be converted to JSON"
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def _from_json(record: list[Any]) -> WriteResult:
    fqn, offset, index, num_bytes, path, start, length = record
    key = MetadataIndex(fqn, None if offset is None else torch.Size(offset), index)
    return WriteResult(index=key, size_in_bytes=num_bytes, storage_data=_StorageInfo(path, start, length))
