"""Which keys decide what an iteration computes: a window is replayed with those it was trained with."""

from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict

_REPLAYED_GROUPS = ("model", "parallel", "optimizer", "precision", "training")
_OF_THE_RUN = ("exit_at_iteration", "eval_interval_iterations", "eval_iterations", "digest_interval_iterations")
"""Keys of ``training`` that change no iteration."""


def replay_config(config: JobConfig, fingerprint: str, *, device: str, transformer_impl: str) -> dict[str, Any]:
    """The keys that decide what an iteration computes, dotted, with their values; of the data its fingerprint.

    Args:
        device: ``cpu`` or ``cuda``: what ``training.device`` came to.
        transformer_impl: ``local`` or ``transformer_engine``: what ``training.transformer_impl`` came to.
    """
    groups = to_dict(config)
    groups["training"] |= {"device": device, "transformer_impl": transformer_impl}
    # Another backend sums in another order.
    groups["parallel"]["device_backend"] = config.parallel.backend_on(device)
    placement = {f"placement.{name}": groups["placement"][name] for name in ("algorithm", "num_slots_per_rank")}
    return {"data": fingerprint, **placement} | {
        f"{group}.{name}": value
        for group in _REPLAYED_GROUPS
        for name, value in groups[group].items()
        if not (group == "training" and name in _OF_THE_RUN)
    }
