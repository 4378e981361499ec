"""Tests ``ScaledAdamW``: state of codes and scales, updates as a whole or in shards, and that all regimes train."""

import pytest
import torch

from transformer_engine_ext.adamw import Hyperparameters, ScaledState, update
from transformer_engine_ext.formats import E4M3
from transformer_engine_ext.linear import LinearScalers, linear
from transformer_engine_ext.optimizer import ParameterRange, ScaledAdamW
from transformer_engine_ext.providers import TorchProvider
from transformer_engine_ext.quantized import byte_view
from transformer_engine_ext.recipes import Recipe
from transformer_engine_ext.regimes import REGIMES, Regime


def optimizer_of(tensors: dict[str, torch.Tensor], regime: Regime, seed: int | None = 3, **more: float) -> ScaledAdamW:
    ranges = {id(tensor): ParameterRange(name=name) for name, tensor in tensors.items()}
    return ScaledAdamW([{"params": list(tensors.values())}], regime=regime, ranges=ranges, seed=seed, **more)


@pytest.mark.parametrize("name", REGIMES)
def test_an_update_is_that_of_the_state_and_parameters_are_decoded_masters(name: str) -> None:
    torch.manual_seed(0)
    regime, parameter = REGIMES[name], torch.nn.Parameter(torch.randn(10, 30))
    wanted = ScaledState.of(regime, parameter.detach().reshape(-1).clone(), name="w")
    optimizer = optimizer_of({"w": parameter}, regime, lr=0.01, weight_decay=0.1)
    for step in range(1, 4):
        parameter.grad = torch.randn(10, 30)
        update(wanted, parameter.grad.reshape(-1), Hyperparameters(lr=0.01, weight_decay=0.1), step=step, seed=3)
        optimizer.step()
        state = optimizer.state[parameter]
        for kind, part in wanted.parts().items():
            assert byte_view(state[kind]).equal(byte_view(part)), kind
        assert parameter.detach().reshape(-1).equal(wanted.master.decode())
        assert float(state["step"]) == step


def test_shards_of_a_parameter_are_updated_like_the_whole() -> None:
    torch.manual_seed(0)
    regime, values = REGIMES["fp8_fp8_fp8_fp16"], torch.randn(200)
    whole = torch.nn.Parameter(values.clone())
    shards = [torch.nn.Parameter(values[a:b].clone()) for a, b in ((0, 128), (128, 200))]
    ranges = {id(shard): ParameterRange(name="w", start=start) for shard, start in zip(shards, (0, 128), strict=True)}
    one = optimizer_of({"w": whole}, regime)
    other = ScaledAdamW([{"params": shards}], regime=regime, ranges=ranges, seed=3)
    for _ in range(3):
        whole.grad = torch.randn(200)
        shards[0].grad, shards[1].grad = whole.grad[:128], whole.grad[128:]
        one.step()
        other.step()
    assert torch.cat([shard.detach() for shard in shards]).equal(whole.detach())


def test_one_bad_gradient_leaves_all_parameters_unchanged() -> None:
    tensors = {name: torch.nn.Parameter(torch.ones(64)) for name in ("a", "b")}
    optimizer = optimizer_of(tensors, REGIMES["fp8_fp16_fp8_fp16"])
    for tensor in tensors.values():
        tensor.grad = torch.ones(64)
    tensors["b"].grad[3] = float("nan")
    with pytest.raises(ValueError, match="^b: a gradient"):
        optimizer.step()
    assert all(tensor.detach().eq(1.0).all() for tensor in tensors.values())
    tensors["b"].grad = None
    optimizer.step()
    assert tensors["a"].detach().lt(1.0).all() and tensors["b"].detach().eq(1.0).all()


def test_restored_codes_continue_with_the_same_bits() -> None:
    torch.manual_seed(0)
    parameter, regime = torch.nn.Parameter(torch.randn(100)), REGIMES["fp8_fp8_fp8_fp16"]
    optimizer = optimizer_of({"w": parameter}, regime)
    gradients = torch.randn(6, 100)
    for gradient in gradients[:3]:
        parameter.grad = gradient
        optimizer.step()
    kept = {kind: part.clone() for kind, part in optimizer.state[parameter].items()}
    results = []
    for _ in range(2):
        for gradient in gradients[3:]:
            parameter.grad = gradient
            optimizer.step()
        results.append(parameter.detach().clone())
        for kind, part in kept.items():
            optimizer.state[parameter][kind].copy_(part)
        optimizer.decode_masters()
    assert results[0].equal(results[1])


def test_two_tensors_cannot_share_random_numbers() -> None:
    tensors = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    ranges = {id(tensor): ParameterRange(name="w") for tensor in tensors}
    with pytest.raises(AssertionError, match="same name and start"):
        ScaledAdamW([{"params": tensors}], regime=REGIMES["fp8_fp8_fp8_fp16"], ranges=ranges)
    half = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="w: parameters must be FP32"):
        optimizer_of({"w": half}, REGIMES["fp8_fp8_fp8_fp16"])


def train(regime: Regime | None, num_steps: int = 100) -> tuple[float, float]:
    """Train two layers on a noiseless target. Return first and last loss (mean of 10). None is AdamW in FP32."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(16, 32, generator=generator)
    tensors = {
        "up": torch.nn.Parameter(torch.randn(128, 32, generator=generator) * 0.15),
        "down": torch.nn.Parameter(torch.randn(16, 128, generator=generator) * 0.1),
    }
    is_fp8 = regime is not None and regime.compute is E4M3
    scalers = {name: LinearScalers.of(TorchProvider(), Recipe(scaling="blockwise")) for name in tensors}
    options = {"lr": 5e-3, "weight_decay": 0.0}
    if regime is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(tensors.values(), betas=(0.9, 0.95), **options)
    else:
        optimizer = optimizer_of(tensors, regime, **options)
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(64, 32, generator=generator)
        hidden = linear(inputs, tensors["up"], scalers["up"]) if is_fp8 else inputs @ tensors["up"].T
        hidden = hidden.relu()
        output = linear(hidden, tensors["down"], scalers["down"]) if is_fp8 else hidden @ tensors["down"].T
        loss = (output - inputs @ teacher.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def test_every_regime_reduces_the_loss_nearly_as_much_as_fp32() -> None:
    first, last = train(None)
    assert last < 0.3 * first
    for name, regime in REGIMES.items():
        start, end = train(regime)
        share = (start - end) / (first - last)
        assert share > 0.98, name
