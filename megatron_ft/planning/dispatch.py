"""Replica-aware dispatch schedule (Lazarus, section 4.2) in integers: how many tokens go to which rank.

Legend: E experts, N ranks. ``T[e, i]`` is the number of tokens of expert e on rank i; ``R[e, j]`` the number of
replicas of e on rank j; ``Q[e, j]`` the number of tokens of e that rank j computes, its share; ``D[e, i, j]`` the
number of tokens of e that rank i sends to rank j. All are 64-bit integers, and every division is rounded down. So every
rank computes the same schedule from the gathered ``T``, and kernels reproduce it bit for bit. The schedule is computed
in four steps:

1. Share of each rank, by ``placement.shares``. ``balanced``: ``megatron_ft/planning/balanced_shares.py`` states the
   rule. ``even`` (Lazarus, algorithm 1): ``t = sum_i T[e, i]``, ``r = sum_j R[e, j]``, ``q = t // r``,
   ``m[e] = t % r``. The replicas of e are numbered 0 to r - 1 by rank; rank j has the replicas A to B - 1, with
   ``A = sum_{k < j} R[e, k]`` and ``B = A + R[e, j]``. Every replica gets q tokens, and the m[e] replicas
   ``(o + x) % r`` for ``0 <= x < m[e]`` get one token more, where ``o = (sum_{e' < e} m[e']) % r`` continues after the
   additional tokens of the previous experts. ``overlap(a, b, c, d) = max(0, min(b, d) - max(a, c))`` is the length that
   the ranges [a, b) and [c, d) have in common. Rank j gets
   ``Q[e, j] = q * R[e, j] + overlap(A, B, o, o + m[e]) + overlap(A, B, o - r, o - r + m[e])`` tokens. The second
   overlap counts the replicas for which ``(o + x) % r`` has wrapped around to 0.
2. Local tokens. ``L[e, i] = min(T[e, i], Q[e, i])`` tokens stay on rank i.
3. Sent tokens. Rank i has ``U = T - L`` tokens to send, and rank j has space for ``V = Q - L`` more; for each expert, U
   and V have the same sum. Tokens and spaces are numbered in rank order, and token number n goes to space number n.
   With ``SU[e, i] = sum_{k < i} U[e, k]`` and ``SV[e, j] = sum_{k < j} V[e, k]``,
   ``D[e, i, j] = overlap(SU[e, i], SU[e, i] + U[e, i], SV[e, j], SV[e, j] + V[e, j]) + (L[e, i] if i == j else 0)``.
4. Order of tokens. The first ``D[e, i, i]`` tokens of expert e on rank i stay on rank i. The next ones go to the other
   ranks, in ascending order of ranks.

Hence ``sum_j D[e, i, j] = T[e, i]`` and ``sum_i D[e, i, j] = Q[e, j]``. A rank sends tokens of e to other ranks only if
its own share is full.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.config.placement import BALANCED, EVEN, SHARES
from megatron_ft.errors import ConfigError
from megatron_ft.planning.balanced_shares import MAX_TOKENS, balanced_quotas

Integers = npt.NDArray[np.int64]


def quotas(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any], shares: str = BALANCED) -> Integers:
    """Return ``Q[E, N]``, the number of tokens of each expert that each rank computes (step 1).

    Args:
        tokens: ``T[E, N]``.
        replicas: ``R[E, N]``.
        shares: value of ``placement.shares``.

    Raises:
        ConfigError: the arrays are not integers of one shape, an entry is negative, an expert without replicas has
            tokens, or ``shares`` is ``balanced`` and the number of tokens is not below ``MAX_TOKENS``.
    """
    assert shares in SHARES, f"placement.shares={shares}: must be one of {', '.join(SHARES)}"
    counts, copies = _checked(tokens, replicas)
    if shares == EVEN:
        return _even_quotas(counts, copies)
    if counts.sum() >= MAX_TOKENS:
        constraint = f"must be below {MAX_TOKENS} with balanced shares; set placement.shares=even"
        raise ConfigError.of("sum of tokens", int(counts.sum()), constraint)
    return balanced_quotas(counts, copies)


def schedule(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any], shares: str = BALANCED) -> Integers:
    """Return ``D[E, N, N]``, the number of tokens of each expert that each rank (axis 1) sends to each rank (axis 2).

    Raises:
        ConfigError: in the same cases as ``quotas``.
    """
    quota = quotas(tokens, replicas, shares)
    return np.stack([sends(tokens, quota, rank) for rank in range(quota.shape[1])], axis=1)


def sends(tokens: npt.NDArray[Any], quota: Integers, rank: int) -> Integers:
    """Return ``D[:, rank, :]``, the number of tokens of each expert that ``rank`` sends to each rank, ``[E, N]``.

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
    """Return ``D[:, :, rank]``, the number of tokens of each expert that ``rank`` gets from each rank, ``[E, N]``.

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
    """Return as ``[E, N]`` each: tokens that stay (``L``), tokens to send (``U``), free space for tokens (``V``)."""
    counts = np.asarray(tokens, dtype=np.int64)
    kept = np.minimum(counts, quota)
    return kept, counts - kept, quota - kept


def _overlap(first: Integers, last: Integers, other_first: Integers, other_last: Integers) -> Integers:
    return np.asarray(np.maximum(0, np.minimum(last, other_last) - np.maximum(first, other_first)))


def _checked(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    for key, array in (("tokens", tokens), ("replicas", replicas)):
        if np.ndim(array) != 2 or not np.issubdtype(np.asarray(array).dtype, np.integer):
            raise ConfigError.of(key, np.asarray(array).dtype, "must be a 2-D array of integers, [experts, ranks]")
        if np.size(array) and np.min(array) < 0:
            raise ConfigError.of(key, int(np.min(array)), "must be at least 0")
    if np.shape(tokens) != np.shape(replicas):
        raise ConfigError.of("replicas", np.shape(replicas), f"must have the shape of tokens, {np.shape(tokens)}")
    counts, copies = np.asarray(tokens, dtype=np.int64), np.asarray(replicas, dtype=np.int64)
    for expert in np.nonzero((copies.sum(axis=1) == 0) & (counts.sum(axis=1) > 0))[0][:1]:
        raise ConfigError.of(f"replicas of expert {expert}", 0, "must be at least 1, because the expert has tokens")
    return counts, copies
