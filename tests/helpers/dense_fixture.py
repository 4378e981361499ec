"""Writes ``tests/fixtures/checkpoints/dense.tar.xz``, a dense checkpoint that later versions must read bit for bit.

The file was written by ``python -m tests.helpers.dense_fixture`` with the last code whose checkpoints contained no
``TrainState``. It is not written again: a new format adds another file.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from megatron_ft.config.identity import JobIdentity
from megatron_ft.config.job import CheckpointConfig
from megatron_ft.testing import engines

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
NAME = "iter_0000002"
CONFIG = {
    "model.num_layers": 1,
    "model.hidden_size": 8,
    "model.num_attention_heads": 2,
    "model.ffn_hidden_size": 8,
    "model.moe_ffn_hidden_size": 8,
    "model.num_moe_experts": 2,
    "model.moe_router_topk": 1,
    "model.seq_length": 8,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "precision.params_dtype": "fp16",
    "precision.initial_loss_scale": 64.0,
    "precision.loss_scale_window": 1,
}


def config() -> Any:
    """Return the configuration of the job whose state is saved: FP16, so that there is a loss scale, and a router
    bias."""
    return engines.micro_config(CONFIG)


def open_manager(engine: Any, run_dir: Path) -> Any:
    """Return the manager that saves and loads for ``engine``."""
    from megatron_ft.mcore.checkpoint.manager import CheckpointManager

    return CheckpointManager(
        CheckpointConfig(),
        run_dir=run_dir,
        identity=JobIdentity(run_id="ab" * 16, run_name="fixture", settings={}),
        topology_record={"world_size": 1},
        group=engine.groups.vote,
        dp_cp_group=engine.groups.pg_collection.dp_cp,
        report=lambda _: None,
    )


def digests(engine: Any) -> dict[str, str]:
    """Return the digest of every tensor, and of every other field of the state."""
    record = engine.train_state().to_json()
    record["rng"].pop("cuda", None)
    record |= {f"rng.{name}": value for name, value in record.pop("rng").items()}
    fields = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32] for name, value in record.items()}
    return {**engines.digests(engine), **fields, "schedule_samples": repr(engine.scheduler.num_steps)}


def main() -> None:
    """Train two iterations and save the state."""
    from megatron_ft.mcore.checkpoint.state import DenseState

    engines.install()
    with tempfile.TemporaryDirectory() as folder, engines.engine_of(config()) as engine:
        for iteration in (1, 2):
            engine.run_iteration(iteration)
        manager = open_manager(engine, Path(folder))
        state = DenseState(
            model_chunks=engine.model_chunks,
            optimizer=engine.optimizer,
            scheduler=engine.scheduler,
            host=engine.train_state(),
            consumed_samples=8,
            extra={"num_skipped": 3},
        )
        manager.save(state, 2)
        expected = digests(engine)
        manager.finish()
        shutil.make_archive(str(FOLDER / "dense"), "xztar", Path(folder) / "checkpoints", NAME)
    (FOLDER / "dense.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
