"""Removes references that would keep a model and its process groups in memory after its engine ends."""

import weakref
from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class ReleasableDataParallel(DistributedDataParallel):
    """Megatron's ``DistributedDataParallel`` with gradient hooks that do not keep the model chunk in memory.

    Autograd stores hooks where Python's garbage collector does not find them. Megatron's hooks reference the whole
    chunk, so the chunk, its buffers and its process groups would never be freed. The hooks of this class use weak
    references.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        chunk, parameter = weakref.ref(self), weakref.ref(param)

        def hook(*unused: object) -> None:
            DistributedDataParallel._make_backward_post_hook(chunk(), parameter())(*unused)

        return hook


def release_caches() -> None:
    """Empty the cache of Megatron's ``RotaryEmbedding``. Its entries reference modules, and these process groups."""
    RotaryEmbedding.forward.cache_clear()
