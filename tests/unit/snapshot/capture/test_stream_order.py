"""Tests ``_StreamCopier`` on streams that record the order of operations, for sources on the device and in host
memory."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.snapshot.capture.capture import CopyBatch, _StreamCopier
from tests.helpers.fake_streams import FakeCuda, Operation

DEVICE = torch.device("cuda", 0)
SHAPES = ((), (1,), (3,), (2, 2))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@dataclass
class Program:
    """Computation that writes its sources, and a copier beside it."""

    cuda: FakeCuda
    sources: list[torch.Tensor]
    num_writes: int = 0
    targets: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.copier = _StreamCopier(DEVICE, cuda=self.cuda)
        sizes = [source.numel() * source.element_size() for source in self.sources]
        self.targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.batch = CopyBatch.of(self.sources, self.targets)

    def write(self, index: int) -> None:
        """Write a new value: queued on the current stream for a device tensor, at once for a host tensor."""
        source, self.num_writes = self.sources[index], self.num_writes + 1
        if source.device.type == "cuda":
            self.cuda.queue("write", source.data_ptr())
        source.as_subclass(torch.Tensor).fill_(self.num_writes)

    def change_stream(self) -> None:
        """Continue the computation in another stream, in order."""
        following = self.cuda.Stream()
        following.wait_stream(self.cuda.current)
        self.cuda.current = following

    def bytes(self) -> list[list[int]]:
        """Return the present bytes of all sources."""
        return [source.as_subclass(torch.Tensor).view(-1).view(torch.uint8).tolist() for source in self.sources]

    def races(self) -> list[tuple[Operation, Operation]]:
        """Return pairs of a write and a copy of the same memory whose order is not fixed."""
        found = []
        for place, later in enumerate(self.cuda.operations):
            for earlier in self.cuda.operations[:place]:
                is_pair = earlier.address == later.address and {earlier.kind, later.kind} == {"write", "copy"}
                if is_pair and not earlier.comes_before(later):
                    found.append((earlier, later))
        return found


def program(kinds: list[str], cuda: FakeCuda | None = None) -> Program:
    cuda = cuda or FakeCuda()
    values = [torch.ones(SHAPES[i % len(SHAPES)], dtype=DTYPES[i % len(DTYPES)]) for i in range(len(kinds))]
    made = [cuda.device_tensor(each) if kind == "device" else each for kind, each in zip(kinds, values, strict=True)]
    return Program(cuda, made)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), kinds=st.lists(st.sampled_from(("device", "host")), min_size=1, max_size=6))
def test_each_copy_is_after_the_last_write_and_before_the_next(data: st.DataObject, kinds: list[str]) -> None:
    """Draws any sequence of writes, starts, waits and changes of the stream that follows the rule of ``Copier``."""
    running = program(kinds)
    commands = st.lists(st.sampled_from(("write", "stream")), max_size=6)

    def compute(may_write: bool) -> None:
        for command in data.draw(commands):
            if command == "stream":
                running.change_stream()
            elif may_write:
                running.write(data.draw(st.integers(0, len(kinds) - 1)))

    for _ in range(data.draw(st.integers(1, 4))):
        compute(may_write=True)
        running.copier.start(running.batch)
        captured = running.bytes()
        compute(may_write=False)
        running.copier.wait()
        assert [target.tolist() for target in running.targets] == captured
    compute(may_write=True)
    assert running.races() == []
    num_copies = sum(operation.kind == "copy" for operation in running.cuda.operations)
    assert num_copies % max(1, kinds.count("device")) == 0
    assert bool(num_copies) == ("device" in kinds)


def test_a_source_of_the_host_is_copied_when_the_batch_starts() -> None:
    """The host may write the source again before the device reaches the batch."""
    running = program(["device", "host"])
    running.write(1)
    running.copier.start(running.batch)
    captured = running.bytes()[1]
    running.write(1)
    assert running.bytes()[1] != captured
    running.copier.wait()
    assert running.targets[1].tolist() == captured


def test_the_batch_holds_its_sources_until_it_is_waited_for() -> None:
    """Only the batch refers to the sources, because the allocator does not record their use."""
    running = program(["device"])
    copier = running.copier
    copier.start(running.batch)
    assert copier._batch is running.batch
    copier.wait()
    assert copier._batch is None
    assert copier.wait() == 0.0


@pytest.mark.parametrize("ignored", [{"wait_stream"}, {"wait_event", "synchronize"}])
def test_a_missing_order_is_noticed(ignored: set[str]) -> None:
    running = program(["device", "host"], FakeCuda(frozenset(ignored)))
    for _ in range(2):
        running.write(0)
        running.copier.start(running.batch)
        running.copier.wait()
    assert running.races()
