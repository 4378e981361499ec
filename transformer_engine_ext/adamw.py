"""AdamW on quantized master weights (masters) and moments: the state, the update, and the reference implementation of
the update in plain torch.

An update decodes a range of the state to FP32, computes AdamW, and encodes the result. The bits of the result do not
depend on the device, on the number of threads, or on how a parameter is cut into shards. The reason is that an update
only uses scales of fixed blocks, and sums, products, quotients and square roots of FP32 numbers, whose results IEEE 754
defines exactly. Nothing is communicated. ``torch.optim.AdamW`` does not have this property: it uses fused operations
whose last bit depends on the length of a tensor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from transformer_engine_ext.codec import from_parts, parts_of
from transformer_engine_ext.formats import E4M3, Draws, cast
from transformer_engine_ext.quantized import BLOCK_ELEMENTS, QuantizedTensor, quantize_blocks
from transformer_engine_ext.regimes import Regime

_LARGEST_GRADIENT = 2.0**63
_LEAST_EPSILON = 2.0**-126


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters of AdamW for one update."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Scalar factors of one AdamW update. All backends round them from FP64 to FP32."""

    beta1: float
    rest1: float
    """Value of 1 - beta1."""
    beta2: float
    rest2: float
    correction: float
    """Bias correction: factor by which the square root of the second moment is multiplied."""
    eps: float
    rate: float
    """Learning rate, divided by 1 - beta1**step, the bias correction of the first moment."""
    decay: float
    """Weight decay: factor by which an update multiplies the master weights."""

    @classmethod
    def of(cls, values: Hyperparameters, step: int) -> "Factors":
        """Compute the factors of the update with number ``step``, counted from 1.

        Raises:
            ValueError: epsilon is NaN, or below 2**-126, the smallest normal FP32 number.
        """
        # Without a gradient both moments are zero, and with epsilon zero their quotient would be NaN.
        if not values.eps >= _LEAST_EPSILON:
            raise ValueError(f"eps={values.eps}: must be at least 2**-126, the smallest normal FP32 number")
        return cls(
            beta1=values.beta1,
            rest1=1.0 - values.beta1,
            beta2=values.beta2,
            rest2=1.0 - values.beta2,
            # These are factors and not divisors, because CUDA replaces a division by a number with a product with its
            # reciprocal, and a CPU does not.
            correction=1.0 / math.sqrt(1.0 - values.beta2**step),
            eps=values.eps,
            rate=values.lr / (1.0 - values.beta1**step),
            decay=1.0 - values.lr * values.weight_decay,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledState:
    """Master weights and moments of the elements [start, start + elements) of one flattened parameter."""

    regime: Regime
    name: str
    """Global name of the parameter. Random numbers of stochastic rounding depend on it."""
    start: int
    """Index of the range's first element in the flattened parameter; a multiple of the block size."""
    master: QuantizedTensor
    exp_avg: QuantizedTensor
    exp_avg_sq: QuantizedTensor

    @classmethod
    def of(cls, regime: Regime, values: torch.Tensor, *, name: str, start: int = 0) -> "ScaledState":
        """Make the state of a range with master weights ``values [elements]``, rounded to nearest, and zero moments."""
        return cls(
            regime=regime,
            name=name,
            start=start,
            master=quantize_blocks(values, regime.master, start=start),
            exp_avg=quantize_blocks(torch.zeros_like(values), regime.exp_avg, start=start),
            exp_avg_sq=quantize_blocks(torch.zeros_like(values), regime.exp_avg_sq, start=start),
        )

    @property
    def num_elements(self) -> int:
        """Number of elements of the range ``[start, start + elements)`` of the parameter."""
        return self.master.codes.numel()

    def parts(self) -> dict[str, torch.Tensor]:
        """Return views of the codes and scales of masters and moments, by name. The codec and snapshots copy them."""
        return {
            **parts_of("master", self.master),
            **parts_of("exp_avg", self.exp_avg),
            **parts_of("exp_avg_sq", self.exp_avg_sq),
        }

    @classmethod
    def from_parts(cls, regime: Regime, parts: Mapping[str, torch.Tensor], *, name: str, start: int) -> "ScaledState":
        """Make the state from tensors that :meth:`parts` returned, without copying them.

        Raises:
            CodecError: the number of scales does not fit the codes.
        """
        found = {kind: from_parts(kind, parts, BLOCK_ELEMENTS) for kind in ("master", "exp_avg", "exp_avg_sq")}
        return cls(regime=regime, name=name, start=start, **found)

    def cut(self, first: int, last: int) -> "ScaledState":
        """Return the state of the elements [first, last) of the parameter as views. ``first`` must be a multiple of the
        block size. ``last``, too, must be a multiple of it, unless it is the end of this state's range."""
        begin, end = first - self.start, last - self.start
        is_end = end == self.num_elements
        assert begin % BLOCK_ELEMENTS == 0 and (is_end or end % BLOCK_ELEMENTS == 0), f"[{first}, {last}) cuts a block"
        blocks = slice(begin // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS))
        found = {
            kind: QuantizedTensor(
                codes=tensor.codes[begin:end],
                scales=tensor.scales[blocks] if tensor.format.is_scaled else tensor.scales,
                block_elements=BLOCK_ELEMENTS,
            )
            for kind, tensor in (
                ("master", self.master),
                ("exp_avg", self.exp_avg),
                ("exp_avg_sq", self.exp_avg_sq),
            )
        }
        return ScaledState(regime=self.regime, name=self.name, start=first, **found)

    def compute_weights(self) -> QuantizedTensor:
        """Return the compute weights (weights of the forward pass) that follow from the stored masters. FP8 masters are
        used as compute weights directly."""
        return compute_weights(self.regime, self.master, self.start)


def compute_weights(regime: Regime, master: QuantizedTensor, start: int = 0) -> QuantizedTensor:
    """Return the compute weights (weights of the forward pass) of the masters ``master``: FP8 codes with a scale for
    each block, or FP16 values without scales. ``start`` is the index of the first master in its flattened parameter."""
    if regime.compute is regime.master is E4M3:
        return master
    values = master.decode()
    if regime.is_compute_scaled:
        return quantize_blocks(values, regime.compute, start=start)
    none = torch.empty(0, dtype=torch.uint8, device=values.device)
    return QuantizedTensor(codes=cast(values, regime.compute), scales=none, block_elements=BLOCK_ELEMENTS)


class Backend(Protocol):
    """Computes the arithmetic of an AdamW update. All backends give bit-identical results."""

    @property
    def name(self) -> str:
        """Name of the backend: ``torch``, ``cpp`` or ``cuda``."""

    def compute(self, state: ScaledState, gradient: torch.Tensor, factors: Factors, draws: Draws | None) -> None:
        """Update ``state`` in place with the finite FP32 ``gradient [elements]``. ``draws`` has the random numbers for
        stochastic rounding of masters; None rounds masters to nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBackend:
    """The reference backend in plain torch, for every device of torch. It allocates temporary FP32 tensors."""

    name: str = "torch"

    def compute(self, state: ScaledState, gradient: torch.Tensor, factors: Factors, draws: Draws | None) -> None:
        """Update ``state`` in place as :class:`Backend` describes."""
        # Clamp the gradient, not its square: with a clamped second moment alone, the update would be far too large.
        gradient = gradient.clamp(-_LARGEST_GRADIENT, _LARGEST_GRADIENT)
        exp_avg = state.exp_avg.decode() * factors.beta1 + gradient * factors.rest1
        exp_avg_sq = state.exp_avg_sq.decode() * factors.beta2 + (gradient * gradient) * factors.rest2
        denominator = _root(exp_avg_sq) * factors.correction + factors.eps
        move = (exp_avg / denominator) * factors.rate
        master = state.master.decode() * factors.decay - move
        start, regime = state.start, state.regime
        state.master.copy_(quantize_blocks(master, regime.master, draws=draws, start=start))
        state.exp_avg.copy_(quantize_blocks(exp_avg, regime.exp_avg, start=start))
        state.exp_avg_sq.copy_(quantize_blocks(exp_avg_sq, regime.exp_avg_sq, start=start, keeps_nonzero=True))


def _root(values: torch.Tensor) -> torch.Tensor:
    # The FP32 square root of torch is not correctly rounded on every CPU: with MKL, one of six results is the next
    # number. No square root of an FP32 number is closer than 2**-50 (relative to its binade) to the middle of two FP32
    # numbers, so an FP64 root that is off by one unit still rounds to the right one.
    return values.to(torch.float64).sqrt().to(torch.float32)


REFERENCE = TorchBackend()


@torch.no_grad()
def update(
    state: ScaledState,
    gradient: torch.Tensor,
    values: Hyperparameters,
    *,
    step: int,
    seed: int | None = None,
    iteration: int | None = None,
    backend: Backend = REFERENCE,
) -> None:
    """Update master weights and moments of ``state`` in place with one step of AdamW.

    Gradients are clamped to 2**63, so that FP32 can hold their squares. Second moments above zero stay above zero.

    Args:
        gradient: finite gradient of the range, ``[elements]``, unscaled and clipped.
        step: number of this update, counted from 1, which the bias correction uses.
        seed: seed for stochastic rounding of masters; None rounds to nearest. FP32 masters are not rounded.
        iteration: iteration on which the random numbers of stochastic rounding depend; ``step`` if None.
        backend: computes the update; see ``kernels.backend_for``.

    Raises:
        ValueError: a gradient is infinite or NaN (training skips such updates), or epsilon is below 2**-126. Nothing
            has been changed.
    """
    assert gradient.shape == state.master.codes.shape, f"{tuple(gradient.shape)} gradients for {state.num_elements}"
    assert step >= 1, f"step={step}: updates are counted from 1"
    gradient = gradient.to(torch.float32)
    if not bool(gradient.isfinite().all()):
        raise ValueError(f"{state.name}: a gradient is infinite or NaN; skip the update")
    draws = None
    if seed is not None and state.regime.master.is_scaled:
        draws = Draws(seed=seed, name=state.name, iteration=step if iteration is None else iteration)
    backend.compute(state, gradient, Factors.of(values, step), draws)
