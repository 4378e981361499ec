"""Builds small variants with Megatron-Core on the CPU. Prints, as JSON, the parameter counts of each by operator kind,
and the tensors that a checkpoint of it has."""

import json
import sys
from collections import Counter

from megatron_ft.config.serialize import from_dict


def main() -> None:
    """Read a JSON list of model sections from standard input, and print a list of counts and tensors."""
    import torch.distributed as dist

    from megatron_ft.mcore.device.install import install

    variants = [from_dict({"model": model, "training": {"device": "cpu"}}) for model in json.load(sys.stdin)]
    _, implementation = install(variants[0])

    from megatron_ft.mcore.groups import Groups

    groups = Groups.form(
        variants[0].parallel,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        generation=0,
        device="cpu",
        timeout_seconds=60.0,
    )
    found = []
    for config in variants:
        chunks = build(config, implementation, groups.pg_collection)
        found.append({"counts": count(chunks), "tensors": stored_tensors(chunks)})
    print(json.dumps(found))


def build(config, implementation, pg_collection):  # type: ignore[no-untyped-def]
    """Return the model chunks of a job of one rank."""
    import torch

    from megatron_ft.mcore.model.build import build_model
    from megatron_ft.mcore.model.transformer_config import build_transformer_config

    return build_model(
        config,
        build_transformer_config(config, implementation),
        vocab_size=config.model.vocab_size,
        device=torch.device("cpu"),
        pg_collection=pg_collection,
    )


def stored_tensors(chunks) -> dict[str, tuple[int, ...]]:  # type: ignore[no-untyped-def]
    """Return the shape of each tensor in a checkpoint, by its name, as Megatron's layers describe them for a save."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from megatron_ft.mcore.model.transformer_config import unwrap
    from megatron_ft.mcore.optimizer.adamw import SHARDING_METADATA

    metadata = {**SHARDING_METADATA, "singleton_local_shards": True, "non_homogeneous_layers": True}
    states = [unwrap(chunk).sharded_state_dict(metadata=metadata) for chunk in chunks]
    for state in states:
        apply_factories(state)
    shards = [shard for state in states for shard in nested_values(state) if isinstance(shard, ShardedTensor)]
    return {shard.key: tuple(shard.global_shape) for shard in shards}


def count(chunks) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """Return the number of parameters of each kind of operator. Kinds are recognised by Megatron's names."""
    counts: Counter[str] = Counter()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            counts[kind(name)] += parameter.numel()
    return dict(counts)


def kind(name: str) -> str:
    """Return the kind of operator to which a parameter of Megatron belongs."""
    if ".local_experts." in name:
        return "expert"
    if ".router." in name:
        return "gate"
    if "embedding." in name:
        return "embedding"
    if "final_layernorm" in name or "output_layer" in name:
        return "head"
    return "non_expert"


if __name__ == "__main__":
    main()
