"""Runs iterations and copies on a GPU whose tensors have no content, to find operations that mix devices or make the
host wait."""

import collections
import contextlib
import importlib
import os
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_ft.testing import engines

GPU = torch.device("cuda", 0)
_OWN = str(engines.REPOSITORY / "megatron_ft") + os.sep
_MEGATRON = f"{os.sep}megatron{os.sep}core{os.sep}"
_aten = torch.ops.aten


class Waits:
    """Counts the operations that make the host wait for the device, and copies that begin without a wait, by ``what at
    file:function``."""

    def __init__(self) -> None:
        self.counted: collections.Counter[str] = collections.Counter()
        self.is_counting = False

    def count(self, what: str) -> None:
        """Count one operation, at the newest call in this project or in Megatron."""
        if not self.is_counting:
            return
        for frame in reversed(traceback.extract_stack()):
            if _OWN in frame.filename or _MEGATRON in frame.filename:
                self.counted[f"{what} at {os.path.basename(frame.filename)}:{frame.name}"] += 1
                return
        self.counted[f"{what} outside"] += 1


def _is_on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


def _communicate(function: Any, args: Any) -> Any:
    """Return the result of a collective of one rank over NCCL, which only accepts tensors on a GPU."""
    devices = {str(each.device) for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
    assert devices <= {str(GPU)}, f"NCCL is given tensors on {sorted(devices)}: {function}"
    work = FakeWork().boxed()
    return work if len(function._schema.returns) == 1 else (args[0], work)


class NoDeviceMode(FakeTensorMode):
    """``FakeTensorMode`` that never uses the device."""

    @property
    def avoid_device_init(self) -> bool:
        """Always return true."""
        return True


class CountWaits(TorchDispatchMode):
    """Counts operations whose result the host needs, and continues with a possible result.

    Args:
        share: of the entries of a mask that are set.
    """

    def __init__(self, waits: Waits, share: float) -> None:
        super().__init__()
        self._waits, self._share = waits, share
        self._pinned: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``."""
        kwargs = kwargs or {}
        if function.namespace == "c10d":
            return _communicate(function, args)
        if function is _aten._local_scalar_dense.default:
            if _is_on_gpu(args[0]):
                self._waits.count("item")
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1)
        if function is _aten.masked_select.default:
            self._waits.count("masked_select")
            return args[0].new_empty((round(args[1].numel() * self._share),))
        if function is _aten._pin_memory.default:
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        if function in (_aten.nonzero.default, _aten.unique_dim.default, _aten._unique2.default):
            self._waits.count(str(function))
        if function in (_aten._to_copy.default, _aten.copy_.default):
            self._look_at_copy(function, args, kwargs)
        return function(*args, **kwargs)

    def _look_at_copy(self, function: Any, args: Any, kwargs: Any) -> None:
        """Count a copy between host and device. It waits unless it is non-blocking and the host memory is pinned."""
        if function is _aten.copy_.default:
            target, source = args[:2]
            is_asynchronous = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
            between = (source.device.type, target.device.type)
            is_pinned = self._is_pinned(source) or self._is_pinned(target)
        else:
            source, wanted = args[0], kwargs.get("device")
            is_asynchronous = bool(kwargs.get("non_blocking"))
            between = (source.device.type, source.device.type if wanted is None else torch.device(wanted).type)
            is_pinned = self._is_pinned(source) or between == ("cuda", "cpu")  # PyTorch pins what it makes for it
        if set(between) == {"cpu", "cuda"}:
            name = "copy to device" if between[1] == "cuda" else "copy to host"
            self._waits.count(name if is_asynchronous and is_pinned else f"{name} that waits")

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self._pinned)


def made_of_numbers(waits: Waits) -> Any:
    """Count ``torch.tensor`` of a list of tensors, which would read them one by one, and return made-up numbers."""
    make = torch.tensor

    def read(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if _is_on_gpu(value):
            waits.count("item")
        return 1.0

    def tensor(data: Any, **about: Any) -> torch.Tensor:
        return make(data if isinstance(data, torch.Tensor) else tree_map(read, data), **about)

    return tensor


def listed(waits: Waits, num_tokens: int) -> Any:
    """Count ``tolist``, and return the order that ``keep_order`` recorded, or an even distribution of tokens."""

    def tolist(tensor: torch.Tensor) -> list[int]:
        if _is_on_gpu(tensor):
            waits.count("tolist")
        return getattr(tensor, "order", [num_tokens // tensor.numel()] * tensor.numel())

    return tolist


def keep_order(model_chunks: list[torch.nn.Module]) -> None:
    """Record the order by which Megatron's dispatcher sorts chunks by expert, on one rank."""
    for chunk in model_chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
                order: Any = getattr(dispatcher, name, None)
                if order is not None:
                    order.order = list(range(order.numel()))


class Stream:
    """Stream whose operations are always in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self) -> "Event":
        """Return an event that is already complete."""
        return Event()


class Event:
    """Event that is already complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds between two events."""
        return 1.0


@contextlib.contextmanager
def gpu(waits: Waits) -> Iterator[None]:
    """Replace ``torch.cuda`` by that of a machine with one GPU."""
    cuda = torch.cuda

    def wait(*args: Any) -> None:
        waits.count("synchronize")

    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "synchronize": wait,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device=0: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=0: None,
        "manual_seed": lambda seed: None,
        "empty_cache": lambda: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(cuda, name, value))
        stack.enter_context(mock.patch.object(Event, "synchronize", wait, create=True))
        stack.enter_context(mock.patch.object(Stream, "synchronize", wait, create=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None))
        yield


def gather_alone(gathered: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``all_gather_object`` for one rank, because tensors without content have no bytes."""
    gathered[0] = value


def move(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Replace ``Module.to``, which cannot move a tensor without content to another device in place."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                moved = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                moved.__dict__.update(
                    {key: value for key, value in parameter.__dict__.items() if key not in moved.__dict__}
                )
                each._parameters[name] = moved
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else buffer.to(device)
    return module


@contextlib.contextmanager
def engine_on_gpu(overrides: dict[str, Any], waits: Waits) -> Iterator[Any]:
    """Return a built engine of one rank."""
    fake = NoDeviceMode(allow_non_fake_inputs=True)
    with gpu(waits), mock.patch.object(torch, "compile", lambda function=None, **kwargs: function):
        from megatron_ft.mcore.device import common

        common.install()
        groups_module = importlib.import_module("megatron_ft.mcore.groups")
        engine_module = importlib.import_module("megatron_ft.mcore.training.engine")
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        config = engines.micro_config({**overrides, "training.device": "cuda"})
        model = config.model
        init = dist.init_process_group
        with mock.patch.object(dist, "init_process_group", lambda backend, **about: init(backend="fake", **about)):
            groups = groups_module.Groups.form(
                config.parallel,
                store=dist.HashStore(),
                rank=0,
                world_size=1,
                generation=0,
                device="cuda",
                timeout_seconds=60,
            )
        samples = engines.MadeUpSamples(model.seq_length)
        num_tokens = config.training.micro_batch_size * model.seq_length * model.moe_router_topk
        share = model.moe_router_topk / (model.num_moe_experts or 1)
        random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
        with (
            mock.patch.object(random, "_get_cuda_rng_state", lambda **about: torch.zeros(16, dtype=torch.uint8)),
            mock.patch.object(random, "_set_cuda_rng_state", lambda state, **about: None),
            mock.patch.object(torch, "tensor", made_of_numbers(waits)),
            mock.patch.object(torch.nn.Module, "to", move),
            mock.patch.object(dist, "all_gather_object", gather_alone),
            mock.patch.object(engine_module, "exchange", lambda ballot, group: [ballot]),
            fake,
            mock.patch.object(FakeTensor, "tolist", listed(waits, num_tokens)),
            CountWaits(waits, share),
        ):
            engine = engine_module.TrainingEngine(
                config,
                device=GPU,
                transformer_impl="local",
                vocab_size=engines.VOCAB_SIZE,
                samples={"train": samples, "valid": samples},
            )
            engine.build(groups)
            keep_order(engine.model_chunks)
            yield engine


def iterate(overrides: dict[str, Any]) -> dict[str, Any]:
    """Run two iterations, and return the waits of the host in the second one, and its result.

    Each iteration has two padding microbatches. The vote contains only this rank's ballot.
    """
    waits, actions = Waits(), []
    with engine_on_gpu(overrides, waits) as engine:
        engines.add_padding(engine, engine.batch.num_real_microbatches + 2)
        for iteration in (1, 2):
            waits.is_counting = iteration == 2
            actions.append(engine.run_iteration(iteration).decision.action)
        waits.is_counting = False
        tensors = [each for chunk in engine.model_chunks for each in chunk.parameters()]
    asynchronous = ("copy to device at", "copy to host at")
    counted = {where: number for where, number in waits.counted.items() if not where.startswith(asynchronous)}
    return {"waits": counted, "actions": actions, "devices": sorted({str(each.device) for each in tensors})}


def batches() -> dict[str, Any]:
    """Return copies, shapes and devices of three microbatches on their way to the GPU, and the number of samples
    read."""
    from megatron_ft.mcore.data.batches import BatchReader
    from megatron_ft.planning.iteration import BatchPlan

    class Samples(engines.MadeUpSamples):
        num_read = 0

        def sample(self, index: int) -> Any:
            self.num_read += 1
            return super().sample(index)

    waits, samples, read_at, tensors = Waits(), Samples(8), [], []
    plan = BatchPlan(global_batch_size=6, micro_batch_size=2, data_parallel_size=1, num_microbatches_multiple=1)
    reader = BatchReader(samples=samples, plan=plan, seq_length=8, data_parallel_rank=0, needs_tokens=True, device=GPU)
    waits.is_counting = True
    with NoDeviceMode(), gpu(waits), CountWaits(waits, 1.0):
        for batch in reader.microbatches(1):
            read_at.append(samples.num_read)
            tensors += [batch.tokens, batch.labels, batch.position_ids]
    return {
        "copies": dict(waits.counted),
        "shapes": [list(each.shape) for each in tensors],
        "devices": sorted({str(each.device) for each in tensors}),
        "samples_read_at_each_yield": read_at,
    }


def scenarios() -> dict[str, Any]:
    """Run all scenarios, including that of ``message_devices``, in one process, because imports take most of the
    time."""
    from tests.helpers import message_devices

    return {"messages": message_devices.scenario(), "batches": batches(), "iterations": iterate({})}
