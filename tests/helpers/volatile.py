"""Describes the state of an engine besides its parameters and optimizer state."""

from typing import Any


def volatile_state(engine: Any) -> dict[str, str]:
    """Return random states, loss scales, learning rate, auxiliary trackers, expert loads and counts as text."""
    import torch
    import xxhash
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_ft.mcore import versions
    from megatron_ft.mcore.model.transformer_config import unwrap
    from megatron_ft.mcore.moe.router import routers
    from megatron_ft.mcore.optimizer.adamw import _parts

    state = {"cpu_rng": torch.get_rng_state(), "device_rng": torch.cuda.get_rng_state()}
    state |= {f"tracker.{name}": value for name, value in get_cuda_rng_tracker().get_states().items()}
    state |= {f"load.{number}": router.load for number, router in enumerate(routers(engine.model_chunks))}
    for name, values in versions.auxiliary_losses().items():
        if values.any():
            state[f"auxiliary.{name}"] = values
    for number, chunk in enumerate(engine.model_chunks):
        state |= {f"buffer.{number}.{name}": value for name, value in unwrap(chunk).named_buffers()}
    content = {name: value.contiguous().reshape(-1).view(torch.uint8).numpy() for name, value in state.items()}
    text = {name: xxhash.xxh3_128(value.tobytes()).hexdigest() for name, value in content.items()}
    scalers = [part.grad_scaler for part in _parts(engine.optimizer) if getattr(part, "grad_scaler", None) is not None]
    text["scalers"] = str([{key: float(value) for key, value in s.state_dict().items()} for s in scalers])
    text["learning_rates"] = str([group["lr"] for group in engine.optimizer.param_groups])
    return text
