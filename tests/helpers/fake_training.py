"""Copies to a GPU whose tensors have no content: ``tests/unit/mcore/data/test_batches.py``."""

import collections
import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import engines

GPU = torch.device("cuda", 0)
_OWN = str(engines.REPOSITORY / "megatron_ft") + os.sep
_MEGATRON = f"{os.sep}megatron{os.sep}core{os.sep}"
_aten = torch.ops.aten


class Waits:
    """Where the host waits for the device: ``what at file:function`` -> how often."""

    def __init__(self) -> None:
        self.counted: collections.Counter[str] = collections.Counter()
        self.is_counting = False

    def count(self, what: str) -> None:
        """One more, in the newest call of this project's or of Megatron's."""
        if not self.is_counting:
            return
        for frame in reversed(traceback.extract_stack()):
            if _OWN in frame.filename or _MEGATRON in frame.filename:
                self.counted[f"{what} at {os.path.basename(frame.filename)}:{frame.name}"] += 1
                return
        self.counted[f"{what} outside"] += 1


def _is_on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


class NoDeviceMode(FakeTensorMode):
    """``FakeTensorMode`` that touches no device, whatever ``torch.cuda`` says."""

    @property
    def avoid_device_init(self) -> bool:
        """Always."""
        return True


class CountWaits(TorchDispatchMode):
    """Counts operations whose result the host needs, and goes on with a result that could be.

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
        if function is _aten.copy_.default:
            target, source = args[0].device.type, args[1]
            is_asynchronous = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        else:
            wanted = kwargs.get("device")
            source = args[0]
            target = source.device.type if wanted is None else torch.device(wanted).type
            is_asynchronous = bool(kwargs.get("non_blocking"))
        if (source.device.type, target) == ("cuda", "cpu"):
            self._waits.count("copy to host")
        elif (source.device.type, target) == ("cpu", "cuda"):
            is_pinned = any(source is each for each in self._pinned)
            self._waits.count("copy to device" if is_pinned and is_asynchronous else "copy to device that waits")


class Stream:
    """A stream in which everything is in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """At once."""

    def wait_event(self, event: Any) -> None:
        """At once."""

    def record_event(self) -> "Event":
        """The point that has been come to."""
        return Event()


class Event:
    """A point that has been come to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Take the place."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds."""
        return 1.0


@contextlib.contextmanager
def gpu(waits: Waits) -> Iterator[None]:
    """``torch.cuda`` of one GPU."""
    cuda = torch.cuda

    def wait(*args: Any) -> None:
        waits.count("synchronize")

    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
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


def batches() -> dict[str, Any]:
    """Three microbatches on their way to the GPU: copies, shapes, devices, and how far samples had been read."""
    from megatron_ft.mcore.data.batches import BatchReader
    from megatron_ft.planning.batch import BatchPlan

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
