"""Who gives newcomers the state that every rank with state has."""

from collections.abc import Mapping, Sequence


def share_out(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Which of ``ranks`` sends which tensors, so that each sends about as many bytes; names in order.

    Args:
        sizes: bytes by name.
    """
    shares: dict[int, list[str]] = {rank: [] for rank in ranks}
    num_bytes = dict.fromkeys(ranks, 0)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(ranks, key=lambda rank: (num_bytes[rank], rank))
        shares[rank].append(name)
        num_bytes[rank] += sizes[name]
    return {rank: tuple(sorted(names)) for rank, names in shares.items()}
