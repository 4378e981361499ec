"""Ways to save the state of a running job, each called where its training loop would call it: this project's windows,
torch's ``async_save``, and Megatron's format written in the background."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from megatron_ft.config.job import SnapshotConfig
from megatron_ft.events import Record, SnapshotPlanned, SnapshotProblem, WindowDelayed
from megatron_ft.mcore.snapshot.local_window import CONFIG, EXTRAS, PLACEMENT, replay_config
from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
from megatron_ft.mcore.state.train_state import IterationResult
from megatron_ft.mcore.training.trainer import Trainer
from megatron_ft.planning.snapshot.memory import PeerAssignment
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.capture.capture import CaptureFigures, Header
from megatron_ft.snapshot.server.client import REPLICATED_BYTES, KeeperClient

WAIT_SECONDS, POLL_SECONDS = 120.0, 1e-3


class Saver(Protocol):
    """Way to save state. The time spent in ``save`` and ``settle`` blocks training."""

    def save(self, result: IterationResult, seconds: float) -> None:
        """Save the state. Called when an iteration, which took ``seconds``, is complete."""

    def settle(self) -> None:
        """Prepare for an update, which changes the state that was saved last."""

    def drain(self) -> None:
        """Wait for background work. The time of this wait does not count as time that blocks training."""

    def close(self) -> None:
        """End the saver. It cannot be used again."""


class Windows:
    """This project's snapshots, called as ``Trainer`` calls them, of a rank that is connected to its snapshot server by
    ``client``."""

    def __init__(self, trainer: Trainer, snapshot: SnapshotConfig, client: KeeperClient, *, node: int) -> None:
        config = replace(trainer.config, snapshot=snapshot)
        world_size = trainer.context.world_size
        self.planned: list[SnapshotPlanned] = []
        self.num_delayed = 0
        self._engine = trainer.engine
        self._client = client
        settings = replay_config(
            trainer.config,
            trainer.samples["train"].fingerprint(),
            device=trainer.engine.device.type,
            transformer_impl=trainer.engine.transformer_impl,
        )
        self._snapshots = Snapshotter(
            config,
            trainer.engine,
            client=client,
            assignment=PeerAssignment.of([f"node{number}" for number in range(world_size)], world_size - 1),
            node=node,
            header=partial(self._header, json.dumps(settings)),
            report=self._take,
        )
        trainer.engine.before_update.clear()
        self._newest = -1

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes captured so far."""
        return self._snapshots.figures.num_bytes

    @property
    def figures(self) -> CaptureFigures:
        """Return a copy of the figures of all captures so far (bytes and times)."""
        return replace(self._snapshots.figures)

    @property
    def replicated_bytes(self) -> int:
        """Return the number of bytes that the snapshot server has sent to peers so far."""
        arena = self._client._arena
        return 0 if arena is None else arena.status(REPLICATED_BYTES)

    @property
    def plan(self) -> WindowPlan | None:
        """Return the plan of the windows; None before the first."""
        return self._snapshots.plan

    def save(self, result: IterationResult, seconds: float) -> None:
        """See ``Saver``."""
        if result.expert_load is not None and self._snapshots.needs_loads:
            self._snapshots.observe(result.expert_load)
        self._snapshots.after_iteration(result.vote.iteration, result.vote, seconds)

    def settle(self) -> None:
        """See ``Saver``."""
        self._snapshots.settle()

    def expect(self, start_iteration: int) -> None:
        """Set the window that ``drain`` waits for."""
        self._newest = start_iteration

    def drain(self) -> None:
        """See ``Saver``: wait until all copies of the newest window exist."""

        def newest() -> int:
            return max(self._client.buffer_states().replicated.values(), default=-1)

        _wait(lambda: newest() >= self._newest, f"window {self._newest} to be replicated")

    def await_hashes(self) -> None:
        """Wait until the snapshot server has hashed the newest window, if all slices of this window are captured."""
        snapshots = self._snapshots
        if snapshots._start is None and snapshots._last_start is not None:
            self.expect(snapshots._last_start)
            self.drain()

    def close(self) -> None:
        """See ``Saver``."""
        self._snapshots.close()

    def _header(self, settings: str, index: int) -> Header:
        """Return the header of a slice, as the trainer captures it."""
        if index > 0:
            return dict
        state = self._engine.train_state()
        return lambda: {EXTRAS: json.dumps(state.to_json()), PLACEMENT: "null", CONFIG: settings}

    def _take(self, record: Record) -> None:
        if isinstance(record, SnapshotPlanned):
            self.planned.append(record)
        elif isinstance(record, SnapshotProblem):
            raise RuntimeError(f"snapshots: {record.error}")
        self.num_delayed += isinstance(record, WindowDelayed)


class TorchAsync:
    """``torch.distributed.checkpoint.async_save`` of ``state`` in a thread. It allows only one save at a time."""

    def __init__(self, state: dict[str, torch.Tensor], folder: Path, stager: AsyncStager | None) -> None:
        self._state, self._folder, self._stager = state, folder, stager
        self._group = dist.new_group(backend="gloo")
        self._under_way: Any = None
        self._path: Path | None = None

    def save(self, result: IterationResult, _: float) -> None:
        """See ``Saver``."""
        self.drain()
        self._path = self._folder / f"iteration_{result.vote.iteration}"
        self._under_way = async_save(
            self._state, checkpoint_id=self._path, process_group=self._group, async_stager=self._stager
        )

    def settle(self) -> None:
        """See ``Saver``. There is nothing to do, because staging ended before ``save`` returned."""

    def drain(self) -> None:
        """See ``Saver``. Written files are deleted afterwards."""
        if self._under_way is None or self._path is None:
            return
        self._under_way.result()
        self._under_way = None
        if dist.get_rank() == 0:
            shutil.rmtree(self._path)

    def close(self) -> None:
        """See ``Saver``."""
        self.drain()
        if isinstance(self._stager, DefaultStager):
            self._stager.close()


class MegatronFormat:
    """Megatron's ``torch_dist`` files, written in the background by this project's ``CheckpointManager``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def save(self, _: IterationResult, __: float) -> None:
        """See ``Saver``."""
        engine = self._trainer.engine
        self._trainer.checkpoints.save(self._trainer.state({}), engine.iteration)

    def settle(self) -> None:
        """See ``Saver``. There is nothing to do, because tensors were copied before ``save`` returned."""

    def drain(self) -> None:
        """See ``Saver``."""
        self._trainer.checkpoints.finish()

    def close(self) -> None:
        """See ``Saver``."""
        self.drain()


def shared_memory_stager() -> DefaultStager:
    """Return torch's stager that reuses its buffers in shared memory."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    return DefaultStager(options)


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {WAIT_SECONDS} s for {what}")
        time.sleep(POLL_SECONDS)
