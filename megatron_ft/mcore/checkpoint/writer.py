"""Plans one save with Megatron, and writes this rank's files in a thread.

Megatron's own background writer forks processes, and needs a manager process for their results. If the rank is killed,
these processes stay. A fork also copies locks that threads of gloo and gRPC have locked. So this module copies the
tensors when the save begins, and a thread of the rank writes them. Training may change its state at once.
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
    """Plan of the files that this rank writes, with copies of the tensors."""

    files: list[tuple[str, list[tuple[Any, Any]]]]
    """Name of each file, with a list of (write item, bytes or CPU tensor)."""
    writer: Any
    """Megatron's storage writer, which makes the metadata at the end of the save."""
    metadata: Metadata | None
    """Metadata of the whole checkpoint; only on rank 0."""

    def metadata_bytes(self, results: list[list[list[Any]]]) -> bytes:
        """Return the content of ``.metadata``: the plan with the file and the offset of every written item. ``results``
        is ``WriteJob.results`` of every rank."""
        capture = _Capture()
        writer = self.writer
        writer.fs, writer.sync_files = capture, False
        writer.finish(self.metadata, [[_from_json(record) for record in of_rank] for of_rank in results])
        return capture.content


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Megatron's save strategy, which only plans: it stores the plan in ``planned`` and writes nothing."""

    planned: PlannedWrite
    given: frozenset[int] = frozenset()
    """Addresses of the storages of the tensors to be saved."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        buckets = _on_host(writer)
        files = [(name, [*bytes_items, *self._copies(tensors)]) for _, name, (bytes_items, tensors) in buckets]
        writer.write_buckets = None  # otherwise the copies would stay in memory until the end of the save
        self.planned = PlannedWrite(files=files, writer=writer, metadata=save_state_dict_ret[1])
        return AsyncRequest(None, (), [])

    def _copies(self, items: list[tuple[Any, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
        """Copy the tensors that training may change. Megatron has already copied views, and tensors on a GPU."""
        return [(item, tensor.detach().clone() if _storage(tensor) in self.given else tensor) for item, tensor in items]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_host(writer: Any) -> Any:
    if not writer.write_buckets:
        return []
    return writer.preload_tensors(writer.write_buckets, True)


class Planner:
    """Plans saves with Megatron. With ``fully_parallel``, the ranks of ``dp_cp_group`` share the writing; which rank
    writes what is computed once and used for all saves."""

    def __init__(self, dp_cp_group: dist.ProcessGroup, *, fully_parallel: bool) -> None:
        self._base = _PlanningStrategy(BACKEND, BACKEND_VERSION, thread_count=1)
        self._strategy: Any = self._base
        if fully_parallel:
            self._strategy = FullyParallelSaveStrategyWrapper(self._base, dp_cp_group, do_cache_distribution=True)

    def plan(self, shards: dict[str, Any], directory: Path) -> PlannedWrite:
        """Plan the save of ``shards`` into ``directory``, and copy this rank's part. All ranks must call this."""
        leaves = (leaf for leaf in nested_values(shards) if isinstance(leaf, ShardedTensor))
        self._base.given = frozenset(_storage(leaf.data) for leaf in leaves if leaf.data is not None)
        with _without_manager_process():
            self._strategy.async_save(shards, directory)
        planned = self._base.planned
        del self._base.planned
        return planned


@contextmanager
def _without_manager_process() -> Iterator[None]:
    # Megatron's writer would create a manager process with a queue during planning, which a thread does not need.
    module: Any = filesystem_async
    before, module._results_queue = module._results_queue, object()
    try:
        yield
    finally:
        module._results_queue = before


class _GivenUp(Exception):
    """The save was cancelled while its files were written."""


class WriteJob:
    """Writes a :class:`PlannedWrite` in a thread. ``error``, ``entries`` and ``results`` are final if ``done`` is true.
    ``whole_files`` are additional files: names with contents."""

    _given_up: ClassVar[list["WriteJob"]] = []
    """Cancelled saves of this process that may still write, even in a later membership."""

    def __init__(self, planned: PlannedWrite, directory: Path, whole_files: dict[str, bytes]) -> None:
        self.planned = planned
        self.entries: list[FileEntry] = []
        self.results: list[list[Any]] = []
        self.error: str | None = None
        self._directory = directory
        self._whole_files = whole_files
        self._cancelled = threading.Event()
        # A daemon thread, so that a process that ends with an error does not wait for storage.
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until ``done`` is true."""
        self._thread.join()

    def give_up(self) -> None:
        """Cancel the save without waiting. The thread ends after the current item."""
        self._cancelled.set()
        self._given_up.append(self)

    @classmethod
    def await_given_up(cls) -> None:
        """Wait until the threads of all cancelled saves of this process have ended."""
        while cls._given_up:
            cls._given_up.pop().wait()

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise _GivenUp(f"the save to {self._directory} was cancelled while its files were written")

    def _run(self) -> None:
        try:
            for name, content in self._whole_files.items():
                self._check_wanted()
                self.entries.append(write_file(self._directory, name, content))
            for name, items in self.planned.files:
                self._check_wanted()
                self._write(name, items)
        except BaseException as error:  # noqa: BLE001 - the manager reports every error
            self.error = f"{type(error).__name__}: {error}"
        finally:
            # The copies are freed now, without waiting for other ranks.
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


class _Capture(FileSystem):
    """File system in memory for the single file that the writer's ``finish`` writes."""

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
