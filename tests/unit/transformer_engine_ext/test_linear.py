"""Tests FP8 linear layers: gradients, frozen weights, experts without rows, and history of delayed scaling."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from transformer_engine_ext import linear as module
from transformer_engine_ext.formats import E4M3, E5M2
from transformer_engine_ext.linear import LinearScalers, grouped_linear, linear
from transformer_engine_ext.providers import TorchProvider
from transformer_engine_ext.recipes import AmaxHistory, Recipe

SCALINGS = ("tensorwise", "blockwise", "delayed")


def layer(scaling: str, **more: bool) -> LinearScalers:
    recipe = Recipe(scaling=scaling, **more)
    history = AmaxHistory.of(recipe, num_iterations=4) if scaling == "delayed" else None
    return LinearScalers.of(TorchProvider(), recipe, history)


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_quantized_operands(scaling: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 5, 48, dtype=dtype, requires_grad=True)
    weight = (torch.randn(32, 48) * 0.1).to(dtype).requires_grad_()
    scalers = layer(scaling)
    output = linear(inputs, weight, scalers)
    gradient = (torch.randn(3, 5, 32) * 1e-4).to(dtype)
    output.backward(gradient)
    rows = scalers.input.quantize(inputs.detach().reshape(15, 48))
    codes = scalers.weight.quantize(weight.detach())
    errors = scalers.output_gradient.quantize(gradient.reshape(15, 32))
    assert (rows.format, codes.format, errors.format) == (E4M3, E4M3, E5M2)
    exact = rows.decode(torch.float64), codes.decode(torch.float64), errors.decode(torch.float64)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    assert output.dtype is dtype and output.shape == (3, 5, 32)
    torch.testing.assert_close(output.double().view(15, 32), exact[0] @ exact[1].T, **tolerance)
    torch.testing.assert_close(inputs.grad.double().view(15, 48), exact[2] @ exact[1], **tolerance)
    torch.testing.assert_close(weight.grad.double(), exact[2].T @ exact[0], **tolerance)
    plain = inputs.detach() @ weight.detach().T
    assert 0 < (output - plain).norm() / plain.norm() < 0.05


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_frozen_weight_gets_no_gradient_and_its_inputs_are_not_kept(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(6, 32), torch.randn(16, 32)
    active = inputs.clone().requires_grad_()
    linear(active, weight.clone().requires_grad_(), layer(scaling)).sum().backward()
    number = []
    monkeypatch.setattr(TorchProvider, "product", _counted(number))
    frozen = inputs.clone().requires_grad_()
    output = linear(frozen, weight, layer(scaling))
    (function, _), *_ = output.grad_fn.next_functions
    assert len(function.saved_tensors) == 2  # codes and scales of the weight
    output.sum().backward()
    assert len(number) == 2 and weight.grad is None
    assert frozen.grad.equal(active.grad)


def _counted(number: list[None]):
    product = TorchProvider.product

    def counted(self, *arguments, **more):
        number.append(None)
        return product(self, *arguments, **more)

    return counted


@pytest.mark.parametrize("scaling", SCALINGS)
def test_experts_in_a_group_equal_single_experts(scaling: str) -> None:
    torch.manual_seed(0)
    counts = [3, 0, 5, 1]
    rows = torch.randn(9, 32)
    weights = torch.randn(4, 16, 32)
    results = []
    for is_grouped in (True, False):
        given, of_experts = rows.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
        scalers = [layer(scaling) for _ in counts]
        if is_grouped:
            output = grouped_linear(given, counts, of_experts, scalers)
        else:
            parts = given.split(counts)
            output = torch.cat([linear(*found) for found in zip(parts, of_experts, scalers, strict=True)])
        output.square().sum().backward()
        results.append([output, given.grad, *(w.grad for w in of_experts)])
    assert all(one.equal(other) for one, other in zip(*results, strict=True))
    assert results[0][3].eq(0).all() and results[0][2].ne(0).any()  # the second expert has no rows
    with pytest.raises(AssertionError, match="rows per expert"):
        grouped_linear(rows, [1, 2, 3, 4], list(weights), [layer(scaling)] * 4)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32), (0, 2, 32)])
def test_inputs_without_rows_get_a_gradient_without_rows(scaling: str, shape: tuple[int, ...]) -> None:
    """The collective that brings the rows of an expert also takes part in the backward pass if there are no rows."""
    inputs, weight = torch.ones(shape, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    calls: list[torch.Size] = []
    brought = inputs * 1.0
    brought.register_hook(lambda gradient: calls.append(gradient.shape))
    output = linear(brought, weight, layer(scaling))
    assert output.shape == (*shape[:-1], 16)
    output.sum().backward()
    assert calls == [inputs.shape] and inputs.grad.shape == inputs.shape
    assert weight.grad.eq(0).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_existing_codes_are_used_instead_of_the_weight(scaling: str) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(4, 32), torch.randn(16, 32)
    codes = layer(scaling).weight.quantize(weight)
    found = linear(inputs, torch.zeros(16, 32), layer(scaling), codes)
    assert found.equal(linear(inputs, weight, layer(scaling)))


def test_delayed_scaling_is_repeatable_from_its_history() -> None:
    torch.manual_seed(0)
    recipe, weights = Recipe(scaling="delayed"), [torch.randn(16, 32, requires_grad=True) for _ in range(2)]
    history = AmaxHistory.of(recipe, num_iterations=4, num_layers=2)
    layers = [LinearScalers.of(TorchProvider(), recipe, history, number) for number in range(2)]

    def run(*, starts_again: bool = False) -> list[torch.Tensor]:
        """Run three iterations, whose inputs grow, in both layers; with ``starts_again``, each after one that fails."""
        torch.manual_seed(1)
        found = []
        for step in range(3):
            batch = torch.randn(4, 32) * 10**step
            history.begin()
            if starts_again:
                linear(batch * 1000.0, weights[0].detach(), layers[0])
                history.begin()
            for weight, scalers in zip(weights, layers, strict=True):
                weight.grad = None
                output = linear(batch, weight, scalers)
                (output.sum() * 1e-3).backward()
                found += [output.detach(), weight.grad]
            history.advance()
        return found

    run()
    kept = history.history.clone()
    assert kept[3].eq(0).all() and kept[:3].gt(0).all()
    assert kept[:3, :, 1].diff(dim=0).lt(0).all()  # inputs were largest in the newest iteration, which is the first row
    first = run()
    history.history.zero_()
    different = run()
    history.history.copy_(kept)
    again = run()
    history.history.copy_(kept)
    after_failures = run(starts_again=True)
    assert all(one.equal(other) for one, other in zip(first, again, strict=True))
    assert not all(one.equal(other) for one, other in zip(first, different, strict=True))
    assert all(one.equal(other) for one, other in zip(first, after_failures, strict=True))


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_recomputed_activations_give_equal_gradients(scaling: str) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(4, 32), torch.randn(32, 32)
    found = []
    for is_recomputed in (False, True):
        given, used, scalers = inputs.clone().requires_grad_(), weight.clone().requires_grad_(), layer(scaling)

        def run(rows: torch.Tensor, used: torch.Tensor = used, scalers: LinearScalers = scalers) -> torch.Tensor:
            return linear(linear(rows, used, scalers).relu(), used, scalers)

        output = checkpoint(run, given, use_reentrant=False) if is_recomputed else run(given)
        output.square().sum().backward()
        found.append((given.grad, used.grad))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_a_row_of_whole_blocks_does_not_depend_on_other_rows() -> None:
    """So blockwise scaling of 64-element blocks gives a token the same codes on every rank that computes its expert."""
    torch.manual_seed(0)
    inputs, weight, scalers = torch.randn(8, 128), torch.randn(16, 128), layer("blockwise")
    changed = inputs.clone()
    changed[5:] *= 1000
    codes, others = scalers.input.quantize(inputs), scalers.input.quantize(changed)
    assert codes.decode()[:5].equal(others.decode()[:5])
    tensorwise = layer("tensorwise").input
    assert not tensorwise.quantize(inputs).decode()[:5].equal(tensorwise.quantize(changed).decode()[:5])
    assert module.linear(inputs[:5], weight, scalers).shape == (5, 16)
