"""Replaces the streams and events of ``torch.cuda`` by vector clocks, which record the order of operations.

Each stream and the host count their own operations. The clock of an operation has, for each stream and the host, the
number of their operations that are ordered before it. Two operations of which neither is ordered before the other may
run in any order. For a write and a copy of the same memory this is a race.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

Clock = dict[str, int]
HOST = "host"


def joined(one: Clock, other: Clock) -> Clock:
    """Return the clock of an operation that is ordered after both clocks."""
    return {actor: max(one.get(actor, 0), other.get(actor, 0)) for actor in one.keys() | other.keys()}


@dataclass(frozen=True)
class Operation:
    """Write or copy of the memory at ``address``."""

    kind: str
    address: int
    actor: str
    number: int
    clock: Clock

    def comes_before(self, other: "Operation") -> bool:
        """Return whether this operation has always ended when ``other`` begins."""
        return other.clock.get(self.actor, 0) >= self.number


class FakeStream:
    """Queue of operations."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self._cuda, self.name = cuda, name
        self.clock: Clock = {}

    def wait_stream(self, other: "FakeStream") -> None:
        """Order all later operations of this stream after the operations that are queued in ``other``."""
        if "wait_stream" not in self._cuda.ignored:
            self.clock = joined(self.clock, other.clock)

    def wait_event(self, event: "FakeEvent") -> None:
        """Order all later operations of this stream after ``event``."""
        if "wait_event" not in self._cuda.ignored:
            self.clock = joined(self.clock, event.clock)


class FakeEvent:
    """Point in a queue."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.clock: Clock = {}

    def record(self) -> None:
        """Mark the point after all operations that are queued in the current stream."""
        self.clock = dict(self._cuda.current.clock)

    def synchronize(self) -> None:
        """Let the host wait for the point."""
        if "synchronize" not in self._cuda.ignored:
            self._cuda.host = joined(self._cuda.host, self.clock)

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return the milliseconds between two events, always 0."""
        return 0.0


class FakeCuda:
    """The functions of ``torch.cuda`` that ``StreamCopier`` uses.

    Args:
        ignored: names of methods that order nothing, to show that a test notices.
    """

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self.ignored = ignored
        self.host: Clock = {}
        self.operations: list[Operation] = []
        self._num_streams = 0
        self.current = self.Stream()

    def Stream(self, device: object = None) -> FakeStream:
        """See ``torch.cuda.Stream``."""
        self._num_streams += 1
        return FakeStream(self, f"stream {self._num_streams}")

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        """See ``torch.cuda.Event``."""
        return FakeEvent(self)

    def current_stream(self, device: object = None) -> FakeStream:
        """See ``torch.cuda.current_stream``."""
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """See ``torch.cuda.stream``."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def queue(self, kind: str, address: int) -> None:
        """Queue an operation on the current stream. It is ordered after all operations for which the host has
        waited."""
        self.host = joined(self.host, {HOST: self.host.get(HOST, 0) + 1})
        stream = self.current
        stream.clock = joined(stream.clock, self.host)
        number = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self.operations.append(Operation(kind, address, stream.name, number, dict(stream.clock)))

    def device_tensor(self, values: torch.Tensor) -> "DeviceTensor":
        """Return ``values`` as a tensor that claims to be on a GPU. Copies of it are queued on the current stream."""
        tensor = values.clone().as_subclass(DeviceTensor)
        tensor.cuda_of_test = self
        return tensor


class DeviceTensor(torch.Tensor):
    """Host memory that claims to be on a GPU."""

    cuda_of_test: FakeCuda

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """A GPU."""
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record copies, and let views claim to be on the GPU too."""
        own = next(each for each in args if isinstance(each, DeviceTensor))
        if function is torch.Tensor.copy_:
            own.cuda_of_test.queue("copy", own.data_ptr())
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, DeviceTensor):
            result.cuda_of_test = own.cuda_of_test
        return result
