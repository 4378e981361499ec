"""Patches torch and Megatron-Core, so that Megatron can train on a CPU with gloo.

Megatron calls ``torch.cuda`` unconditionally, creates some tensors with ``device="cuda"``, and compares the names of
tensor types. ``install`` first patches ``torch.cuda``, and then imports Megatron. Each module of Megatron that contains
``device="cuda"`` gets a modified copy of the module ``torch``. ``install`` raises an error if a GPU is visible.
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ft.errors import SoftwareError
from megatron_ft.mcore.device import common

_CPU = torch.device("cpu")

_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "rand",
    "randn",
)

_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)


class _Stream:
    """Replacement for ``torch.cuda.Stream``. All work on a CPU is executed in order, so nothing has to wait."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> "_Event":
        return _Event()

    def synchronize(self) -> None:
        pass


class _Event:
    """Replacement for ``torch.cuda.Event`` that is always complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _on_stream(stream: object) -> Iterator[None]:
    yield


_ONE_STREAM = _Stream()


def _no_op(name: str) -> Callable[..., None]:
    # Make a separate function for each name, because the trace rules of torch._dynamo do not allow a shared function.
    def call(*args: object, **kwargs: object) -> None:
        return None

    call.__name__ = name
    return call


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(cuda, name, _no_op(name))
    # Megatron passes the result of ``current_device`` as the argument ``device``.
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 1
    cuda.current_stream = lambda device=None: _ONE_STREAM
    cuda.default_stream = lambda device=None: _ONE_STREAM
    cuda.stream = _on_stream
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None
    cuda.get_rng_state = lambda device="cpu": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cpu": torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state


def _patch_tensor_methods() -> None:
    # Megatron compares names of tensor types with names such as ``torch.cuda.FloatTensor``, so CPU types get these.
    original_type = torch.Tensor.type

    def named_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named_type  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _redirected(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


class _CpuView(types.ModuleType):
    """Copy of the module ``torch`` whose tensor factories replace ``device="cuda"`` by the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__.update({name: value for name, value in torch.__dict__.items() if name != "__getattr__"})
        for name in _FACTORIES:
            setattr(self, name, _redirected(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _import_megatron_eagerly() -> None:
    # Imports Megatron without its ``torch.compile`` fusions, because compiling takes minutes on a CPU.
    compiler = torch.compile
    torch.compile = lambda function=None, **kwargs: function  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
        for name in _MODULES_WITH_CUDA_LITERALS:
            importlib.import_module(name)
    finally:
        torch.compile = compiler


def _patch_megatron() -> None:
    view = _CpuView()
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(name).torch = view  # type: ignore[attr-defined]

    mapping: Any = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    # The default argument still references the original ``torch.empty``.
    mapping.ShardedTensor.init_data.__defaults__ = (view.empty,)

    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")

    # Megatron does not convert a tensor that is on the CPU already, but gloo's all-to-all needs split sizes as numbers.
    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = move_to_cpu
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = move_to_cpu


_installed = False


def install() -> None:
    """Patch this process so that Megatron-Core runs on the CPU. A second call has no effect.

    Raises:
        SoftwareError: a GPU is visible to this process.
    """
    global _installed
    if _installed:
        return
    if common.num_visible_gpus():
        raise SoftwareError(
            "training.device=cpu: this process must not see a GPU; set CUDA_VISIBLE_DEVICES= (empty) or "
            "training.device=cuda"
        )
    _patch_torch_cuda()
    _patch_tensor_methods()
    with common.answering_for_devices(has_gpu=False):
        _import_megatron_eagerly()
        common.install()
    _patch_megatron()
    _installed = True
