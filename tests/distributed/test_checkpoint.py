"""Tests dense checkpoints of real models over gloo: equal bits in the same layout, equal numbers in another layout.

The file is also the program that it tests with: one process imports all modules and forks the ranks of each scenario.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sharing import chosen, runs_extended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {"world": 1},
    "dp2": {"world": 2},
    "dp2_bf16": {"world": 2, "dtype": "bf16"},
    "dp1_fp16": {"world": 1, "dtype": "fp16"},
    "dp2_bf16_plain": {"world": 2, "dtype": "bf16", "distributed_optimizer": False},
    "dp1_fp32_plain": {"world": 1, "distributed_optimizer": False},
    "pp2": {"world": 2, "pp": 2},
    "vpp2": {"world": 2, "pp": 2, "vpp": 2},
    "ep2": {"world": 2, "ep": 2},
    "tp2": {"world": 2, "tp": 2},
    "pp2_ep2": {"world": 4, "pp": 2, "ep": 2},
    "dp2_fp8": {"world": 2, "dtype": "bf16", "regime": "fp8_fp8_fp8_fp16"},
    "dp2_fp8_plain": {
        "world": 2,
        "dtype": "bf16",
        "regime": "fp8_fp16_fp8_fp16",
        "recipe": "blockwise",
        "distributed_optimizer": False,
    },
    "tp2_fp16": {"world": 2, "tp": 2, "dtype": "fp16", "regime": "fp16_fp16_fp16_fp16"},
    "ep2_fp8": {"world": 2, "ep": 2, "dtype": "bf16", "regime": "fp8_fp8_fp8_fp16"},
    "pp2_fp8": {"world": 2, "pp": 2, "dtype": "bf16", "regime": "fp8_fp8_fp8_fp16", "distributed_optimizer": False},
}
SAME = ("dp1_fp16", "dp2_bf16", "dp2_bf16_plain", "dp1_fp32_plain", "vpp2", "ep2", "tp2")
SAME += ("dp2_fp8", "dp2_fp8_plain", "tp2_fp16")
AGAIN = ("dp2_bf16", "dp2_bf16_plain", "tp2", "vpp2", "dp2_fp8")
RESHARDED = (
    *(("ep2", "pp2"), ("pp2", "tp2"), ("tp2", "dp1"), ("dp2", "ep2"), ("dp2", "vpp2")),
    # TP, PP, EP and DP all differ: 2, 1, 1, 1 and 1, 2, 2, 2.
    *(("tp2", "pp2_ep2"), ("pp2_ep2", "tp2")),
    *(("ep2_fp8", "pp2_fp8"), ("pp2_fp8", "dp2_fp8")),
)
EXTENDED_SAME = ("dp2_bf16_plain", "dp1_fp32_plain", "dp1_fp16", "ep2", "tp2", "dp2_fp8_plain")
EXTENDED_AGAIN = ("dp2_bf16_plain", "tp2", "vpp2", "dp2_fp8")
EXTENDED_RESHARDED = (("ep2", "pp2"), ("pp2", "tp2"), ("tp2", "dp1"), ("dp2", "ep2"), ("pp2_ep2", "tp2"))
EXTENDED_RESHARDED += (("pp2_fp8", "dp2_fp8"),)
"""Layouts whose features another layout also has."""
FAULTS = ("fails_on_one_rank", "fails_at_the_end", "damaged", "foreign", "retention", "given_up", "lost_at_the_end")


def run_scenarios(names: list[str], directory: Path) -> dict[str, Any]:
    """Return the outcome of each scenario. One process forks the ranks of all scenarios."""
    command = [sys.executable, __file__, str(directory), *names]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if outcome.returncode:
        pytest.fail(f"scenario runner ended with {outcome.returncode}:\n{outcome.stderr[-6000:]}")
    return json.loads((directory / "outcome.json").read_text())


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    every = runs_extended(request)
    names = (
        [f"same:{name}" for name in SAME if every or name not in EXTENDED_SAME]
        + [f"again:{name}" for name in AGAIN if every or name not in EXTENDED_AGAIN]
        + [f"reshard:{pair[0]}:{pair[1]}" for pair in RESHARDED if every or pair not in EXTENDED_RESHARDED]
    )
    return run_scenarios(names + [f"fault:{name}" for name in FAULTS], tmp_path_factory.mktemp("checkpoints"))


def ranks_of(outcomes: dict[str, Any], name: str) -> list[dict[str, Any]]:
    failures = [rank["error"] for rank in outcomes[name] if "error" in rank]
    assert not failures, failures[0]
    return outcomes[name]


@pytest.mark.parametrize("layout", chosen(SAME, EXTENDED_SAME))
def test_resume_at_the_same_layout_is_bitwise(outcomes: dict[str, Any], layout: str) -> None:
    """A checkpoint is written in the background during training. After the resume, every tensor and every later loss is
    equal."""
    for rank in ranks_of(outcomes, f"same:{layout}"):
        assert len(rank["saved"]) > 20
        assert rank["moved"], "training after the save changed the state"
        assert rank["loaded"] == rank["saved"]
        assert rank["resumed"] == rank["uninterrupted"]
        assert rank["resumed_losses"] == rank["uninterrupted_losses"]
        assert rank["rng_after_load"] == rank["rng_at_save"]
        assert rank["rng_restored"]
        assert rank["consumed_samples"] == 8
        assert rank["extra"] == {"num_skipped": 3}
        assert len(rank["losses"]) == 2 and rank["history"] == [rank["losses"], 0]
        # The names of the first format, so that older checkpoints are read.
        assert rank["stored"] == {"num_skipped": 3, "losses": rank["losses"], "num_consecutive_skips": 0}
        assert "iter_0000004" in rank["saved_again"]


@pytest.mark.parametrize("layout", chosen(AGAIN, EXTENDED_AGAIN))
def test_a_plan_is_used_again_with_the_newest_state(outcomes: dict[str, Any], layout: str) -> None:
    for rank in ranks_of(outcomes, f"again:{layout}"):
        assert rank["is_same_plan"] and rank["consumed"] and len(rank["loaded"]) > 20
        assert rank["num_copied"] > 10_000 and rank["num_waits"] == [1, 0]
        assert rank["differences"] == []


@pytest.mark.parametrize("pair", chosen(RESHARDED, EXTENDED_RESHARDED), ids="-".join)
def test_another_layout_loads_the_same_numbers(outcomes: dict[str, Any], pair: tuple[str, str]) -> None:
    """A checkpoint is loaded in another layout and saved again. Both files contain the same tensors with the same names
    and bits."""
    for rank in ranks_of(outcomes, "reshard:" + ":".join(pair)):
        assert rank["num_tensors"] > 60
        assert rank["different"] == []
        assert rank["num_moments"] > 40
        assert not rank["rng_restored"]
        assert rank["loss"] == pytest.approx(rank["reference_loss"], rel=1e-6)


def test_a_write_that_fails_on_one_rank_is_reported_and_retried(outcomes: dict[str, Any]) -> None:
    records = ranks_of(outcomes, "fault:fails_on_one_rank")[0]["records"]
    assert [record["kind"] for record in records] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]
    assert "rank 1" in records[1]["error"] and "No space" in records[1]["error"]
    for rank in outcomes["fault:fails_on_one_rank"]:
        assert rank["folder_after_failure"] == ["iter_0000001", "latest"]
        assert rank["latest_after_failure"] == "iter_0000001"
        assert rank["latest"] == "iter_0000003"
        assert rank["iterations"] == 3


def test_a_manifest_that_cannot_be_written_is_reported_and_retried(outcomes: dict[str, Any]) -> None:
    """Every write call of rank 0 fails once with ENOSPC. The earlier checkpoint is valid after each failure."""
    rank = ranks_of(outcomes, "fault:fails_at_the_end")[0]
    assert rank["num_write_calls"] > 50
    assert rank["num_failed"] == rank["num_tried"] >= 12
    assert rank["valid_each_time"] == rank["num_tried"]


def test_damage_is_named_and_the_older_checkpoint_used(outcomes: dict[str, Any]) -> None:
    for rank in ranks_of(outcomes, "fault:damaged"):
        assert rank["newest"] == "iter_0000001"
        assert ".distcp" in rank["refused"]
        assert rank["opened_by_megatron"] == []
    failed = [record for record in outcomes["fault:damaged"][0]["records"] if record["kind"] == "checkpoint_failed"]
    assert len(failed) == 1 and ".distcp" in failed[0]["error"] and "renamed to damaged" in failed[0]["error"]


def test_a_foreign_checkpoint_needs_trust(outcomes: dict[str, Any]) -> None:
    for rank in ranks_of(outcomes, "fault:foreign"):
        assert "checkpoint.trust=true" in rank["refused"]
        assert rank["trusted_iteration"] == 1
        assert "does not match this model" in rank["other_model"]


def test_retention(outcomes: dict[str, Any]) -> None:
    (rank,) = ranks_of(outcomes, "fault:retention")
    assert rank["kept"] == ["iter_0000002", "iter_0000003", "latest"]
    assert rank["resumed"] == [["iter_0000003", "iter_0000004", "latest"], ["iter_0000005", "latest"]]


def test_a_save_is_given_up_without_waiting_for_storage(outcomes: dict[str, Any]) -> None:
    """The next save into the same folder begins only when nothing is written for the abandoned save any more."""
    ranks = ranks_of(outcomes, "fault:given_up")
    assert [rank["was_writing"] for rank in ranks] == [False, True]
    assert ranks[1]["num_written"] == 0 and "was cancelled while its files were written" in ranks[1]["given_up"]
    for rank in ranks:
        assert rank["complete_after"] == ["iter_0000001"]
        assert rank["opened_at"] >= ranks[1]["released_at"]
        assert rank["verified"] == 2 and rank["folder"] == ["iter_0000001", "iter_0000002", "latest"]


def test_a_save_is_pending_until_all_ranks_know_its_outcome(outcomes: dict[str, Any]) -> None:
    """Rank 1 dies while rank 0 writes the manifest. The save then counts as abandoned, like any other save that ranks
    did not complete."""
    survivor = outcomes["fault:lost_at_the_end"][0]
    assert survivor == {"pending": 2, "abandoned": "iter_0000002", "is_complete": True, "pending_after": None}


# -- the runner: everything below is executed in forked ranks ------------------------------------------------


class RandomSamples:
    """Token sequences that depend only on the index."""

    def sample(self, index: int) -> Any:
        import numpy as np

        return np.random.default_rng(index).integers(0, 64, 17, dtype=np.int64)


class Rank:
    """One rank with an engine and a checkpoint manager."""

    def __init__(self, layout: str, directory: Path, *, hidden_dropout: float = 0.1, **checkpoint: Any) -> None:
        import torch

        from megatron_ft.config.job import CheckpointConfig
        from megatron_ft.mcore.training.engine import TrainingEngine

        self.directory, self.records = directory, []
        self.config = make_config(LAYOUTS[layout])
        self.config.model.hidden_dropout = hidden_dropout
        self.checkpoint_config = CheckpointConfig(**checkpoint)
        self.engine = TrainingEngine(
            self.config,
            device=torch.device("cpu"),
            transformer_impl="local",
            vocab_size=64,
            samples={"train": RandomSamples(), "valid": RandomSamples()},
        )
        self.form()

    def form(self) -> None:
        import torch.distributed as dist

        from megatron_ft.mcore.groups import Groups
        from megatron_ft.topology import Topology

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ["STORE"], world)
        groups = Groups.form(
            self.config.parallel,
            store=store,
            rank=rank,
            world_size=world,
            generation=0,
            device="cpu",
            timeout_seconds=120,
        )
        self.groups = groups
        self.topology = {
            name: getattr(Topology.of(self.config.parallel, world), name) for name in Topology.__dataclass_fields__
        }
        self.rebuild()

    def rebuild(self) -> None:
        """Create a new model, optimizer and manager on the same groups, as a restarted process does."""
        from megatron_ft.config.identity import JobIdentity
        from megatron_ft.mcore.checkpoint.manager import CheckpointManager

        self.engine.build(self.groups)
        self.engine.iteration = 0
        self.manager = CheckpointManager(
            self.checkpoint_config,
            run_dir=self.directory,
            identity=JobIdentity(run_id="test", run_name="test", settings={}),
            topology_record=self.topology,
            group=self.groups.vote,
            dp_cp_group=self.groups.pg_collection.dp_cp,
            report=self.records.append,
        )

    def state(self) -> Any:
        from megatron_ft.mcore.checkpoint.state import DenseState

        engine = self.engine
        return DenseState(
            model_chunks=engine.model_chunks,
            optimizer=engine.optimizer,
            scheduler=engine.scheduler,
            host=engine.train_state(),
            consumed_samples=engine.iteration * 4,
            extra={"num_skipped": 3},
        )

    def train(self, until: int) -> list[float]:
        losses = []
        while self.engine.iteration < until:
            losses.append(self.engine.run_iteration(self.engine.iteration + 1).vote.loss)
            self.manager.poll()
        return losses

    def load(self, directory: Path) -> Any:
        state = self.state()
        state.extra = {}
        result = self.manager.load(state, directory)
        self.engine.restore(state.host)
        return state, result

    def digests(self) -> dict[str, str]:
        from megatron_ft.mcore.state.tensors import tensor_digests

        return tensor_digests(self.engine.model_chunks, self.engine.optimizer)


def make_config(layout: dict[str, Any]) -> Any:
    from megatron_ft.config.job import JobConfig

    config = JobConfig()
    model, parallel, training = config.model, config.parallel, config.training
    model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length = 4, 32, 4, 16
    model.ffn_hidden_size = model.moe_ffn_hidden_size = 64
    model.num_moe_experts, model.moe_first_dense_layers = 4, 1
    model.moe_router_score_function, model.moe_router_enable_expert_bias = "sigmoid", True
    parallel.tensor_model_parallel_size = layout.get("tp", 1)
    parallel.pipeline_model_parallel_size = layout.get("pp", 1)
    parallel.virtual_pipeline_model_parallel_size = layout.get("vpp")
    parallel.expert_model_parallel_size = layout.get("ep", 1)
    parallel.use_distributed_optimizer = layout.get("distributed_optimizer", True)
    config.precision.params_dtype = layout.get("dtype", "fp32")
    config.precision.regime = layout.get("regime")
    if layout.get("regime", "").startswith("fp8"):
        # With delayed scaling, histories are stored, too.
        config.precision.fp8, config.precision.fp8_recipe = "hybrid", layout.get("recipe", "delayed")
    config.precision.initial_loss_scale, config.precision.loss_scale_window = 256.0, 1
    training.micro_batch_size, training.global_batch_size, training.train_iterations = 1, 4, 20
    training.device = "cpu"
    return config


def rng_words() -> str:
    import random

    import numpy as np
    import torch

    return f"{random.getstate()[1][:3]} {np.random.get_state()[1][:3]} {torch.get_rng_state().sum()}"


def scenario_again(layout: str, directory: Path) -> dict[str, Any]:
    """Save three times with the same plan, and the last state also with a new one. The state of the last save is copied
    only when the next update is due."""
    import threading

    import torch.distributed as dist

    from megatron_ft.snapshot.capture.capture import _ThreadCopier

    rank = Rank(layout, directory)
    waits, is_due, copy, num_copied = rank.engine.before_update, threading.Event(), _ThreadCopier._copy, 0

    def copy_late(copier: Any) -> None:
        nonlocal num_copied
        assert is_due.wait(60)
        num_copied = copier._batch.num_bytes
        copy(copier)

    rank.train(1)
    rank.manager.save(rank.state(), 1)
    first = rank.manager._planner._planned
    rank.train(2)
    rank.manager.save(rank.state(), 2)
    rank.train(3)
    _ThreadCopier._copy = copy_late
    saved = rank.state()
    saved.before_update = waits
    rank.manager.save(saved, 3)
    num_waits = len(waits)
    waits.insert(0, is_due.set)
    rank.train(4)  # changes the state while it is written
    waits.remove(is_due.set)
    _ThreadCopier._copy = copy
    scribble(rank)
    rank.manager.finish()
    is_same_plan = first is not None and rank.manager._planner._planned.writer is first.writer
    rank.rebuild()
    state, _ = rank.load(directory / "checkpoints" / "iter_0000003")
    loaded = rank.digests()
    rank.manager.save(rank.state(), 3)
    rank.manager.finish()
    dist.barrier()
    return {
        "is_same_plan": is_same_plan,
        "num_copied": num_copied,
        "num_waits": [num_waits, len(waits)],
        "consumed": saved.consumed_samples == state.consumed_samples,
        "loaded": loaded,
        "differences": _differences(directory / "checkpoints") if dist.get_rank() == 0 else [],
    }


def _differences(folder: Path) -> list[str]:
    """Compare the repeated save of iteration 3 with the one that was planned anew."""
    import torch

    from megatron_ft.mcore.convert.dense_files import DenseReader

    again, new = (folder / name for name in ("iter_0000003", "iter_0000003.1"))
    readers = [DenseReader.open(path) for path in (again, new)]
    found = [name for name in readers[0].tensors if not torch.equal(*(reader.read(name) for reader in readers))]
    found += sorted(readers[0].tensors.keys() ^ readers[1].tensors.keys())
    common = [torch.load(path / "common.pt", weights_only=False) for path in (again, new)]
    return found + [key for key in common[0].keys() | common[1].keys() if common[0].get(key) != common[1].get(key)]


def scenario_same(layout: str, directory: Path) -> dict[str, Any]:
    rank = Rank(layout, directory)
    losses = rank.train(2)
    saved, rng_at_save = rank.digests(), rng_words()
    rank.manager.save(rank.state(), 2)
    scribble(rank)
    moved = rank.digests() != saved
    rank.manager.finish()
    rank.rebuild()
    rank.engine.history = type(rank.engine.history)()
    state, result = rank.load(directory / "checkpoints" / "iter_0000002")
    history = rank.engine.history
    loaded, rng_after_load = rank.digests(), rng_words()
    first = rank.train(4)
    after_first = rank.digests()
    rank.manager.save(rank.state(), 4)
    rank.manager.finish()
    rank.rebuild()
    reference = rank.train(2) and rank.train(4)
    return {
        "saved": saved,
        "moved": moved,
        "loaded": loaded,
        "resumed": after_first,
        "resumed_losses": first,
        "uninterrupted": rank.digests(),
        "uninterrupted_losses": reference,
        "rng_at_save": rng_at_save,
        "rng_after_load": rng_after_load,
        "rng_restored": result.rng_restored,
        "consumed_samples": state.consumed_samples,
        "extra": state.extra,
        "stored": rank.manager.read_extra(directory / "checkpoints" / "iter_0000002"),
        "losses": losses,
        "history": [list(history.losses), history.num_consecutive_skips],
        "saved_again": sorted(path.name for path in (directory / "checkpoints").iterdir()),
    }


def scribble(rank: Rank) -> None:
    """Overwrite every weight, master weight and moment directly after the call that saves them."""
    import random

    import torch

    from megatron_ft.mcore.state.tensors import named_state

    with torch.no_grad():
        for _, tensor in named_state(rank.engine.model_chunks, rank.engine.optimizer):
            tensor.fill_(7)
    torch.rand(3)
    random.random()


def scenario_reshard(saved: str, loaded: str, directory: Path) -> dict[str, Any]:
    """Run two jobs in sequence: ``saved`` writes a checkpoint; ``loaded`` reads it, writes another one, and compares
    both."""
    if not (directory / "checkpoints").exists() and os.environ["STAGE"] == "0":
        rank = Rank(saved, directory, hidden_dropout=0.0)
        rank.train(2)
        rank.manager.save(rank.state(), 2)
        rank.manager.finish()
        loss = rank.train(3)[0]
        (directory / "loss").write_text(repr(loss))
        return {}
    rank = Rank(loaded, directory, hidden_dropout=0.0)
    from transformer_engine_ext.quantized import byte_view

    _, result = rank.load(directory / "checkpoints" / "iter_0000002")
    rank.manager.save(rank.state(), 2)
    rank.manager.finish()
    first, again = (read_tensors(directory / "checkpoints" / name) for name in ("iter_0000002", "iter_0000002.1"))
    different = sorted(first.keys() ^ again.keys())
    different += [key for key in first.keys() & again.keys() if not byte_view(first[key]).equal(byte_view(again[key]))]
    return {
        "num_tensors": len(first),
        "num_moments": sum("exp_avg" in key for key in first),
        "different": different,
        "rng_restored": result.rng_restored,
        "loss": rank.train(3)[0],
        "reference_loss": float((directory / "loss").read_text()),
    }


def read_tensors(directory: Path) -> dict[str, Any]:
    """Read every tensor of a checkpoint completely, using only torch."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(directory)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def scenario_fault(name: str, directory: Path) -> dict[str, Any]:
    layout = "dp1" if name in ("fails_at_the_end", "retention") else "dp2"
    rank = Rank(layout, directory, keep_last=0 if name != "retention" else 2)
    rank.train(1)
    rank.manager.save(rank.state(), 1)
    rank.manager.finish()
    return globals()[f"fault_{name}"](rank, directory / "checkpoints")


def break_writes(only_rank: int, at_call: int) -> list[int]:
    """Make the given write call of this process fail once. Return the counter of write calls."""
    import errno

    from megatron_ft.snapshot.storage import files

    calls = [0]

    def write(descriptor: int, data: memoryview) -> int:
        calls[0] += 1
        if int(os.environ["RANK"]) == only_rank and calls[0] == at_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data)

    files._write = write
    return calls


def fault_fails_on_one_rank(rank: Rank, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist

    rank.train(2)
    break_writes(1, 5)
    rank.manager.save(rank.state(), 2)
    rank.manager.finish()
    dist.barrier()
    after, latest = sorted(os.listdir(folder)), json.loads((folder / "latest").read_text())["checkpoint"]
    dist.barrier()
    rank.train(3)
    rank.manager.save(rank.state(), 3)
    rank.manager.finish()
    dist.barrier()
    return {
        "records": rank.records,
        "folder_after_failure": after,
        "latest_after_failure": latest,
        "latest": json.loads((folder / "latest").read_text())["checkpoint"],
        "iterations": rank.engine.iteration,
    }


def fault_fails_at_the_end(rank: Rank, folder: Path) -> dict[str, Any]:
    from megatron_ft.snapshot.storage.manifest import Manifest

    calls = break_writes(0, -1)
    rank.train(2)
    rank.manager.save(rank.state(), 2)
    rank.manager.finish()
    num_calls, valid = calls[0], 0
    tried = sorted({*range(1, 7), *range(7, num_calls, max(1, num_calls // 6)), *range(num_calls - 3, num_calls + 1)})
    rank.records.clear()
    for number, call in enumerate(tried):
        rank.train(3 + number)
        break_writes(0, call)
        rank.manager.save(rank.state(), 3 + number)
        rank.manager.finish()
        valid += Manifest.verified(folder / "iter_0000002").iteration == 2 and rank.manager.newest() is not None
    failed = [record for record in rank.records if record["kind"] == "checkpoint_failed"]
    return {
        "num_write_calls": num_calls,
        "num_tried": len(tried),
        "num_failed": len(failed),
        "valid_each_time": valid,
    }


def fault_damaged(rank: Rank, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from megatron_ft.errors import CheckpointError
    from megatron_ft.mcore.checkpoint import manager

    rank.train(2)
    rank.manager.save(rank.state(), 2)
    rank.manager.finish()
    victim = max((folder / "iter_0000002").glob("*.distcp"), key=lambda path: path.stat().st_size)
    if int(os.environ["RANK"]) == 0:
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    dist.barrier()
    opened: list[str] = []
    manager.dist_checkpointing = type(
        "Spy", (), {"load": staticmethod(lambda *a, **k: opened.append("load") or dist_checkpointing.load(*a, **k))}
    )
    refused = ""
    try:
        rank.load(folder / "iter_0000002")
    except CheckpointError as error:
        refused = str(error)
    before = list(opened)
    newest = rank.manager.newest()
    assert newest is not None
    rank.load(newest)
    return {"refused": refused, "newest": newest.name, "opened_by_megatron": before, "records": rank.records}


def fault_foreign(rank: Rank, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron_ft.errors import CheckpointError

    directory = folder / "iter_0000001"
    other = ""
    rank.config.model.num_layers = 3
    rank.rebuild()
    try:
        rank.load(directory)
    except CheckpointError as error:
        other = str(error)
    rank.config.model.num_layers = 4
    rank.rebuild()
    dist.barrier()
    if int(os.environ["RANK"]) == 0:
        (directory / "manifest.json").unlink()
    dist.barrier()
    refused = ""
    try:
        rank.load(directory)
    except CheckpointError as error:
        refused = str(error)
    rank.checkpoint_config.trust = True
    state, _ = rank.load(directory)
    return {"refused": refused, "trusted_iteration": state.host.iteration, "other_model": other}


def fault_retention(rank: Rank, folder: Path) -> dict[str, Any]:
    for iteration in (2, 3):
        rank.train(iteration)
        rank.manager.save(rank.state(), iteration)
    rank.manager.finish()
    kept, resumed = sorted(os.listdir(folder)), []
    rank.checkpoint_config.keep_last = 1
    rank.rebuild()
    rank.load(folder / "iter_0000003")
    for iteration in (4, 5):
        rank.train(iteration)
        rank.manager.save(rank.state(), iteration)
        rank.manager.finish()
        resumed.append(sorted(os.listdir(folder)))
    return {"kept": kept, "resumed": resumed}


def fault_given_up(rank: Rank, folder: Path) -> dict[str, Any]:
    """Block the storage of rank 1 until the next save waits for it."""
    import threading
    import time

    import torch.distributed as dist

    from megatron_ft.snapshot.storage import checkpoints, files
    from megatron_ft.snapshot.storage.manifest import Manifest

    rank.train(2)
    goes_on, stands, times = threading.Event(), threading.Event(), {"released_at": 0.0, "opened_at": 0.0}

    def write(descriptor: int, data: memoryview) -> int:
        if int(os.environ["RANK"]) == 1 and not goes_on.is_set():
            stands.set()
            assert goes_on.wait(60)
        return os.write(descriptor, data)

    def start_directory(parent: Path, iteration: int) -> Path:
        times["opened_at"] = time.monotonic()
        return make(parent, iteration)

    def release() -> None:
        times["released_at"] = time.monotonic()
        goes_on.set()

    files._write = write
    rank.manager.save(rank.state(), 2)
    job = rank.manager._pending.job
    if int(os.environ["RANK"]) == 1:
        assert stands.wait(60)
    else:
        job.wait()
    watchdog = threading.Timer(20, goes_on.set)
    watchdog.start()
    rank.manager.abandon()
    was_writing = not job.done and not goes_on.is_set()
    watchdog.cancel()
    rank.rebuild()
    rank.engine.iteration = 2
    rank.manager.poll()
    complete = [found.path.name for found in checkpoints.list_checkpoints(folder) if found.complete]
    dist.barrier()
    make, checkpoints.start_directory = checkpoints.start_directory, start_directory
    threading.Timer(1.0, release).start()
    rank.manager.save(rank.state(), 2)
    rank.manager.finish()
    dist.barrier()
    return {
        "was_writing": was_writing,
        "num_written": len(job.entries),
        "given_up": job.error,
        "complete_after": complete,
        "released_at": times["released_at"],
        "opened_at": times["opened_at"] if int(os.environ["RANK"]) == 0 else float("inf"),
        "verified": Manifest.verified(folder / "iter_0000002").iteration,
        "folder": sorted(os.listdir(folder)),
    }


def fault_lost_at_the_end(rank: Rank, folder: Path) -> dict[str, Any]:
    rank.train(2)
    rank.manager.save(rank.state(), 2)
    if int(os.environ["RANK"]) == 1:
        rank.manager._commit = lambda *_: os._exit(1)
    try:
        rank.manager.finish()
    except RuntimeError:
        pending = rank.manager.pending_iteration
    abandoned = rank.manager.abandon()
    return {
        "pending": pending,
        "abandoned": None if abandoned is None else abandoned.name,
        "is_complete": (folder / "iter_0000002" / "manifest.json").exists(),
        "pending_after": rank.manager.pending_iteration,
    }


def run_rank(name: str, directory: Path) -> dict[str, Any]:
    kind, *arguments = name.split(":")
    return globals()[f"scenario_{kind}"](*arguments, directory)


def world_of(name: str, stage: int) -> int:
    kind, *arguments = name.split(":")
    if kind == "fault":
        return 1 if arguments[0] in ("fails_at_the_end", "retention") else 2
    return LAYOUTS[arguments[stage]]["world"]


def run_world(name: str, stage: int, directory: Path) -> list[dict[str, Any]]:
    world = world_of(name, stage)
    with tempfile.TemporaryDirectory() as scratch:
        children = [fork_rank(name, stage, directory, rank, world, scratch) for rank in range(world)]
        for child in children:
            os.waitpid(child, 0)
        return [
            json.loads(path.read_text()) if (path := Path(scratch, f"{rank}.json")).exists() else {"error": "died"}
            for rank in range(world)
        ]


def fork_rank(name: str, stage: int, directory: Path, rank: int, world: int, scratch: str) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), STORE=f"{scratch}/store", STAGE=str(stage))
    try:
        outcome = run_rank(name, directory)
    except BaseException:  # noqa: BLE001 - any failure is reported to the parent
        outcome = {"error": traceback.format_exc()}
        print(outcome["error"], file=sys.stderr, flush=True)
    Path(scratch, f"{rank}.tmp").write_text(json.dumps(outcome))
    os.rename(f"{scratch}/{rank}.tmp", f"{scratch}/{rank}.json")
    os._exit(0)


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    import torch

    from megatron_ft.mcore.device import cpu

    torch.set_num_threads(1)
    cpu.install()
    import megatron_ft.mcore.checkpoint
    import megatron_ft.mcore.training.engine  # noqa: F401
    from megatron_ft.testing.engines import be_ready_to_fork

    be_ready_to_fork()
    root, outcomes = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        directory = root / name.replace(":", "_")
        directory.mkdir()
        stages = 2 if name.startswith("reshard") else 1
        for stage in range(stages):
            outcomes[name] = run_world(name, stage, directory)
    (root / "outcome.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
