"""Tests the fixes that every device needs before Megatron can train. Each test runs in a new process without the CPU
layer."""

import subprocess
import sys

import pytest

_GATING = """
import torch

torch.cuda.is_available = lambda: True  # the branch of a machine with GPUs; nothing below touches one

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict, to_dict
from megatron_ft.mcore.device.install import install
from megatron_ft.testing.engines import micro_config

config = from_dict({**to_dict(micro_config()), "training": {**to_dict(micro_config())["training"], "device": "cuda"}})
assert install(config) == ("cuda", "local")

from megatron.core.transformer.moe.moe_utils import router_gating_linear

tokens = torch.randn(3, 2, 8, requires_grad=True)
weight = torch.randn(4, 8, requires_grad=True)
logits = router_gating_linear(tokens, weight, None, torch.float32)
assert torch.equal(logits, tokens @ weight.t()), logits
logits.sum().backward()
assert tokens.grad is not None and weight.grad is not None
assert not torch.cuda.is_initialized()
"""


@pytest.mark.timeout(400)
def test_the_gating_of_the_router_runs_after_the_install_on_cuda() -> None:
    """Runs forward and backward without Transformer Engine and without the CPU layer."""
    done = subprocess.run([sys.executable, "-c", _GATING], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
