"""Optimizer ``ScaledAdamW``: AdamW with quantized master weights and moments, as a ``torch.optim.Optimizer``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine_ext.adamw import REFERENCE, Backend, Hyperparameters, ScaledState, update
from transformer_engine_ext.regimes import Regime


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRange:
    """Range of a flattened model parameter. One tensor of the optimizer contains exactly this range."""

    name: str
    """Global name of the parameter. Random numbers of stochastic rounding depend on it."""
    start: int = 0
    """Index of the tensor's first element in the flattened parameter; a multiple of the block size."""


def placeholder(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return an FP32 tensor of zeros of ``shape`` that can have a gradient, but needs memory for only one number."""
    return torch.zeros((), dtype=torch.float32, device=device).expand(tuple(shape))


class ScaledAdamW(torch.optim.Optimizer):
    """AdamW with quantized state. Its state contains codes and scales of masters and moments, and update counts.

    The parameters are FP32 tensors. After each update they contain the decoded master weights (masters). Values that
    are written to a parameter between updates are lost, because the next update starts from the masters in the state.

    With ``initial``, parameters have no values but only gradients: masters are only in the state and are not decoded.

    Args:
        groups: parameter groups with ``params``, and optionally ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        ranges: the range of each parameter, by the parameter's ``id``.
        seed: seed for stochastic rounding of masters; None rounds to nearest.
        backend: computes the updates; see ``kernels.backend_for``.
        initial: values of the masters in the shape of their parameters, by the parameter's ``id``. Then each parameter
            must be a result of :func:`placeholder`. None uses the values of the parameters.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        regime: Regime,
        ranges: Mapping[int, ParameterRange],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int | None = None,
        backend: Backend = REFERENCE,
        initial: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.regime, self.seed, self.backend = regime, seed, backend
        self._has_values = initial is None
        self._ranges = {
            parameter: ranges[id(parameter)] for group in self.param_groups for parameter in group["params"]
        }
        names = [(found.name, found.start) for found in self._ranges.values()]
        # Two tensors with equal names and starts would be rounded with the same random numbers.
        assert len(set(names)) == len(names), "two tensors have the same name and start"
        for parameter in self._ranges:
            assert parameter.dtype is torch.float32, f"{self._ranges[parameter].name}: parameters must be FP32"
            if initial is not None:
                self._create(parameter, initial[id(parameter)])

    def rename(self, ranges: Mapping[int, ParameterRange]) -> None:
        """Set the range (name and start) of every parameter. Call this after parameters have received the state of
        other parameters, e.g. because experts moved.

        Args:
            ranges: new range of each parameter, by the parameter's ``id``.
        """
        self._ranges = {parameter: ranges[id(parameter)] for parameter in self._ranges}

    def reset(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Set the masters of ``parameter`` to ``values`` and its moments to zero, in place. Keep its update count."""
        found = self.scaled_state(parameter)
        new = ScaledState.of(self.regime, values.reshape(-1), name=found.name, start=found.start)
        for kind, part in found.parts().items():
            part.copy_(new.parts()[kind])

    def _create(self, parameter: torch.Tensor, values: torch.Tensor) -> ScaledState:
        place = self._ranges[parameter]
        found = ScaledState.of(self.regime, values.detach().reshape(-1), name=place.name, start=place.start)
        self.state[parameter] |= {"step": torch.tensor(0.0), **found.parts()}
        return found

    def scaled_state(self, parameter: torch.Tensor) -> ScaledState:
        """Return the state of ``parameter`` as views of the optimizer's tensors. If it has no state yet, create the
        state from the parameter's values, and set the parameter to its decoded masters."""
        place, state = self._ranges[parameter], self.state[parameter]
        if "master" not in state:
            found = self._create(parameter, parameter)
            parameter.detach().copy_(found.master.decode().view_as(parameter))
        return ScaledState.from_parts(self.regime, state, name=place.name, start=place.start)

    def decode_masters(self) -> None:
        """Set every parameter to its decoded masters. Call this after codes and scales in ``state`` were replaced."""
        assert self._has_values, "the parameters have no values"
        for parameter in self._ranges:
            parameter.detach().copy_(self.scaled_state(parameter).master.decode().view_as(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            ValueError: a gradient is infinite or NaN. No parameter has been changed.
        """
        loss = None if closure is None else closure()
        due = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, parameter in due:
            # Check all gradients first: otherwise parameters before the bad one would already be updated.
            if not bool(parameter.grad.isfinite().all()):
                raise ValueError(f"{self._ranges[parameter].name}: a gradient is infinite or NaN; skip the update")
        for group, parameter in due:
            found = self.scaled_state(parameter)
            count = self.state[parameter]["step"]
            count += 1
            beta1, beta2 = group["betas"]
            values = Hyperparameters(
                lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"]
            )
            gradient = parameter.grad.reshape(-1)
            update(found, gradient, values, step=int(count), seed=self.seed, backend=self.backend)
            if self._has_values:
                parameter.copy_(found.master.decode().view_as(parameter))
        return loss
