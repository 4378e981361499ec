"""Tests ``tools/generate.py``: the text follows from the logits of the engine, whatever layout saved the checkpoint."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_ft.control.rundir import read_run_config
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.testing import engines
from megatron_ft.testing.jobs import JobResult, run_job
from tests.distributed.test_load_weights import LAYOUTS, SMALL
from tools import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # trains

PROMPT, NUM_TOKENS = "import os\ndef ", 6
RUNS = {"one rank": "one", "PP2 TP2, distributed optimizer": "split"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_forkserver: str) -> dict[str, JobResult]:
    """Return equal runs in two layouts, and a run with delayed scaling, by their names."""
    folder = tmp_path_factory.mktemp("generate")
    jobs = {}
    for name, own in {
        **{name: LAYOUTS[layout] for layout, name in RUNS.items()},
        "delayed": ("precision=fp8_delayed",),
    }.items():
        words = [*SMALL, *own, f"run.name={name}", "optimizer.lr=0.02", "training.train_iterations=6"]
        jobs[name] = run_job(words, forkserver=warm_forkserver, runs=folder)
        assert jobs[name].exit_code == 0, jobs[name].output
    return jobs


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as the tool sets it
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads on cores that other tests use would wait for each other
    yield
    torch.set_num_threads(before)


def generated(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert generate.main([str(path), "--prompt", PROMPT, "--tokens", str(NUM_TOKENS), *words]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def greedy_by_engine(run_dir: Path) -> str:
    """Return the text whose tokens have the largest logits of a training engine with the weights of the run."""
    config = read_run_config(run_dir)
    with engines.groups_of(config) as groups:
        from megatron_ft.mcore.training.engine import TrainingEngine

        samples = {"train": engines.MadeUpSamples(config.model.seq_length)}
        engine = TrainingEngine(
            config, device=torch.device("cpu"), transformer_impl="local", vocab_size=320, samples=samples
        )
        engine.build(groups)
        manager = CheckpointManager(
            config.checkpoint,
            run_dir=run_dir,
            identity=None,  # type: ignore[arg-type]
            topology_record={},
            group=groups.vote,
            dp_cp_group=groups.pg_collection.dp_cp,
            report=lambda record: None,
        )
        manager.load_weights(engine.model_chunks, engine.optimizer, run_dir / "checkpoints" / "iter_0000006")
        engine._start_iteration(0)  # an evaluation
        model, ids = engine.model_chunks[0].eval(), list(PROMPT.encode())
        for _ in range(NUM_TOKENS):
            # The logits of all positions of one whole sample, as in training: causal attention ignores later tokens.
            seen = ids[-config.model.seq_length :]
            tokens = torch.tensor([seen + [7] * (config.model.seq_length - len(seen))])
            with torch.no_grad():
                logits = model(tokens, torch.arange(tokens.shape[1])[None], None)[0, len(seen) - 1, :257]
            ids.append(int(logits.argmax()))
        del groups
        engine.teardown()
    assert max(ids) < 256, "the text has ended"
    return bytes(ids).decode(errors="replace")


def test_greedy_text_has_the_largest_logits_in_every_layout(
    runs: dict[str, JobResult], capsys: pytest.CaptureFixture[str]
) -> None:
    engines.install()
    text = generated(runs["one"].run_dir, capsys)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
    assert generated(runs["one"].run_dir, capsys) == text == greedy_by_engine(runs["one"].run_dir)
    assert generated(runs["split"].run_dir / "checkpoints" / "iter_0000006", capsys) == text

    drawn = [generated(runs["one"].run_dir, capsys, "--temperature", "1.5", "--seed", seed) for seed in "112"]
    assert drawn[0] == drawn[1] and len({text, *drawn}) == 3


def test_scales_follow_from_the_history_of_the_checkpoint(
    runs: dict[str, JobResult], capsys: pytest.CaptureFixture[str]
) -> None:
    engines.install()
    assert generated(runs["delayed"].run_dir, capsys) == greedy_by_engine(runs["delayed"].run_dir)


def test_what_cannot_be_loaded_is_refused(
    runs: dict[str, JobResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = runs["one"].run_dir
    checkpoint = run_dir / "checkpoints" / "iter_0000006"

    def refused(path: Path, code: int, *words: str) -> str:
        assert generate.main([str(path), "--prompt", "a", "--tokens", "1", *words]) == code
        return capsys.readouterr().err

    assert "must be the folder of a run" in refused(tmp_path / "none", 5)
    assert f"{tmp_path.parent.parent / 'config.yaml'}: must contain" in refused(tmp_path, 3)
    assert "--seed=1: has an effect only with --temperature" in refused(run_dir, 2, "--seed", "1")
    assert "--temperature=0.0: must be greater" in refused(run_dir, 2, "--temperature", "0")
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    assert "must be at least 1" in refused(copy, 2, "--tokens", "0")
    data = next((copy / "checkpoints" / checkpoint.name).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    assert f"{data}: damaged" in refused(copy, 5)
    shutil.rmtree(copy / "checkpoints")
    assert "has no checkpoint that can be used: there is none" in refused(copy, 5)
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace("rotary_base: 10000", "rotary_base: 500"))
    assert "model.rotary_base: was 10000, now 500" in refused(checkpoint, 5, "--run", str(copy))
