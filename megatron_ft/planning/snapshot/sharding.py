"""Divisions of a checkpoint among ranks by whole modules, as in MoC-System (section 4).

Ranks of this project capture equal ranges of elements (``estimate_demand``), which no division by modules can improve.
For comparison, this module has three methods of the paper: the baseline; equal sharding of experts and of other
modules (equation 8); adaptive sharding of other modules (equation 9). All three assume data and expert parallelism:
rank ``r`` has the ``r % expert_size``-th group of consecutive experts of each layer, and all other modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.planning.snapshot.demand import Matrix
from megatron_ft.planning.snapshot.expert_choice import Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSharding:
    """Job whose checkpoints are divided by modules."""

    data_size: int
    """Number of data-parallel ranks."""
    expert_size: int
    """Number of ranks that together have all experts; divides ``data_size``."""
    module_bytes: tuple[int, ...]
    """Bytes of each module outside experts, for example of an attention layer."""
    expert_bytes: int
    """Bytes of one expert."""

    def __post_init__(self) -> None:
        assert self.data_size % self.expert_size == 0, f"{self.expert_size} does not divide {self.data_size} ranks"

    @property
    def num_copies(self) -> int:
        """Number of expert-parallel groups, each with all experts."""
        return self.data_size // self.expert_size

    def baseline(self, saved: Mask) -> Matrix:
        """Return the bytes that each rank saves if rank 0 saves all modules outside experts, and the first
        expert-parallel group saves all experts (figure 7a).

        Args:
            saved: experts that are saved, ``[MoE layers, experts]``.
        """
        found = np.zeros(self.data_size, dtype=np.int64)
        found[: self.expert_size] = self._saved_experts(saved) * self.expert_bytes
        found[0] += sum(self.module_bytes)
        return found

    def shares_of_experts(self, saved: Mask, *, whole: bool = True) -> Matrix:
        """Return the bytes of experts that each rank saves if the expert-parallel groups divide the work (section 4.1).

        Args:
            saved: experts that are saved, ``[MoE layers, experts]``.
            whole: whether an expert is saved by one rank, as equation 9 assumes. Otherwise each group saves an equal
                part of it (figure 7b), up to the rounding of bytes.
        """
        numbers = self._saved_experts(saved)
        units = numbers if whole else numbers * self.expert_bytes
        groups = np.arange(self.num_copies)[:, None]
        # Units are dealt to the groups in turn, so the first groups get the remainder.
        found = units[None, :] // self.num_copies + (groups < units[None, :] % self.num_copies)
        shares: Matrix = found.reshape(-1) * (self.expert_bytes if whole else 1)
        return shares

    def equal(self, saved: Mask, *, whole: bool = True) -> Matrix:
        """Return the bytes that each rank saves if modules outside experts are divided equally, regardless of the
        experts that the ranks save (section 4.2)."""
        modules = _assign(self.module_bytes, np.zeros(self.data_size, dtype=np.int64))
        return self.shares_of_experts(saved, whole=whole) + modules

    def adaptive(self, saved: Mask, *, whole: bool = True) -> Matrix:
        """Return the bytes that each rank saves if modules outside experts are assigned one by one, the largest first.
        Each module goes to the rank with the fewest bytes so far, including bytes of experts (section 4.3)."""
        return _assign(self.module_bytes, self.shares_of_experts(saved, whole=whole))

    def _saved_experts(self, saved: Mask) -> Matrix:
        """Return the number of saved experts of each expert-parallel rank."""
        layers, experts = saved.shape
        assert experts % self.expert_size == 0, f"{self.expert_size} ranks do not divide {experts} experts"
        counts: Matrix = saved.reshape(layers, self.expert_size, -1).sum(axis=(0, 2), dtype=np.int64)
        return counts


def _assign(module_bytes: Sequence[int], begun: Matrix) -> Matrix:
    """Add each module, the largest first, to the rank with the fewest bytes. ``begun``: bytes a rank already saves."""
    found = begun.copy()
    for num_bytes in sorted(module_bytes, reverse=True):
        found[int(np.argmin(found))] += num_bytes
    return found
