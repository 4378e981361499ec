"""Replica-aware dispatch schedule (Lazarus, section 4.2, algorithm 1) in integers: how many tokens go to which rank.

Legend: E experts, N ranks. ``T[e, i]`` tokens of expert e on rank i; ``R[e, j]`` replicas of e on rank j;
``D[e, i, j]`` tokens of e that rank i sends to rank j. All are 64-bit integers, every division is a floor, so every
rank computes the same schedule from the gathered ``T``, and kernels reproduce it bit for bit. The rule:

1. Share. ``t = sum_i T[e, i]``, ``r = sum_j R[e, j]``, ``q = t // r``, ``m[e] = t % r``. The replicas of e are
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
4. Which tokens. Rank i takes its tokens of expert e in their order: the first ``D[e, i, 0]`` go to rank 0, the next
   ``D[e, i, 1]`` to rank 1, and so on.

Hence ``sum_j D[e, i, j] = T[e, i]``, ``sum_i D[e, i, j] = Q[e, j]``, and a rank sends tokens of e away only when its
own share is full.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.errors import ConfigError

Integers = npt.NDArray[np.int64]


def quotas(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any]) -> Integers:
    """``Q[E, N]``: tokens of each expert that each rank computes (rule 1).

    Args:
        tokens: ``T[E, N]``.
        replicas: ``R[E, N]``.

    Raises:
        ConfigError: arrays that are not integers of one shape, negative entries, tokens for an expert without replica.
    """
    counts, copies = _checked(tokens, replicas)
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


def schedule(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any]) -> Integers:
    """``D[E, N, N]``: tokens of each expert from each rank (second axis) to each rank (third axis).

    Raises:
        ConfigError: as ``quotas``.
    """
    rows = [sends(tokens, replicas, rank) for rank in range(np.shape(tokens)[1])]
    return np.stack(rows, axis=1)


def sends(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any], rank: int) -> Integers:
    """``D[:, rank, :]``, ``[E, N]``: tokens that ``rank`` sends to each rank."""
    kept, left, room = _split(tokens, replicas)
    start = (np.cumsum(left, axis=1) - left)[:, rank, None]
    end = np.cumsum(room, axis=1)
    result = _overlap(start, start + left[:, rank, None], end - room, end)
    result[:, rank] += kept[:, rank]
    return result


def receives(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any], rank: int) -> Integers:
    """``D[:, :, rank]``, ``[E, N]``: tokens that ``rank`` receives from each rank."""
    kept, left, room = _split(tokens, replicas)
    start = (np.cumsum(room, axis=1) - room)[:, rank, None]
    end = np.cumsum(left, axis=1)
    result = _overlap(start, start + room[:, rank, None], end - left, end)
    result[:, rank] += kept[:, rank]
    return result


def _split(tokens: npt.NDArray[Any], replicas: npt.NDArray[Any]) -> tuple[Integers, Integers, Integers]:
    """``L``, ``U`` and ``V`` of the rule, each ``[E, N]``."""
    room = quotas(tokens, replicas)
    counts = np.asarray(tokens, dtype=np.int64)
    kept = np.minimum(counts, room)
    return kept, counts - kept, room - kept


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
