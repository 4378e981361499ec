"""The interface of dispatch backends, and the choice of a backend.

Notation of this folder and of ``csrc/dispatch/``. Each letter is a number:

    T  tokens on this rank            N  ranks of the group
    E  experts                        L  distinct experts on this rank
    K  largest number of experts of a token
    S  rows that this rank sends: one for each pair of a token and an expert to which it is routed
    R  rows that this rank receives   H  elements of a row (hidden size)

One layer, forward::

    counts = gather_counts(routing_map, group)                 # [E, N]
    schedule = backend.schedule(counts, replicas, rank)        # [2, E, N]
    handle = backend.plan(routing_map, schedule, rank, local_experts)
    rows = send_rows(backend.permute(tokens, handle), handle, group, counter)
    pieces = backend.sort_received(rows, handle)               # the rows of each local expert
    pieces = experts(pieces)
    rows = return_rows(backend.unsort(pieces, handle), handle, group, counter)
    tokens = backend.unpermute(rows, probs, handle)
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_ft.config.placement import BALANCED
from megatron_ft.errors import ConfigError
from megatron_ft.runtime.dispatch.cpp import CppDispatch
from megatron_ft.runtime.dispatch.cuda import CudaDispatch
from megatron_ft.runtime.dispatch.reference import ReferenceDispatch
from megatron_ft.runtime.dispatch.rows import DispatchHandle

KEY = "placement.dispatch_backend"


class DispatchBackend(Protocol):
    """Interface of a backend for token dispatch. For equal inputs, the results of all backends are bitwise equal.
    Inputs may be on any device that the backend supports."""

    shares: str
    """Rule by which the tokens of an expert are divided over its copies: the value of ``placement.shares``."""

    def schedule(self, counts: torch.Tensor, replicas: torch.Tensor, rank: int) -> torch.Tensor:
        """Compute how many tokens ``rank`` sends and receives, by the rule in ``planning/dispatch.py``.

        ``counts`` int64 [E, N]: tokens that each rank routes to each expert. ``replicas`` int64 [E, N]: copies of each
        expert on each rank. All ranks must pass equal ``counts`` and ``replicas``. Returns int64 [2, E, N]. Element
        [0, e, j] is the number of tokens that ``rank`` sends to the copies of expert e on rank j. Element [1, e, i] is
        the number of tokens of expert e that ``rank`` receives from rank i.

        Raises ``ValueError`` for wrong shapes, negative values, and an expert that has tokens but no copy. The backend
        ``cuda`` does not check values here. Its ``plan`` raises the error if values contradict each other.
        """
        ...

    def plan(
        self, routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]
    ) -> DispatchHandle:
        """Choose the destination rank of each pair of a token and an expert in ``routing_map`` (bool [T, E]).

        ``schedule`` [2, E, N] is the result of the method ``schedule`` for ``rank``, computed from the token counts of
        this map. ``local_experts`` are the L distinct experts of this rank, ascending. The first tokens of an expert go
        to its copies on this rank. The next tokens go to its copies on the other ranks, in rank order.

        Raises ``ValueError`` when routing map, schedule and local experts contradict each other.
        """
        ...

    def permute(self, tokens: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Copy ``tokens`` [T, H] to rows [S, H] in sending order. Differentiable, as all methods on rows."""
        ...

    def sort_received(self, rows: torch.Tensor, handle: DispatchHandle) -> tuple[torch.Tensor, ...]:
        """Sort the received ``rows`` [R, H] from order of arrival by local expert, then by source rank. Return one
        tensor of rows for each local expert, or one empty tensor on a rank without experts."""
        ...

    def unsort(self, pieces: Sequence[torch.Tensor], handle: DispatchHandle) -> torch.Tensor:
        """Join the rows of all local experts to [R, H], in the order in which the rows arrived. This is the inverse of
        ``sort_received``."""
        ...

    def unpermute(self, rows: torch.Tensor, probs: torch.Tensor | None, handle: DispatchHandle) -> torch.Tensor:
        """Sum the returned ``rows`` [S, H] of each token to [T, H], weighted with ``probs`` [T, E]. Add in ascending
        order of the token's experts. A token without rows gets zeros. ``probs=None`` means no weights; it is for
        experts that weight their outputs themselves."""
        ...

    def row_probs(self, probs: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Return the router probability of each sent row, [S], from ``probs`` [T, E]. The probability can then be sent
        together with the row."""
        ...


def open_backend(name: str, shares: str = BALANCED) -> DispatchBackend:
    """Create a backend. Build its kernels first if they are not in the cache.

    Args:
        name: name of the backend, a key of ``BACKENDS``.
        shares: rule by which the tokens of an expert are divided over its copies; value of ``placement.shares``.

    Raises:
        ConfigError: the name is unknown.
        SoftwareError: the kernels cannot be built or run.
    """
    if name not in BACKENDS:
        raise ConfigError.of(KEY, name, f"must be one of {', '.join(BACKENDS)}")
    return BACKENDS[name](shares)


BACKENDS: dict[str, Callable[[str], DispatchBackend]] = {
    "reference": ReferenceDispatch,
    "cpp": CppDispatch,
    "cuda": CudaDispatch,
}
"""Dispatch backends: the class for each value of ``placement.dispatch_backend``."""
