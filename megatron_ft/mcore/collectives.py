"""Small collectives for joint decisions of all ranks. They exchange numbers and JSON, never pickled objects."""

import json
from typing import Any

import torch
import torch.distributed as dist


class Collectives:
    """Collectives over ``group``. All ranks of the group must call the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        on_gpu = "nccl" in str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
        value = torch.tensor([int(flag)], dtype=torch.int32, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def all(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on every rank."""
        return not self.any(not flag)

    def gather(self, record: Any) -> list[Any]:
        """Return, on every rank, the records of all ranks in rank order. ``record`` must be serializable as JSON."""
        # ``all_gather_object`` is not used, because it unpickles bytes of other ranks, and pickle can run code.
        content = json.dumps(record).encode()
        # All-gather needs the same shape on all ranks, so the ranks exchange the lengths of their records first.
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
        """Return the ``record`` of the first rank on every rank. The arguments of other ranks are ignored."""
        return self.from_rank(0, record)

    def from_rank(self, rank: int, record: Any) -> Any:
        """Return the ``record`` of ``rank`` on every rank. The arguments of other ranks are ignored."""
        return self.gather(record if self.rank == rank else None)[rank]

    def errors(self, error: str | None) -> str | None:
        """Return one text with the errors of all ranks, the same on every rank, or None if no rank has an error."""
        # ``any`` gives all ranks the same result, so either all of them call ``gather`` or none does.
        if not self.any(error is not None):
            return None
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.gather(error)) if text is not None)
