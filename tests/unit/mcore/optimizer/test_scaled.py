"""Tests Megatron's optimizers with quantized state: memory, what a window contains, and that all regimes train."""

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_ft.config.checks.training import REGIMES as NAMES
from megatron_ft.mcore.optimizer.adamw import masters
from megatron_ft.mcore.optimizer.scaled import has_fp8_values
from megatron_ft.mcore.state.operator_view import OperatorView
from megatron_ft.mcore.state.tensors import named_state, tensor_digests
from megatron_ft.planning.cost.memory import optimizer_bytes
from megatron_ft.planning.snapshot.report import estimate_demand
from megatron_ft.testing import engines
from megatron_ft.topology import Topology
from transformer_engine_ext.adamw import TorchBackend
from transformer_engine_ext.formats import E4M3
from transformer_engine_ext.kernels import KernelBackend
from transformer_engine_ext.quantized import BLOCK_ELEMENTS, quantize_blocks
from transformer_engine_ext.regimes import REGIMES


def regime_keys(name: str, **more: Any) -> dict[str, Any]:
    fp8 = {"precision.params_dtype": "bf16", "precision.fp8": "hybrid", "precision.fp8_recipe": "blockwise"}
    fp16 = {"precision.params_dtype": "fp16", "precision.initial_loss_scale": 64.0}
    return {**(fp8 if name.startswith("fp8") else fp16), "precision.regime": name, **more}


def test_the_configuration_names_all_regimes() -> None:
    assert list(REGIMES) == list(NAMES)


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("name", ["fp16_fp16_fp16_fp16", "fp8_fp8_fp8_fp16"])
def test_state_has_the_formats_of_the_regime_and_masters_have_no_second_copy(name: str, is_sharded: bool) -> None:
    config = engines.micro_config(regime_keys(name, **{"parallel.use_distributed_optimizer": is_sharded}))
    with engines.engine_of(config) as engine:
        engine.run_iteration(1)
        for master in masters(engine.model_chunks, engine.optimizer):
            assert master.tensor.untyped_storage().nbytes() == 4
            for kind, wanted, has_scales in REGIMES[name].full():
                assert master.parts[kind].dtype is wanted.dtype
                num_blocks = -(-master.tensor.numel() // BLOCK_ELEMENTS)
                assert has_scales and master.parts[f"{kind}_scales"].numel() == num_blocks
            assert int(master.parts["step"]) == 1


def test_weights_of_fp8_layers_hold_fp8_values_and_windows_contain_their_codes() -> None:
    with engines.engine_of(engines.micro_config(regime_keys("fp8_fp32_fp32_fp32"))) as engine:
        engine.run_iteration(1)
        weights = {n: t for n, t in named_state(engine.model_chunks, engine.optimizer) if has_fp8_values(t)}
        assert sum(".experts." in name for name in weights) == 16
        for weight in weights.values():
            assert quantize_blocks(weight.detach().float(), E4M3).decode(torch.bfloat16).equal(weight)
        view = OperatorView(engine.model_chunks, engine.optimizer, groups=engine.groups, num_layers=2)
        kinds = {shard.parameter: [part.dtype for part in shard.frozen] for shard in view.shards}
        assert all(kinds[name] == ["float8_e4m3fn", "uint8"] for name in weights)
        assert kinds["embedding.word_embeddings.weight"] == ["bfloat16"]


@pytest.mark.parametrize("name", NAMES)
def test_the_configured_kernel_updates_the_state_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: Counter[str] = Counter()
    for kind in (TorchBackend, KernelBackend):

        def compute(self: Any, *arguments: Any, original: Any = kind.compute) -> None:
            used[self.name] += 1
            original(self, *arguments)

        monkeypatch.setattr(kind, "compute", compute)
    digests = {}
    for backend in ("torch", "cpp"):
        used.clear()
        config = engines.micro_config(regime_keys(name, **{"optimizer.update_backend": backend}))
        with engines.engine_of(config) as engine:
            for number in (1, 2, 3):
                engine.run_iteration(number)
            digests[backend] = tensor_digests(engine.model_chunks, engine.optimizer)
        assert list(used) == [backend]
    assert digests["torch"] == digests["cpp"]


@pytest.mark.parametrize(("name", "full", "frozen"), [("fp16_fp16_fp16_fp16", 6, 2), ("fp8_fp8_fp8_fp16", 4, 1)])
def test_a_dry_run_estimates_the_bytes_of_the_regime(name: str, full: int, frozen: int) -> None:
    config = engines.micro_config(regime_keys(name))
    demand = estimate_demand(config, Topology.of(config.parallel, 1), 64)
    experts = [shard for shard in demand.shards_by_rank[0] if shard.operator.kind == "expert"]
    assert len(experts) == 8
    for shard in experts:
        sizes = [sum(c.num_values(6400) * c.item_bytes for c in found) for found in (shard.full[:-1], shard.frozen)]
        # Each component with scales has 100 more bytes.
        assert sizes == [full * 6400 + 300, frozen * 6400 + (100 if frozen == 1 else 0)]
    assert optimizer_bytes(config, 6400) == {4: (6500, 3 * 6400 + 200), 6: (12900, 4 * 6400 + 200)}[full]
