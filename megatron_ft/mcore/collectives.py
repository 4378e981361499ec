"""Joint decisions of all ranks: small reductions and JSON, never pickled objects."""

import json
from typing import Any

import torch
import torch.distributed as dist


class Collectives:
    """Collectives over ``group`` (the whole job), called by all its ranks in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        on_gpu = "nccl" in str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on at least one rank."""
        value = torch.tensor([int(flag)], dtype=torch.int32, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` is true on every rank."""
        return not self.any(not flag)

    def gather(self, record: Any) -> list[Any]:
        """Return the JSON-able ``record`` of every rank, in rank order, on every rank."""
        # Not ``all_gather_object``: it unpickles bytes of other ranks, and pickle can run code.
        content = json.dumps(record).encode()
        # All-gather needs one shape on all ranks, and no rank knows the longest record: lengths come first.
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(content)], dtype=torch.int64, device=self._device), group=self.group)
        longest = max(int(size.item()) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        return [
            json.loads(buffer[: int(size.item())].cpu().numpy().tobytes())
            for buffer, size in zip(everyone, sizes, strict=True)
        ]

    def from_first(self, record: Any) -> Any:
        """Return the ``record`` of the group's first rank on every rank."""
        return self.from_rank(0, record)

    def from_rank(self, rank: int, record: Any) -> Any:
        """Return the ``record`` of ``rank`` on every rank; the arguments of other ranks are ignored."""
        return self.gather(record if self.rank == rank else None)[rank]

    def errors(self, error: str | None) -> str | None:
        """Return None when no rank has an error, else the errors with their ranks, the same text on every rank."""
        # The same answer everywhere: either all ranks enter the gather or none does.
        if not self.any(error is not None):
            return None
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.gather(error)) if text is not None)
