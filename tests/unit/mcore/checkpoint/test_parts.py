"""Tests the parts of a dense checkpoint that need only one process."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    from megatron_ft.mcore.device import cpu

    if torch.cuda.is_available():
        pytest.skip("the CPU layer refuses to run beside a GPU")
    cpu.install()


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[object]:
    """Yield the process groups of a job of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def draw() -> list[float]:
    return [
        random.random(),
        float(np.random.rand()),
        float(torch.rand(1)),
        random.gauss(0, 1),
        float(np.random.randn()),
    ]


def test_generators_return_to_what_was_captured() -> None:
    from megatron_ft.mcore.state.train_state import _capture_rng, restore_rng

    random.gauss(0, 1)
    np.random.randn()
    state = _capture_rng()
    first = draw()
    draw()
    restore_rng(state)
    assert draw() == first


def test_agreement_carries_json(lonely_group: object) -> None:
    from megatron_ft.mcore.groups import Collectives

    collectives = Collectives(lonely_group)
    record = {"text": "ä" * 1000, "numbers": [1, 2.5, None]}
    assert collectives.gather(record) == [record]
    assert collectives.from_first([None]) == [None]
    assert collectives.errors(None) is None
    assert collectives.errors("disk full") == "rank 0: disk full"
    assert collectives.all(True) and not collectives.any(False)


def test_a_frame_is_filled_where_shards_were() -> None:
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

    from megatron_ft.mcore.optimizer.adamw import fill_frame, split_shards

    shard = ShardedTensor.from_rank_offsets("weight", torch.zeros(2))
    tree = {0: {"state": [shard, 3]}, "groups": LocalNonpersistentObject([1, 2])}
    assert list(split_shards(tree)) == ["0/state/0"]
    filled = fill_frame(tree, {"0/state/0": "loaded"})
    assert filled == {0: {"state": ["loaded", 3]}, "groups": [1, 2]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "uint8"])
def test_a_digest_sees_every_bit_dtype_and_shape(dtype: str) -> None:
    from megatron_ft.mcore.state.tensors import tensor_digest

    tensor = torch.arange(6).to(getattr(torch, dtype))
    base = tensor_digest(tensor)
    changed = tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1
    assert tensor_digest(tensor.clone()) == base
    assert tensor_digest(changed) != base
    assert tensor_digest(tensor.reshape(2, 3)) != base
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0))


def test_a_failed_write_is_kept_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer replaces a failed write by its own error, but the job must report the error of the disk."""
    from megatron_ft.mcore.checkpoint.files import PlannedWrite, WriteJob
    from megatron_ft.snapshot.storage import files

    def fail(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write", fail)
    planned = PlannedWrite(files=[], writer=None, metadata=None)
    job = WriteJob(planned, tmp_path, {"common.pt": b"content"})
    job.submit()
    job.wait()
    assert job.done
    assert job.error is not None and "No space left" in job.error
    assert job.entries == []


def test_a_rank_without_tensors_to_write_saves_its_other_files(tmp_path: Path) -> None:
    """With many ranks, a rank may have no tensor of a checkpoint. There is nothing to copy, and the job begins at
    once."""
    from megatron_ft.mcore.checkpoint.files import PlannedWrite, WriteJob
    from megatron_ft.mcore.checkpoint.manager import CheckpointManager, _Pending
    from megatron_ft.snapshot.capture.capture import CopyBatch

    manager = CheckpointManager.__new__(CheckpointManager)
    manager._copier, manager._before_update = None, []
    job = WriteJob(PlannedWrite(files=[], writer=None, metadata=None), tmp_path, {"common.pt": b"content"})
    manager._pending = _Pending(iteration=1, consumed_samples=0, directory=tmp_path, job=job, started=0.0)
    before_update: list[Callable[[], None]] = []
    manager._copy(CopyBatch.of([], []), before_update)
    job.wait()
    assert job.error is None and [entry.name for entry in job.entries] == ["common.pt"]
    assert before_update == [] and manager._copier is None
