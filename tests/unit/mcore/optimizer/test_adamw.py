"""Tests the parts of Megatron's optimizer step: together they equal the whole step, and there is one loss scale."""

from collections.abc import Callable

import pytest
import torch

from megatron_ft.planning.iteration import clip_coefficient
from megatron_ft.testing import engines

pytestmark = pytest.mark.slow  # trains

FP16 = {"precision.params_dtype": "fp16", "precision.initial_loss_scale": 64.0, "precision.hysteresis": 1}
PRECISIONS = {
    "fp32": {},
    "fp32_plain": {"parallel.use_distributed_optimizer": False},
    "bf16": {"precision.params_dtype": "bf16"},
    "bf16_plain": {"precision.params_dtype": "bf16", "parallel.use_distributed_optimizer": False},
    "fp16": FP16,
}


def three_iterations(overrides: dict, step: "Callable | None" = None) -> tuple[dict[str, str], list[float]]:
    """Return digests and gradient norms after three iterations. ``step`` replaces commit and gather."""
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        norms = []
        for iteration in (1, 2, 3):
            if step is None:
                norms.append(engine.run_iteration(iteration).vote.grad_norm)
            else:
                norms.append(step(engine, iteration))
        return engines.digests(engine), norms


@pytest.mark.parametrize("name", PRECISIONS)
def test_pieces_make_megatrons_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare, vote, update and gather give the same bits as ``optimizer.step()``. The gradients are clipped."""
    overrides = {**PRECISIONS[name], "optimizer.clip_grad": 0.05}
    ours, norms = three_iterations(overrides)

    def megatrons(engine, iteration: int) -> float:
        from megatron_ft.mcore.optimizer import adamw

        with monkeypatch.context() as patch:
            patch.setattr(adamw, "prepare", lambda optimizer: (False, 0.0))
            engine.prepare(iteration)
        succeeded, norm, _ = engine.optimizer.step()
        assert succeeded
        engine.iteration = iteration
        return float(norm)

    theirs, their_norms = three_iterations(overrides, megatrons)
    assert min(norms) > 0.05, "nothing was clipped"
    assert norms == their_norms
    assert ours == theirs


@pytest.mark.parametrize(("clip_grad", "grad_norm"), [(1.0, 0.5), (1.0, 1.0), (1.0, 3.0), (0.05, 1e-9), (2.5, 1e30)])
def test_clip_coefficient_is_megatrons(clip_grad: float, grad_norm: float) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    gradient = torch.tensor([1.0, 2.0, 3.0])
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = gradient.clone()
    clip_grad_by_total_norm_fp32([parameter], max_norm=clip_grad, total_norm=grad_norm)
    assert torch.equal(parameter.grad, gradient * clip_coefficient(clip_grad, grad_norm))


def test_an_overflow_lowers_the_loss_scale_and_nothing_else() -> None:
    from megatron_ft.mcore.model.transformer_config import named_parameters

    with engines.engine_of(engines.micro_config(FP16)) as engine:
        finalize = engine.transformer_config.finalize_model_grads_func

        def overflow(*args, **kwargs) -> None:
            finalize(*args, **kwargs)
            next(named_parameters(engine.model_chunks[0]))[1].main_grad.view(-1)[0] = float("inf")

        engine.transformer_config.finalize_model_grads_func = overflow
        before = engines.digests(engine)
        result = engine.run_iteration(1)
        assert (result.decision.action, result.vote.found_inf, result.vote.loss_scale) == ("skip", True, 64.0)
        assert engines.digests(engine) == before
        engine.transformer_config.finalize_model_grads_func = finalize
        assert engine.run_iteration(2).vote.loss_scale == 32.0
