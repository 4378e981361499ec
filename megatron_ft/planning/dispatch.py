"""Replica-aware dispatch schedule (Lazarus, section 4.2) in integers: how many tokens go to which rank.

Legend: E experts, N ranks. ``T[e, i]`` tokens of expert e on rank i; ``R[e, j]`` replicas of e on rank j;
``Q[e, j]`` tokens of e that rank j computes, its share; ``D[e, i, j]`` tokens of e that rank i sends to rank j. All are
64-bit integers, every division is a floor, so every rank computes the same schedule from the gathered ``T``, and
kernels reproduce it bit for bit. The rule:

1. Shares, by ``placement.shares``. ``balanced``: ``megatron_ft/planning/balanced_shares.py``. ``even`` (Lazarus,
   algorithm 1): ``t = sum_i T[e, i]``, ``r = sum_j R[e, j]``, ``q = t // r``, ``m[e] = t % r``. The replicas of e are
   numbered 0 to r - 1 by rank; rank j has those from ``A = sum_{k < j} R[e, k]`` to ``B = A + R[e, j]``, B excluded.
   Every replica takes q tokens; the m[e] replicas ``(o + x) % r`` for ``0 <= x < m[e]`` take one more, where
   ``o = (sum_{e' < e} m[e']) % r``: each expert's remainder begins where those before it ended. So, with
   ``overlap(a, b, c, d) = max(0, min(b, d) - max(a, c))``,
   ``Q[e, j] = q * R[e, j] + overlap(A, B, o, o + m[e]) + overlap(A, B, o - r, o - r + m[e])``.
2. Local first. ``L[e, i] = min(T[e, i], Q[e, i])`` tokens stay.
3. The rest. ``U = T - L`` are left over, ``V = Q - L`` is room; both add up to the same number for each expert. With
   ``SU[e, i] = sum_{k < i} U[e, k]`` and ``SV[e, j] = sum_{k < j} V[e, k]``, what is left over and the room are laid
   end to end in rank order and matched where they meet:
   ``D[e, i, j] = overlap(SU[e, i], SU[e, i] + U[e, i], SV[e, j], SV[e, j] + V[e, j]) + (L[e, i] if i == j else 0)``.
4. Which tokens. Rank i takes its tokens of expert e in their order: the first ``D[e, i, i]`` stay, the next go to the
   other ranks, ascending.

Hence ``sum_j D[e, i, j] = T[e, i]``, ``sum_i D[e, i, j] = Q[e, j]``, and a rank sends tokens of e away only when its
own share is full.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.config.placement import BALANCED, EVEN, SHARES
from megatron_ft.errors import ConfigError
from megatron_ft.planning.balanced_shares import MAX_TOKENS, balanced_quotas

Integers = npt.NDArray[np.int64]


def quotas(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any], shares: str = BALANCED) -> Integers:
    """Return ``Q[E, N]``: tokens of each expert that each rank computes (rule 1).

    Args:
        tokens: ``T[E, N]``.
        replicas: ``R[E, N]``.
        shares: value of ``placement.shares``.

    Raises:
        ConfigError: arrays that are not integers of one shape, negative entries, tokens for an expert without replica;
            with ``balanced``, ``MAX_TOKENS`` tokens or more.
    """
    assert shares in SHARES, f"placement.shares={shares}: must be one of {', '.join(SHARES)}"
    counts, copies = _checked(tokens, replicas)
    if shares == EVEN:
        return _even_quotas(counts, copies)
    if counts.sum() >= MAX_TOKENS:
        raise ConfigError.of("sum of tokens", int(counts.sum()), f"must be below {MAX_TOKENS} with balanced shares")
    return balanced_quotas(counts, copies)


def schedule(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any], shares: str = BALANCED) -> Integers:
    """Return ``D[E, N, N]``: tokens of each expert from each rank (second axis) to each rank (third axis).

    Raises:
        ConfigError: as ``quotas``.
    """
    quota = quotas(tokens, replicas, shares)
    return np.stack([sends(tokens, quota, rank) for rank in range(quota.shape[1])], axis=1)


def sends(tokens: npt.NDArray[Any], quota: Integers, rank: int) -> Integers:
    """Return ``D[:, rank, :]``, ``[E, N]``: tokens that ``rank`` sends to each rank.

    Args:
        tokens: ``T[E, N]``.
        quota: ``Q[E, N]``.
    """
    kept, left, room = _split(tokens, quota)
    start = (np.cumsum(left, axis=1) - left)[:, rank, None]
    end = np.cumsum(room, axis=1)
    result = _overlap(start, start + left[:, rank, None], end - room, end)
    result[:, rank] += kept[:, rank]
    return result


def receives(tokens: npt.NDArray[Any], quota: Integers, rank: int) -> Integers:
    """Return ``D[:, :, rank]``, ``[E, N]``: tokens that ``rank`` receives from each rank.

    Args:
        tokens: ``T[E, N]``.
        quota: ``Q[E, N]``.
    """
    kept, left, room = _split(tokens, quota)
    start = (np.cumsum(room, axis=1) - room)[:, rank, None]
    end = np.cumsum(left, axis=1)
    result = _overlap(start, start + room[:, rank, None], end - left, end)
    result[:, rank] += kept[:, rank]
    return result


def _even_quotas(counts: Integers, copies: Integers) -> Integers:
    totals = counts.sum(axis=1)
    num_replicas = np.maximum(copies.sum(axis=1), 1)
    share, rest = totals // num_replicas, totals % num_replicas
    offset = (np.cumsum(rest) - rest) % num_replicas
    last = np.cumsum(copies, axis=1)
    first = last - copies
    start, size = offset[:, None], num_replicas[:, None]
    extra = _overlap(first, last, start, start + rest[:, None])
    extra += _overlap(first, last, start - size, start - size + rest[:, None])
    return np.asarray(share[:, None] * copies + extra)


def _split(tokens: npt.NDArray[Any], quota: Integers) -> tuple[Integers, Integers, Integers]:
    """Return ``L``, ``U`` and ``V`` of the rule, each ``[E, N]``."""
    counts = np.asarray(tokens, dtype=np.int64)
    kept = np.minimum(counts, quota)
    return kept, counts - kept, quota - kept


def _overlap(first: Integers, last: Integers, other_first: Integers, other_last: Integers) -> Integers:
    return np.asarray(np.maximum(0, np.minimum(last, other_last) - np.maximum(first, other_first)))


def _checked(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    for key, array in (("tokens", tokens), ("replicas", replicas)):
        if np.ndim(array) != 2 or not np.issubdtype(np.asarray(array).dtype, np.integer):
            raise ConfigError.of(key, np.asarray(array).dtype, "must be integers [experts, ranks]")
        if np.size(array) and np.min(array) < 0:
            raise ConfigError.of(key, int(np.min(array)), "must be 0 or more")
    if np.shape(tokens) != np.shape(replicas):
        raise ConfigError.of("replicas", np.shape(replicas), f"must have the shape of tokens, {np.shape(tokens)}")
    counts, copies = np.asarray(tokens, dtype=np.int64), np.asarray(replicas, dtype=np.int64)
    for expert in np.nonzero((copies.sum(axis=1) == 0) & (counts.sum(axis=1) > 0))[0][:1]:
        raise ConfigError.of(f"replicas of expert {expert}", 0, "must be at least 1, because the expert has tokens")
    return counts, copies
