"""Counts the torch operations of a thread. Everything that allocates a tensor is an operation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, function: Callable[..., Any], _: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self._found[0] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list with one number, which counts the operations of this thread in the block, including views."""
    found = [0]
    with _Counter(found):
        yield found
