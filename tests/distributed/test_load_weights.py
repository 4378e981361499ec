"""Tests jobs that start with converted weights (``checkpoint.load_weights``), in several layouts."""

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.testing.jobs import JobResult, run_job
from tools import convert_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # trains

SMALL = (
    "model=moe_micro",
    "model.num_query_groups=2",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.train_iterations=6",
    "optimizer.lr_warmup_iterations=1",
    "telemetry.wandb=disabled",
    "telemetry.log_interval_iterations=1",
)
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one rank": (),
    "PP2 TP2, distributed optimizer": (
        "launch.ranks_per_node=4",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.tensor_model_parallel_size=2",
    ),
    "replicas": (
        "launch.num_nodes=2",
        "parallel.use_distributed_optimizer=false",
        "placement=overlap_search",
        "placement.num_slots_per_rank=6",
        "placement.min_replicas=1",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> JobResult:
    """Return a run whose checkpoint is converted."""
    return train(tmp_path_factory.mktemp("saved"), warm_forkserver, "optimizer.lr=0.01", "run.name=saved")


@pytest.fixture(scope="module")
def weights(saved: JobResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the weights of ``saved`` after a conversion to a Hugging Face folder and back."""
    folder = tmp_path_factory.mktemp("weights")
    checkpoint = saved.run_dir / "checkpoints" / "iter_0000006"
    assert convert_checkpoint.main(["to-hf", str(checkpoint), str(folder / "hf"), "--family", "mixtral"]) == 0
    assert (
        convert_checkpoint.main(["from-hf", str(folder / "hf"), str(folder / "dense"), "--vocab-multiple", "64"]) == 0
    )
    return folder / "dense"


def train(runs: Path, warm: str, *words: str, exit_code: int = 0) -> JobResult:
    job = run_job([*SMALL, *words], forkserver=warm, runs=runs)
    assert job.exit_code == exit_code, job.output
    return job


@pytest.mark.extended
def test_training_continues_from_the_weights(
    saved: JobResult, weights: Path, warm_forkserver: str, tmp_path: Path
) -> None:
    words = (f"checkpoint.load_weights={weights}", "optimizer.lr=0.001")
    jobs = {
        layout: train(tmp_path, warm_forkserver, *words, *keys, f"run.name=run{number}")
        for number, (layout, keys) in enumerate(LAYOUTS.items())
    }
    first = {layout: job.losses[0] for layout, job in jobs.items()}
    # The samples are those of the first iteration of ``saved``, which began with random weights.
    assert first["one rank"] < saved.losses[0] - 0.1
    assert first == {layout: pytest.approx(first["one rank"], rel=1e-6) for layout in LAYOUTS}
    for layout, job in jobs.items():
        assert job.losses[-1] == pytest.approx(jobs["one rank"].losses[-1], rel=1e-4), layout

    # A resumed run continues from its own checkpoint.
    longer = ("training.train_iterations=8", "optimizer.lr_decay_iterations=6", "run.resume=must", "run.name=run0")
    resumed = train(tmp_path, warm_forkserver, *words, *longer)
    assert [record["iteration"] for record in resumed.records("metrics.jsonl") if "loss" in record] == list(range(1, 9))


@pytest.mark.extended
def test_checkpoints_weights_and_means_with_equal_values_train_alike(
    saved: JobResult, weights: Path, warm_forkserver: str, tmp_path: Path
) -> None:
    words = (f"checkpoint.load_weights={weights}", "optimizer.lr=0.001")
    converted = train(tmp_path, warm_forkserver, *words, "run.name=converted")

    # The checkpoint of the run itself has the same weights.
    checkpoint = saved.run_dir / "checkpoints" / "iter_0000006"
    same = train(tmp_path, warm_forkserver, f"checkpoint.load_weights={checkpoint}", *words[1:], "run.name=same")
    assert same.losses == converted.losses

    # So have its weights alone, and their mean with themselves.
    small, mean = tmp_path / "small", tmp_path / "mean"
    assert convert_checkpoint.main(["weights", str(checkpoint), str(small)]) == 0
    assert convert_checkpoint.main(["average", str(checkpoint), str(weights), str(mean)]) == 0
    assert not any("optimizer" in name for name in DenseReader.open(small).tensors)
    for number, path in enumerate((small, mean)):
        same = train(tmp_path, warm_forkserver, f"checkpoint.load_weights={path}", *words[1:], f"run.name=copy{number}")
        assert same.losses == converted.losses


@pytest.mark.extended
def test_a_job_that_only_evaluates_gives_the_same_loss_in_every_layout(
    saved: JobResult, weights: Path, warm_forkserver: str, tmp_path: Path
) -> None:
    only = ("training.evaluate_only=true", "optimizer.lr=0.01")
    more = ("parallel.virtual_pipeline_model_parallel_size=2", "parallel.expert_model_parallel_size=2")
    checkpoint = saved.run_dir / "checkpoints" / "iter_0000006"
    ways: list[tuple[Path, tuple[str, ...]]] = [
        (saved.run_dir, ("run.resume=must",)),
        (tmp_path / "pipeline", (f"checkpoint.load={checkpoint}", *LAYOUTS["PP2 TP2, distributed optimizer"], *more)),
        (tmp_path / "replicas", (f"checkpoint.load_weights={weights}", *LAYOUTS["replicas"])),
    ]
    before = len(saved.records()), sorted((saved.run_dir / "checkpoints").iterdir())
    config = (saved.run_dir / "config.yaml").read_text()
    losses = []
    for run_dir, words in ways:
        job = train(run_dir.parent, warm_forkserver, *only, f"run.name={run_dir.name}", *words)
        (found,) = [record for record in job.records() if record["kind"] == "evaluation"]
        assert found["iteration"] == (0 if run_dir.name == "replicas" else 6)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and "perplexity" in job.output
        summary = json.loads((job.run_dir / "summary.json").read_text())
        assert (summary["evaluation_loss"], summary["evaluation_perplexity"]) == (found["loss"], found["perplexity"])
        if run_dir != saved.run_dir:
            assert not list((job.run_dir / "checkpoints").iterdir()) and job.losses == []
        losses.append(found["loss"])
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * len(ways)
    assert losses[0] < saved.losses[0] - 0.1, "the loaded weights were not used"
    after = sorted((saved.run_dir / "checkpoints").iterdir())
    assert (saved.run_dir / "config.yaml").read_text() == config
    assert len(saved.records()) > before[0] and after == before[1] and len(saved.losses) == 6

    job = train(tmp_path, warm_forkserver, *only, "run.resume=auto", "run.name=none", exit_code=5)
    assert "contains no run, so there is no saved state" in job.output and not (tmp_path / "none").exists()


def test_mixtral_is_trained_further_by_the_documented_commands(
    warm_forkserver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_local_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
    torch.manual_seed(5)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.05)  # otherwise all norms would be equal
    theirs = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "hf" / "mixtral", max_shard_size="200KB")
    files = list((tmp_path / "hf" / "mixtral").glob("model-*.safetensors"))
    assert len(files) > 2, "the layout of the published folder"

    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    section = page[page.index("## Starting a run from weights") :]
    block = section.split("```sh\n")[1].split("```")[0].replace("\\\n", " ")
    convert, (_, _, *job) = (shlex.split(line) for line in block.splitlines())
    monkeypatch.chdir(tmp_path)
    assert convert_checkpoint.main(convert[3:]) == 0
    keys = capsys.readouterr().out.splitlines()[-1].split()
    # The command of the page, with the sizes of this model, on two nodes of four ranks. With such a learning rate, no
    # value changes.
    weights = next(word for word in job if word.startswith("checkpoint.load_weights="))
    words = [
        *job,
        f"checkpoint.load_weights={tmp_path / weights.partition('=')[2]}",
        *(word for word in keys if not word.startswith("model.seq_length")),
        *("model.seq_length=16", "model.max_position_embeddings=64"),
        *("launch.num_nodes=2", "launch.ranks_per_node=4", "parallel.pipeline_model_parallel_size=2"),
        *("parallel.expert_model_parallel_size=2", "training.device=cpu"),
        *(word for word in SMALL if not word.startswith("model")),
        "training.global_batch_size=8",
    ]
    ours = train(tmp_path, warm_forkserver, *words, "optimizer.lr=1e-30", "optimizer.min_lr=0", "run.name=same")
    out = tmp_path / "back"
    saved = ours.run_dir / "checkpoints" / "iter_0000006"
    back = ["to-hf", str(saved), str(out), "--family", "mixtral", "--vocab-size", "300"]
    assert convert_checkpoint.main(back) == 0
    found = transformers.MixtralForCausalLM.from_pretrained(out).state_dict()
    assert found.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(found[name], theirs[name])] == []
    trained = train(tmp_path, warm_forkserver, *words, "optimizer.lr=0.01", "run.name=trained")
    assert trained.losses[0] == ours.losses[0] and trained.losses[-1] < ours.losses[-1] - 0.01


REFUSED = {
    "another model": (("model.rotary_base=500000",), "model.rotary_base: was 10000, now 500000"),
    "other sizes": (("model.num_layers=2",), "model.num_layers: was 4, now 2"),
    "both keys": (("checkpoint.load=x",), "checkpoint.load_weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_before_ranks_start(
    name: str, weights: Path, warm_forkserver: str, tmp_path: Path
) -> None:
    words, message = REFUSED[name]
    job = run_job([*SMALL, f"checkpoint.load_weights={weights}", *words], forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code in (2, 5) and message in job.output and "Traceback" not in job.output
    assert not list(tmp_path.glob("*/logs"))


def test_weights_alone_cannot_continue_a_run(weights: Path, warm_forkserver: str, tmp_path: Path) -> None:
    for words, message in (
        ((f"checkpoint.load={weights}",), "contains only weights; set checkpoint.load_weights instead"),
        ((f"checkpoint.load_weights={tmp_path / 'none'}",), "must be an existing directory"),
        ((f"checkpoint.load_weights={tmp_path}",), "contains no checkpoint: it has no manifest.json and no .metadata"),
    ):
        job = run_job([*SMALL, *words], forkserver=warm_forkserver, runs=tmp_path / "runs")
        assert job.exit_code not in (0, 1) and message in job.output and "Traceback" not in job.output
