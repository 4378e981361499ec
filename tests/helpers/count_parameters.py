"""Builds small variants with Megatron-Core on the CPU and prints their parameter counts, by operator kind, as JSON."""

import json
import sys
from collections import Counter

from megatron_ft.config.serialize import from_dict


def main() -> None:
    """Read a JSON list of model sections from standard input, and print a list of counts."""
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
    print(json.dumps([count(config, implementation, groups.pg_collection) for config in variants]))


def count(config, implementation, pg_collection) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """Return the number of parameters of each kind of operator. Kinds are recognised by Megatron's names."""
    import torch

    from megatron_ft.mcore.model.build import build_model
    from megatron_ft.mcore.model.transformer_config import build_transformer_config

    chunks = build_model(
        config,
        build_transformer_config(config, implementation),
        vocab_size=config.model.vocab_size,
        device=torch.device("cpu"),
        pg_collection=pg_collection,
    )
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
