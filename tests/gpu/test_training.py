"""A short run on one GPU over NCCL: the numbers of the CPU, with either kind of layer, bit for bit again."""

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import engines

PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from megatron_ft.config.serialize import from_dict
from megatron_ft.mcore.device.install import install, take_device
from megatron_ft.mcore.rank_main import _prepare_process
from megatron_ft.planning.rank_environment import rank_environment

config = from_dict(json.loads(sys.argv[1]))
for name, value in rank_environment(config).items():
    os.environ.setdefault(name, value)
device = take_device(config, node=0, local_rank=0)
device_type, transformer_impl = install(config)
_prepare_process(config)
from megatron_ft.mcore.state.digest import state_digest
from megatron_ft.mcore.groups import form_groups
from megatron_ft.mcore.training.engine import TrainingEngine
from tests.helpers.engines import MadeUpSamples, VOCAB_SIZE

groups = form_groups(config.parallel, store=dist.HashStore(), rank=0, world_size=1, generation=0,
                     device=device_type, timeout_seconds=60)
samples = MadeUpSamples(config.model.seq_length)
engine = TrainingEngine(config, device=device, transformer_impl=transformer_impl, vocab_size=VOCAB_SIZE,
                        samples={"train": samples, "valid": samples})
engine.build(groups)
votes = [engine.run_iteration(number).vote for number in range(1, 6)]
print(json.dumps({
    "device": device_type, "transformer_impl": transformer_impl,
    "losses": [vote.loss for vote in votes], "grad_norms": [vote.grad_norm for vote in votes],
    "aux_losses": [vote.aux_loss for vote in votes], "load": engine.expert_load().tolist(),
    "evaluation": engine.evaluate(), "digest": state_digest(engine.model_chunks, engine.optimizer),
}))
"""
"""A process of its own: a process that has been readied for one device cannot serve the other."""

MODEL = {
    "model.num_layers": 4,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
}


def trained(overrides: dict[str, Any], *, device: str) -> dict[str, Any]:
    """Five iterations on ``device``."""
    from megatron_ft.config.serialize import to_dict

    config = engines.micro_config({**MODEL, **overrides, "training.device": device})
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(to_dict(config))],
        cwd=engines.REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    result: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
    assert result["device"] == device
    return result


def has_transformer_engine() -> bool:
    from megatron_ft.errors import SoftwareError
    from megatron_ft.mcore.device.software import inspect_software

    with contextlib.suppress(SoftwareError):
        return inspect_software().transformer_engine is not None
    return False


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    return trained({}, device="cpu")


def close(result: dict[str, Any], expected: dict[str, Any], rel: float) -> None:
    for key in ("losses", "grad_norms", "aux_losses"):
        assert result[key] == pytest.approx(expected[key], rel=rel), key
    assert result["evaluation"] == pytest.approx(expected["evaluation"], rel=rel)


def test_fp32_has_the_numbers_of_the_cpu(on_cpu: dict[str, Any]) -> None:
    on_gpu = trained({"training.transformer_impl": "local"}, device="cuda")
    close(on_gpu, on_cpu, rel=1e-4)
    assert [sum(layer) for layer in on_gpu["load"]] == [sum(layer) for layer in on_cpu["load"]]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deterministic_runs_repeat_to_the_bit(precision: str, on_cpu: dict[str, Any]) -> None:
    overrides = {"training.transformer_impl": "local", "precision.params_dtype": precision}
    first, second = (trained(overrides, device="cuda") for _ in range(2))
    assert first == second
    assert first["losses"] == pytest.approx(on_cpu["losses"], rel=2e-2)


def test_transformer_engine_has_the_numbers_of_the_local_layers(on_cpu: dict[str, Any]) -> None:
    if not has_transformer_engine():
        pytest.skip("needs a complete transformer_engine>=2.9,<2.12")
    overrides = {"training.transformer_impl": "transformer_engine", "precision.params_dtype": "bf16"}
    result = trained(overrides, device="cuda")
    assert result["transformer_impl"] == "transformer_engine"
    assert result["losses"] == pytest.approx(on_cpu["losses"], rel=2e-2)
