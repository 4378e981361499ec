"""Frees a model: Megatron's objects would otherwise outlive the engine that built them, groups included."""

import weakref
from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class ReleasableDataParallel(DistributedDataParallel):
    """Megatron's data parallelism, freed once nothing refers to it.

    Autograd keeps gradient hooks where Python's collector does not look. Megatron's refer to the whole chunk: it, its
    buffers and its groups would stay forever. These refer to it weakly.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        chunk, parameter = weakref.ref(self), weakref.ref(param)

        def hook(*unused: object) -> None:
            DistributedDataParallel._make_backward_post_hook(chunk(), parameter())(*unused)

        return hook


def release_caches() -> None:
    """Empty the cache that Megatron's rotary embedding keeps by instance: an instance holds a group."""
    RotaryEmbedding.forward.cache_clear()
