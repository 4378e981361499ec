"""Backends ``cpp`` and ``cuda`` of the optimizer ``ScaledAdamW``. Each computes an update with one fused kernel.

A kernel reads codes, scales and gradients once, and writes codes and scales once. ``csrc/adamw/update.hpp`` lists every
rounding. The caller builds and loads the library, because this package does not import ``megatron_ft``.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from transformer_engine_ext.adamw import REFERENCE, Backend, Factors, ScaledState
from transformer_engine_ext.formats import E4M3, FP16, FP32, Draws
from transformer_engine_ext.quantized import QuantizedTensor

BACKENDS = ("torch", "cpp", "cuda")
"""Names of the backends that compute updates of ``ScaledAdamW``."""
FORMAT_CODES = (FP32, FP16, E4M3)
"""Formats in the order of ``FormatCode`` in ``csrc/adamw/update.hpp``."""
_DEVICES = {"cpp": "cpu", "cuda": "cuda"}


class BackendError(RuntimeError):
    """Raised for a backend that is unknown, cannot be used on the device, or failed."""


class _Tensor(ctypes.Structure):
    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p))


class _Factors(ctypes.Structure):
    _fields_ = tuple((found.name, ctypes.c_float) for found in fields(Factors))


class _Range(ctypes.Structure):
    # The members of ``Range`` in csrc/adamw/update.hpp.
    _fields_ = (
        ("gradient", ctypes.c_void_p),
        ("master", _Tensor),
        ("exp_avg", _Tensor),
        ("exp_avg_sq", _Tensor),
        ("num_elements", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("is_stochastic", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("factors", _Factors),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """Computes AdamW updates with a kernel of a loaded library. With ``cuda``, uses the current CUDA stream."""

    name: str
    """Name of the backend: ``cpp`` or ``cuda``."""
    library: ctypes.CDLL
    """Loaded library with the kernels of ``csrc/adamw`` for this backend."""

    def compute(self, state: ScaledState, gradient: torch.Tensor, factors: Factors, draws: Draws | None) -> None:
        """Update ``state`` in place, as :class:`~transformer_engine_ext.adamw.Backend` describes.

        Raises:
            BackendError: the kernel does not support the tensors' device or formats, or its launch failed.
        """
        device = gradient.device
        if device.type != _DEVICES[self.name]:
            raise BackendError(f"backend={self.name}: {state.name} is on {device}; use the backend torch there")
        gradient = gradient.contiguous()
        tensors = (state.master, state.exp_avg, state.exp_avg_sq)
        content = _Range(
            gradient=gradient.data_ptr(),
            **{kind: _pointers(getattr(state, kind), device) for kind in ("master", "exp_avg", "exp_avg_sq")},
            num_elements=state.num_elements,
            start=state.start,
            is_stochastic=int(draws is not None),
            key=0 if draws is None else draws.key,
            factors=_Factors(**{found.name: getattr(factors, found.name) for found in fields(Factors)}),
        )
        formats = [ctypes.c_int64(FORMAT_CODES.index(tensor.format)) for tensor in tensors]
        where: list[ctypes.c_int64 | ctypes.c_void_p] = []
        if self.name == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            where = [ctypes.c_int64(index), ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)]
        code = self.library.adamw_update(*where, ctypes.byref(content), *formats)
        if code:
            raise BackendError(f"backend={self.name}: the update of {state.name} failed: {self._message(code)}")

    def _message(self, code: int) -> str:
        if self.name == "cpp":
            return "no precision regime has this combination of number formats"
        self.library.adamw_error.restype = ctypes.c_char_p
        return str(self.library.adamw_error(code).decode())


def _pointers(tensor: QuantizedTensor, device: torch.device) -> _Tensor:
    for part in (tensor.codes, tensor.scales):
        assert part.device == device and part.is_contiguous(), f"parts must be contiguous and on {device}"
    return _Tensor(codes=tensor.codes.data_ptr(), scales=tensor.scales.data_ptr())


def backend_for(name: str, device: torch.device, load: Callable[[str], ctypes.CDLL]) -> Backend:
    """Return the backend ``name``, after a check that it can update state on ``device``. Never return another backend.

    Args:
        load: function that builds and loads the library of ``cpp`` or ``cuda``.

    Raises:
        BackendError: there is no backend ``name`` for tensors on ``device``. ``load`` may raise other exceptions.
    """
    if name not in BACKENDS:
        raise BackendError(f"backend={name}: must be one of {', '.join(BACKENDS)}")
    if name == REFERENCE.name:
        return REFERENCE
    if device.type != _DEVICES[name]:
        raise BackendError(f"backend={name}: updates state on {_DEVICES[name]}, not on {device.type}; use torch")
    return KernelBackend(name=name, library=load(name))
