"""One save on one rank: Megatron plans the bytes and their places, a thread writes a copy of them.

Megatron's own background writer forks processes, and needs a manager process for their results. A rank that is killed
meanwhile leaves these processes behind, and a fork copies locks held by the threads of gloo and gRPC. Here the tensors
are copied at the call and a thread of the rank writes them: training may change its state at once, and a failed write
raises an exception.
"""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat, _StorageInfo, _write_item
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ft.snapshot.storage.files import FileEntry, HashedFile, write_file

BACKEND, BACKEND_VERSION = "torch_dist", 1


@dataclass(kw_only=True)
class PlannedWrite:
    """Bytes that this rank writes, from its own copy of every tensor."""

    files: list[tuple[str, list[tuple[Any, Any]]]]
    """Name of each file with its (write item, bytes or CPU tensor)."""
    writer: Any
    """Megatron's storage writer, for the metadata at the end of the save."""
    metadata: Metadata | None
    """Location of every tensor; on rank 0 only."""


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Strategy that stops after planning and keeps the plan."""

    planned: PlannedWrite
    given: frozenset[int] = frozenset()
    """Storages of the tensors to be saved."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        buckets = _on_host(writer)
        files = [(name, [*bytes_items, *self._copies(tensors)]) for _, name, (bytes_items, tensors) in buckets]
        writer.write_buckets = None  # the copies would otherwise live as long as the save
        self.planned = PlannedWrite(files=files, writer=writer, metadata=save_state_dict_ret[1])
        return AsyncRequest(None, (), [])

    def _copies(self, items: list[tuple[Any, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
        """Copy the tensors that the plan still refers to in place; Megatron has already copied views and tensors of the
        device."""
        return [(item, tensor.detach().clone() if _storage(tensor) in self.given else tensor) for item, tensor in items]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_host(writer: Any) -> Any:
    if not writer.write_buckets:
        return []
    return writer.preload_tensors(writer.write_buckets, True)


class Planner:
    """Megatron's planning, which keeps its distribution over ``dp_cp_group`` between saves."""

    def __init__(self, dp_cp_group: dist.ProcessGroup, *, fully_parallel: bool) -> None:
        self._base = _PlanningStrategy(BACKEND, BACKEND_VERSION, thread_count=1)
        self._strategy: Any = self._base
        if fully_parallel:
            self._strategy = FullyParallelSaveStrategyWrapper(self._base, dp_cp_group, do_cache_distribution=True)

    def plan(self, shards: dict[str, Any], directory: Path) -> PlannedWrite:
        """Plan this rank's part of the save into ``directory`` and copy it. Collective over the job."""
        leaves = (leaf for leaf in nested_values(shards) if isinstance(leaf, ShardedTensor))
        self._base.given = frozenset(_storage(leaf.data) for leaf in leaves if leaf.data is not None)
        with _without_manager_process():
            self._strategy.async_save(shards, directory)
        planned = self._base.planned
        del self._base.planned
        return planned


@contextmanager
def _without_manager_process() -> Iterator[None]:
    # Replace the inter-process queue that Megatron's writer creates while planning; a thread does not need it.
    module: Any = filesystem_async
    before, module._results_queue = module._results_queue, object()
    try:
        yield
    finally:
        module._results_queue = before


class GivenUp(Exception):
    """The save in progress was cancelled."""


class WriteJob:
    """Writes a :class:`PlannedWrite` in a thread. ``error`` and ``entries`` are final once ``done``."""

    _given_up: ClassVar[list["WriteJob"]] = []
    """Cancelled saves of this process that may still write; they outlive the memberships that began them."""

    def __init__(self, planned: PlannedWrite, directory: Path, whole_files: dict[str, bytes]) -> None:
        self.planned = planned
        self.entries: list[FileEntry] = []
        self.results: list[list[Any]] = []
        self.error: str | None = None
        self._directory = directory
        self._whole_files = whole_files
        self._cancelled = threading.Event()
        # A daemon: a process that ends with an error does not wait for storage.
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when ``done``."""
        self._thread.join()

    def give_up(self) -> None:
        """Cancel the save: the thread ends after the current item. Does not wait for it."""
        self._cancelled.set()
        self._given_up.append(self)

    @classmethod
    def await_given_up(cls) -> None:
        """Wait until no cancelled save of this process writes any more."""
        while cls._given_up:
            cls._given_up.pop().wait()

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise GivenUp(f"{self._directory}: the save was cancelled while its files were written")

    def _run(self) -> None:
        try:
            for name, content in self._whole_files.items():
                self._check_wanted()
                self.entries.append(write_file(self._directory, name, content))
            for name, items in self.planned.files:
                self._check_wanted()
                self._write(name, items)
        except BaseException as error:  # noqa: BLE001 - whatever it was, finalisation reports it
            self.error = f"{type(error).__name__}: {error}"
        finally:
            # The copies are freed once they are on disk, before other ranks have finished.
            self.planned.files = []
            self._whole_files = {}

    def _write(self, name: str, items: list[tuple[Any, Any]]) -> None:
        with HashedFile(self._directory, name) as file:
            try:
                for item, data in items:
                    self._check_wanted()
                    self.results.append(_to_json(self._write_one(file, name, item, data)))
            except RuntimeError:
                if file.failure is not None:  # torch's writer raises its own error and would hide it
                    raise file.failure from None
                raise
            self.entries.append(file.commit())

    def _write_one(self, file: HashedFile, name: str, item: Any, data: Any) -> WriteResult:
        transforms = self.planned.writer.transforms
        return _write_item(transforms, file, data, item, name, serialization_format=SerializationFormat.TORCH_SAVE)


def metadata_bytes(planned: PlannedWrite, results: list[list[list[Any]]]) -> bytes:
    """Serialize ``.metadata``: the plan with the place of every item that a rank wrote."""
    capture = _Capture()
    writer = planned.writer
    writer.fs, writer.sync_files = capture, False
    writer.finish(planned.metadata, [[_from_json(record) for record in of_rank] for of_rank in results])
    return capture.content


class _Capture(FileSystem):
    """Receives the one file that a writer's ``finish`` writes, in memory."""

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
    assert place.transform_descriptors is None, "the JSON form of a write result has no field for transforms"
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def _from_json(record: list[Any]) -> WriteResult:
    fqn, offset, index, num_bytes, path, start, length = record
    key = MetadataIndex(fqn, None if offset is None else torch.Size(offset), index)
    return WriteResult(index=key, size_in_bytes=num_bytes, storage_data=_StorageInfo(path, start, length))
