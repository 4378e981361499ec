"""Frees a model: removes references that would keep it and its groups after the engine ends."""

import weakref
from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class ReleasableDataParallel(DistributedDataParallel):
    """Megatron's data parallelism, freed when nothing refers to it.

    Autograd keeps gradient hooks where Python's garbage collector does not search. Megatron's hooks refer to the whole
    chunk, so the chunk, its buffers and groups would never be freed. The hooks here refer to it weakly.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        chunk, parameter = weakref.ref(self), weakref.ref(param)

        def hook(*unused: object) -> None:
            DistributedDataParallel._make_backward_post_hook(chunk(), parameter())(*unused)

        return hook


def release_caches() -> None:
    """Empty the cache of Megatron's rotary embedding, which keeps instances, and these keep groups."""
    RotaryEmbedding.forward.cache_clear()
