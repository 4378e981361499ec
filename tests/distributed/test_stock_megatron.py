"""Tests that checkpoints are exchanged with Megatron-Core alone in both directions (``helpers/stock_megatron.py``)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_moe
from megatron_ft.corpus.samples import resolve_vocab_size
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.data.batches import open_samples
from megatron_ft.testing.jobs import JobResult, run_job
from tests.helpers.sharing import chosen, runs_extended
from tools import convert_checkpoint, inspect_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # trains

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "stock_megatron.py"
LAST = 6
TWO_RANKS = (
    "model=moe_micro",
    "launch.ranks_per_node=2",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    f"training.train_iterations={LAST}",
    "optimizer.lr=0.01",
    "optimizer.lr_warmup_iterations=1",
    "telemetry.wandb=disabled",
    "telemetry.log_interval_iterations=1",
    "checkpoint.save_interval_iterations=3",
    "checkpoint.keep_last=0",
)
REPLICAS = (
    "launch.num_nodes=2",
    "launch.ranks_per_node=1",
    "parallel.use_distributed_optimizer=false",
    "placement=overlap_search",
    "placement.num_slots_per_rank=6",
    "placement.min_replicas=1",
)
Results = list[list[float]]
"""[loss, gradient norm] of each iteration."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Runs of this project, and what Megatron-Core made of their checkpoints."""

    runs: Path
    own: Mapping[str, JobResult]
    """A run of this project of six iterations, by dtype."""
    stock: Mapping[str, Results]
    """Results of Megatron-Core, by name."""

    def results(self, dtype: str) -> Results:
        """Return the results of this project's run from iteration 1 on."""
        return results_of(self.own[dtype])


def results_of(job: JobResult) -> Results:
    """Return the results of the iterations that a job ran."""
    records = [record for record in job.records("metrics.jsonl") if "loss" in record]
    return [[record["loss"], record["grad_norm"]] for record in records]


def train(runs: Path, warm: str, *words: str, exit_code: int = 0) -> JobResult:
    job = run_job([*TWO_RANKS, *words], forkserver=warm, runs=runs)
    assert job.exit_code == exit_code, job.output
    return job


def run_stock(folder: Path, jobs: Sequence[dict[str, Any]]) -> list[Results]:
    """Run jobs of Megatron-Core in a process that does not import this project."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "jobs.json", "results.json"]
    outcome = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert outcome.returncode == 0, outcome.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def exchange(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str
) -> Exchange:
    """Train with this project, and continue with Megatron-Core, which saves in the layout of Megatron-LM."""
    runs, stock = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("stock")
    own = {
        dtype: train(runs, warm_forkserver, f"precision.params_dtype={dtype}", f"run.name={dtype}")
        for dtype in (("fp32", "bf16") if runs_extended(request) else ("fp32",))
    }
    saved = {dtype: str(job.run_dir / "checkpoints" / "iter_0000003") for dtype, job in own.items()}
    assert convert_checkpoint.main(["to-megatron", saved["fp32"], str(stock / "exported")]) == 0
    config, _ = pretrain_moe.compose(list(TWO_RANKS))
    samples = open_samples(config, "train")
    tokens = [[samples.sample(4 * iteration + number) for number in range(4)] for iteration in range(LAST)]
    np.savez(stock / "samples.npz", tokens=np.array(tokens))
    records = [record for record in own["fp32"].records("metrics.jsonl") if "loss" in record]
    common = {
        "samples": "samples.npz",
        "rates": [record["learning_rate"] for record in records],
        "vocab_size": resolve_vocab_size(config),
        "last": LAST,
    }
    jobs: dict[str, dict[str, Any]] = {
        "fp32": {"world": 2, "load": saved["fp32"], "saves": {"4": "of_fp32"}},
        "exported": {"load": "exported", "saves": {"4": "of_weights"}, "saves_optimizer": False},
        "weights": {"load": "of_weights", "loads_optimizer": False, "last": 0},
        "other format": {"load": saved["fp32"], "last": 4, "saves": {"4": "of_dp"}, "sharding_type": "dp_reshardable"},
    }
    if "bf16" in saved:
        jobs["bf16"] = {"world": 2, "load": saved["bf16"], "dtype": "bf16", "saves": {"4": "of_bf16"}}
    results = run_stock(stock, [{**common, **job} for job in jobs.values()])
    return Exchange(runs=stock, own=own, stock=dict(zip(jobs, results, strict=True)))


@pytest.mark.parametrize("dtype", chosen(["fp32", "bf16"], ["bf16"]))
def test_megatron_continues_from_our_checkpoint(exchange: Exchange, dtype: str) -> None:
    """Losses and gradient norms of iterations 4 to 6 are equal in every bit: both sides call the same functions in the
    same order. Megatron's scheduler gives the learning rates of our run."""
    assert exchange.stock[dtype] == exchange.results(dtype)[3:]


def test_megatron_continues_from_an_exported_folder_on_fewer_ranks(exchange: Exchange) -> None:
    """One rank instead of two adds the gradients in another order."""
    for found, wanted in zip(exchange.stock["exported"], exchange.results("fp32")[3:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "layout"), [("fp32", "DP2"), pytest.param("bf16", "PP2", marks=pytest.mark.extended)]
)
def test_our_run_continues_from_megatrons_checkpoint(
    exchange: Exchange, dtype: str, layout: str, warm_forkserver: str, tmp_path: Path
) -> None:
    """The folder has the layout of Megatron-LM, and its tensors contain the weights of all layers and experts."""
    words = [f"precision.params_dtype={dtype}", f"checkpoint.load={exchange.runs / f'of_{dtype}'}"]
    if layout == "PP2":
        words.append("parallel.pipeline_model_parallel_size=2")
    job = train(tmp_path, warm_forkserver, *words, "checkpoint.trust=true", "run.name=continued")
    assert "its newest checkpoint is iter_0000004" in job.output
    found, wanted = results_of(job), exchange.stock[dtype][1:]
    assert len(found) == 2
    if layout == "DP2":
        assert found == wanted
    else:
        assert found == [pytest.approx(each, rel=1e-5 if dtype == "fp32" else 1e-3) for each in wanted]


def test_our_run_takes_weights_from_megatrons_folder(exchange: Exchange, warm_forkserver: str, tmp_path: Path) -> None:
    """Experts have replicas. The loss of the first iteration is that of Megatron-Core with these weights."""
    words = (f"checkpoint.load_weights={exchange.runs / 'of_weights'}", "checkpoint.trust=true", *REPLICAS)
    job = train(tmp_path, warm_forkserver, *words, "training.exit_at_iteration=1", "run.name=weights")
    ((wanted, _),) = exchange.stock["weights"]
    assert results_of(job)[0][0] == pytest.approx(wanted, rel=1e-6)
    assert wanted < exchange.results("fp32")[0][0] - 0.1


REFUSED = {
    "no trust": ("of_fp32", "load", "set checkpoint.trust=true"),
    "only weights": ("of_weights", "load", "contains only weights; set checkpoint.load_weights instead"),
    "another format": ("of_dp", "load", "has Megatron's format dp_reshardable"),
}


@pytest.mark.parametrize("name", chosen(REFUSED, ["only weights", "another format"]))
def test_what_cannot_be_loaded_is_refused(exchange: Exchange, name: str, warm_forkserver: str, tmp_path: Path) -> None:
    folder, key, message = REFUSED[name]
    words = [f"checkpoint.{key}={exchange.runs / folder}", f"checkpoint.trust={str(name != 'no trust').lower()}"]
    job = run_job([*TWO_RANKS, *words], forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code == 5 and message in job.output


def test_an_exported_folder_is_a_checkpoint_of_this_project(exchange: Exchange, tmp_path: Path) -> None:
    """Its files are links, so it needs no space. The export never changes a folder that exists."""
    exported = exchange.runs / "exported" / "iter_0000003"
    source = exchange.own["fp32"].run_dir / "checkpoints" / "iter_0000003"
    assert DenseReader.open(exported).tensors == DenseReader.open(source).tensors
    assert (exported / ".metadata").samefile(source / ".metadata")
    assert convert_checkpoint.main(["to-megatron", str(source), str(exchange.runs / "exported")]) == 2
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    (damaged / "common.pt").write_bytes(b"x")
    assert convert_checkpoint.main(["to-megatron", str(damaged), str(tmp_path / "out")]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def whole_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of the model with torch alone, as they are stored."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(directory)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.parametrize("name", chosen(["of_fp32", "of_bf16", "of_weights"], ["of_bf16"]))
def test_the_tools_find_every_expert_in_megatrons_checkpoint(
    exchange: Exchange, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-Core stores a weight of all experts of all layers as one tensor."""
    folder, own = exchange.runs / name, "bf16" if name == "of_bf16" else "fp32"
    stored, reader = whole_tensors(folder / "iter_0000004"), DenseReader.open(folder, trust=True)
    first = stored["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    second = stored["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert first.shape == (4, 8, 128, 32) and second.shape == (4, 8, 32, 64)
    for layer in range(4):
        for expert in range(8):
            prefix = f"decoder.layers.{layer}.mlp.experts.experts.{expert}"
            halves = [reader.read(f"{prefix}.linear_fc1.weight_{half}") for half in "wv"]
            assert torch.equal(torch.cat(halves), first[layer, expert])
            assert torch.equal(reader.read(f"{prefix}.linear_fc2.weight"), second[layer, expert])
    ours = DenseReader.open(exchange.own[own].run_dir / "checkpoints" / "iter_0000003")
    assert reader.weights.keys() == ours.weights.keys()
    if name != "of_weights":
        assert reader.tensors.keys() == ours.tensors.keys(), "those of the optimizer have other names"
    assert inspect_checkpoint.main(["list", str(folder), "--trust", "--norms", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    wanted = float(second[3, 7].double().norm())
    assert rows["decoder.layers.3.mlp.experts.experts.7.linear_fc2.weight"]["norm"] == pytest.approx(wanted)
    export = ["to-hf", str(folder), str(tmp_path / "hf"), "--family", "mixtral", "--trust"]
    assert convert_checkpoint.main(export) == 0
    assert (
        convert_checkpoint.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back"), "--vocab-multiple", "64"])
        == 0
    )
    assert inspect_checkpoint.main(["diff", str(folder), str(tmp_path / "back"), "--trust"]) == 0


USES = {
    "of_fp32": {"checkpoint.load": "weights and optimizer state", "checkpoint.load_weights": "only the weights"},
    "of_weights": {"checkpoint.load": "contains only weights", "checkpoint.load_weights": "only the weights"},
    "of_dp": {"checkpoint.load": "has Megatron's format dp_reshardable", "checkpoint.load_weights": "only the weights"},
}


@pytest.mark.parametrize("name", USES)
def test_what_can_use_megatrons_checkpoint(exchange: Exchange, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No strategy can, because a run continues only from its own checkpoints."""
    words = ["strategies", str(exchange.runs / name), "--trust", "--json"]
    assert inspect_checkpoint.main(words) == 0
    uses = {use["name"]: use for use in json.loads(capsys.readouterr().out)["uses"]}
    assert not any(uses[each]["is_possible"] for each in ("living_state", "localized_replay", "rollback", "checkpoint"))
    assert "has no manifest of this project" in uses["checkpoint"]["reason"]
    for key, text in USES[name].items():
        assert text in uses[key]["reason"]
        assert uses[key]["is_possible"] == (f"{key}: {text}" not in REFUSED_USES)


REFUSED_USES = {f"checkpoint.load: {USES[name]['checkpoint.load']}" for name in ("of_weights", "of_dp")}
