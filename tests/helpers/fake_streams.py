"""Stands in for the streams and events of ``torch.cuda``: vector clocks record what is ordered before what.

Each stream and the host count their own operations. An operation's clock has, for each of them, how many operations
come before it or are it. Operation ``number`` of ``actor`` comes before another one if that one's clock has at least
``number`` at ``actor``; else the two may run in any order, which for a write and a copy of the same memory is a race.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

Clock = dict[str, int]
HOST = "host"


def joined(one: Clock, other: Clock) -> Clock:
    """The clock of what comes after both."""
    return {actor: max(one.get(actor, 0), other.get(actor, 0)) for actor in one.keys() | other.keys()}


@dataclass(frozen=True)
class Operation:
    """A write or a copy of the memory at ``address``."""

    kind: str
    address: int
    actor: str
    number: int
    clock: Clock

    def comes_before(self, other: "Operation") -> bool:
        """Whether it has ended whenever ``other`` begins."""
        return other.clock.get(self.actor, 0) >= self.number


class FakeStream:
    """A queue of operations."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self._cuda, self.name = cuda, name
        self.clock: Clock = {}

    def wait_stream(self, other: "FakeStream") -> None:
        """What is queued from now on comes after what ``other`` has in its queue."""
        if "wait_stream" not in self._cuda.ignored:
            self.clock = joined(self.clock, other.clock)

    def wait_event(self, event: "FakeEvent") -> None:
        """What is queued from now on comes after ``event``."""
        if "wait_event" not in self._cuda.ignored:
            self.clock = joined(self.clock, event.clock)


class FakeEvent:
    """A point in a queue."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.clock: Clock = {}

    def record(self) -> None:
        """Take the place behind all that the current stream has in its queue."""
        self.clock = dict(self._cuda.current.clock)

    def synchronize(self) -> None:
        """Let the host wait."""
        if "synchronize" not in self._cuda.ignored:
            self._cuda.host = joined(self._cuda.host, self.clock)

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Milliseconds; nothing here takes time."""
        return 0.0


class FakeCuda:
    """What ``StreamCopier`` uses of ``torch.cuda``.

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
        """Queue an operation on the current stream. It comes after all that the host has waited for."""
        self.host = joined(self.host, {HOST: self.host.get(HOST, 0) + 1})
        stream = self.current
        stream.clock = joined(stream.clock, self.host)
        number = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self.operations.append(Operation(kind, address, stream.name, number, dict(stream.clock)))

    def device_tensor(self, values: torch.Tensor) -> "DeviceTensor":
        """``values`` as a tensor that says it is on a GPU; copies of it go to the current stream's queue."""
        tensor = values.clone().as_subclass(DeviceTensor)
        tensor.cuda_of_test = self
        return tensor


class DeviceTensor(torch.Tensor):
    """Host memory that says it is a GPU's."""

    cuda_of_test: FakeCuda

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """A GPU."""
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note copies and keep the name of the GPU on views."""
        own = next(each for each in args if isinstance(each, DeviceTensor))
        if function is torch.Tensor.copy_:
            own.cuda_of_test.queue("copy", own.data_ptr())
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, DeviceTensor):
            result.cuda_of_test = own.cuda_of_test
        return result
