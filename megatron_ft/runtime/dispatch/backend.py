"""Interface of dispatch backends, and the choice among them.

Notation of this folder and of ``csrc/dispatch/``:

    T  tokens on this rank            N  ranks of the group
    K  most experts of one token      L  distinct experts on this rank, ascending
    E  experts                        H  hidden size
    S  rows sent: (token, expert) pairs of this rank
    R  rows received

One layer, forward::

    counts = gather_counts(routing_map, group)                 # [E, N]
    schedule = backend.schedule(counts, replicas, rank)        # [2, E, N]
    handle = backend.plan(routing_map, schedule, rank, local_experts)
    rows = send_rows(backend.permute(tokens, handle), handle, group, counter)
    rows = backend.sort_received(rows, handle)                 # rows of each local expert together
    rows = experts(rows, handle.tokens_per_local_expert)
    rows = return_rows(backend.unsort(rows, handle), handle, group, counter)
    tokens = backend.unpermute(rows, probs, handle)
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_ft.config.placement import BALANCED
from megatron_ft.errors import ConfigError
from megatron_ft.runtime.dispatch.cpp import CppDispatch
from megatron_ft.runtime.dispatch.cuda import CudaDispatch
from megatron_ft.runtime.dispatch.handle import DispatchHandle
from megatron_ft.runtime.dispatch.reference import ReferenceDispatch

KEY = "placement.dispatch_backend"


class DispatchBackend(Protocol):
    """Protocol of a dispatch backend. All backends give the same bits; inputs may be on any device that the backend
    supports."""

    shares: str
    """``placement.shares``."""

    def schedule(self, counts: torch.Tensor, replicas: torch.Tensor, rank: int) -> torch.Tensor:
        """Compute what ``rank`` sends and receives, from a schedule that is the same on every rank.

        ``counts`` int64 [E, N]: tokens that each rank routes to each expert. ``replicas`` int64 [E, N]: copies of each
        expert on each rank. Returns int64 [2, E, N]: tokens of each expert that ``rank`` sends to the copy on each
        rank, and tokens of each expert that it receives from each rank, by the rule in ``planning/dispatch.py``.

        Raises ``ValueError`` for bad shapes, negative values and an expert that has tokens but no copy; ``cuda`` does
        not read the values, and ``plan`` finds what does not fit.
        """
        ...

    def plan(
        self, routing_map: torch.Tensor, schedule: torch.Tensor, rank: int, local_experts: Sequence[int]
    ) -> DispatchHandle:
        """Choose the rows: ``routing_map`` bool [T, E] and ``schedule`` [2, E, N] of this routing and ``rank``.

        The tokens of an expert, in token order, fill its copies in this order: the copy on this rank, then those on
        other ranks, ascending. ``local_experts``: the L distinct experts of this rank, ascending.

        Raises ``ValueError`` when routing map, schedule and local experts contradict each other.
        """
        ...

    def permute(self, tokens: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``tokens`` [T, H] -> [S, H] in sending order. Differentiable, as are the four below."""
        ...

    def sort_received(self, rows: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``rows`` [R, H] or [R] in order of arrival -> the same rows by local expert, source rank, arrival."""
        ...

    def unsort(self, rows: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """The inverse of ``sort_received``."""
        ...

    def unpermute(self, rows: torch.Tensor, probs: torch.Tensor | None, handle: DispatchHandle) -> torch.Tensor:
        """``rows`` [S, H] -> [T, H]: the sum of each token's rows, experts ascending, weighted with ``probs`` [T, E].

        With ``probs=None`` the sum has no weights, for experts that weight their outputs themselves. A token without
        rows gets zeros.
        """
        ...

    def row_probs(self, probs: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``probs`` [T, E] -> [S], to send along with the rows."""
        ...


def open_backend(name: str, shares: str = BALANCED) -> DispatchBackend:
    """Return a backend by its name; its kernels are built at the first use.

    Args:
        name: ``placement.dispatch_backend``, resolved.
        shares: ``placement.shares``.

    Raises:
        ConfigError: unknown name.
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
"""Backends by their names in ``placement.dispatch_backend``."""
