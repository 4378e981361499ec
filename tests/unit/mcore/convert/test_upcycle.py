"""Tests MoE models that are made from dense models: without noise they compute the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.config.identity import JobIdentity, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.checkpoint.state import DenseState
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.convert.weights import weights_manifest, write_weights
from megatron_ft.snapshot.storage.run_settings import check_source
from megatron_ft.testing import engines
from tools import convert_checkpoint

pytestmark = pytest.mark.slow  # trains

DENSE: dict[str, Any] = {"model.num_moe_experts": None, "model.moe_ffn_hidden_size": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "gated": {},
    "tied, LayerNorm, not gated": {
        "model.untie_embeddings_and_output_weights": False,
        "model.normalization": "LayerNorm",
        "model.gated_linear_unit": False,
        "model.activation": "gelu",
    },
    "latent attention": {
        "model.multi_latent_attention": True,
        "model.qk_layernorm": True,
        "model.kv_lora_rank": 16,
        "model.qk_head_dim": 8,
        "model.qk_pos_emb_head_dim": 4,
        "model.v_head_dim": 10,
    },
}
TOKENS = torch.arange(48).reshape(3, 16) * 5 % engines.VOCAB_SIZE


def settings(config: JobConfig) -> Any:
    return settings_of(config, data_fingerprint="", vocab_size=engines.VOCAB_SIZE)


def manager_of(engine: Any, run_dir: Path) -> CheckpointManager:
    return CheckpointManager(
        engine.config.checkpoint,
        run_dir=run_dir,
        identity=JobIdentity(run_id="ab" * 16, run_name="dense", settings=settings(engine.config)),
        topology_record={"world_size": 1},
        group=engine.groups.vote,
        dp_cp_group=engine.groups.pg_collection.dp_cp,
        report=lambda record: None,
    )


def logits(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = engine.model_chunks[0].eval()(TOKENS, torch.arange(16).expand(3, -1), None)
    return found


def save_dense(run_dir: Path, changes: dict[str, Any]) -> tuple[Path, torch.Tensor]:
    """Train a dense model and save it. Return the checkpoint, and logits of the model."""
    with engines.engine_of(engines.micro_config({**DENSE, **changes})) as engine:
        for iteration in (1, 2, 3):
            engine.run_iteration(iteration)
        manager = manager_of(engine, run_dir)
        state = DenseState(
            model_chunks=engine.model_chunks,
            optimizer=engine.optimizer,
            scheduler=engine.scheduler,
            host=engine.train_state(),
        )
        manager.save(state, 3)
        manager.finish()
        return run_dir / "checkpoints" / "iter_0000003", logits(engine)


def run(*words: object, code: int = 0) -> None:
    assert convert_checkpoint.main([str(word) for word in words]) == code


def with_rows(checkpoint: Path, out: Path, rows: int) -> Path:
    """Write a copy of a checkpoint of weights whose embedding has another number of rows."""
    reader = DenseReader.open(checkpoint)
    tensors = {name: reader.read(name) for name in reader.weights}
    name = "embedding.word_embeddings.weight"
    tensors[name] = torch.cat([tensors[name]] * 2)[:rows].contiguous()
    write_weights(out, iter(tensors.items()), weights_manifest("rows", {}, {}), num_bytes=0)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_noise_the_logits_are_those_of_the_dense_model(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = VARIANTS[variant]
    dense, expected = save_dense(tmp_path, changes)
    out, noisy = tmp_path / "moe", tmp_path / "noisy"
    run("upcycle", dense, out, "--experts", 4, "--topk", 2)
    assert "model.num_moe_experts=4" in capsys.readouterr().out
    run("upcycle", dense, noisy, "--experts", 4, "--topk", 2, "--noise", 0.01, "--seed", 5)

    config = engines.micro_config({**changes, "model.num_moe_experts": 4, "model.moe_router_topk": 2})
    check_source(out, settings(config), weights_only=True, trust=False)
    other = settings(engines.micro_config({**changes, "model.num_moe_experts": 4, "model.moe_router_topk": 3}))
    with pytest.raises(CheckpointError, match=r"model\.moe_router_topk: was 2, now 3"):
        check_source(out, other, weights_only=True, trust=False)
    with engines.engine_of(config) as engine:
        new = {name: p.detach().clone() for name, p in engine.model_chunks[0].named_parameters() if "router" in name}
        assert len(new) == 2 and not torch.allclose(logits(engine), expected, atol=1e-3)
        manager_of(engine, tmp_path).load_weights(engine.model_chunks, engine.optimizer, out)
        assert torch.allclose(logits(engine), expected, rtol=0, atol=1e-5)
        loaded = dict(engine.model_chunks[0].named_parameters())
        assert all(torch.equal(loaded[name], value) for name, value in new.items()), "routers of a new model"
        assert engine.run_iteration(1).decision.action == "commit"
        # Megatron would load the rows that both have, and leave zeros in the others.
        for rows in (engines.VOCAB_SIZE - 8, engines.VOCAB_SIZE + 8):
            other_rows = with_rows(out, tmp_path / str(rows), rows)
            with pytest.raises(CheckpointError, match=rf"{other_rows}: embedding.* has the shape \[{rows}, "):
                manager_of(engine, tmp_path).load_weights(engine.model_chunks, engine.optimizer, other_rows)
        manager_of(engine, tmp_path).load_weights(engine.model_chunks, engine.optimizer, noisy)
        assert not torch.allclose(logits(engine), expected, atol=1e-4)

    one, other_one = DenseReader.open(out), DenseReader.open(noisy)
    (name,) = (n for n in other_one.weights if n.startswith("decoder.layers.1.mlp.experts.experts.3.linear_fc2"))
    noise = other_one.read(name) - one.read(name)
    assert noise.std() == pytest.approx(0.01, rel=0.1) and abs(noise.mean()) < 0.001
    assert not torch.equal(other_one.read(name), other_one.read(name.replace("experts.3", "experts.2")))


def test_what_cannot_be_upcycled_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, _ = save_dense(tmp_path, {})
    out = tmp_path / "moe"
    for words, message in (
        (("--experts", 1, "--topk", 1), "--experts=1: must be at least 2"),
        (("--experts", 4, "--topk", 5), "--topk=5: must be in 1..4"),
        (("--experts", 4, "--topk", 1), "--topk=1: must be at least 2"),
        (("--experts", 4, "--topk", 2, "--noise", -1), "--noise=-1.0: must be at least 0"),
    ):
        run("upcycle", dense, out, *words, code=2)
        assert message in capsys.readouterr().err and not out.exists()
    run("upcycle", dense, out, "--experts", 4, "--topk", 2)
    run("upcycle", out, tmp_path / "again", "--experts", 4, "--topk", 2, code=5)
    assert "has model.num_moe_experts=4: must be null" in capsys.readouterr().err
