"""What an iteration's state has beside parameters and their optimizer state, as a JSON object, and back.

Random numbers, buffers (router bias, counters), loss scales, step counts that an optimizer keeps for a whole group,
and what earlier votes left behind. It belongs to slice 0: a replay computes all later ones.
"""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.checkpoint.optimizer_state import sub_optimizers
from megatron_ft.mcore.checkpoint.rng import capture_rng, restore_rng
from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.optimizer.commit import grad_scalers
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.commit import History

_TENSOR = "tensor_base64"


def capture_extras(engine: TrainingEngine) -> dict[str, Any]:
    """The present extras of this rank as plain values; tensors as base64 of their bytes."""
    record = {
        "iteration": engine.iteration,
        "rng": capture_rng(),
        "buffers": dict(_buffers(engine)),
        "grad_scalers": [scaler.state_dict() for scaler in grad_scalers(engine.optimizer)],
        "group_steps": [group.get("step") for group in _groups(engine)],
        "history": asdict(engine.history),
    }
    encoded: dict[str, Any] = _encode(record)
    return encoded


def restore_extras(engine: TrainingEngine, record: Mapping[str, Any]) -> None:
    """Put back what ``capture_extras`` returned on the rank of the same place; a record may lack generators (``rng``).

    Raises:
        RecoveryError: the model has other buffers, or the optimizer other parts.
    """
    content = _decode(record)
    _fill_buffers(engine, content["buffers"])
    if "rng" in content:
        restore_rng(content["rng"])
    scalers, groups = grad_scalers(engine.optimizer), list(_groups(engine))
    if (len(scalers), len(groups)) != (len(content["grad_scalers"]), len(content["group_steps"])):
        raise RecoveryError(f"captured from an optimizer of other parts: {len(groups)} groups, {len(scalers)} scalers")
    for scaler, state in zip(scalers, content["grad_scalers"], strict=True):
        scaler.load_state_dict(state)
    for group, step in zip(groups, content["group_steps"], strict=True):
        if step is not None:
            group["step"] = step
    history = content["history"]
    engine.history = History(**{**history, "losses": tuple(history["losses"])})
    engine.iteration = content["iteration"]


def _buffers(engine: TrainingEngine) -> Iterator[tuple[str, torch.Tensor]]:
    for number, chunk in enumerate(engine.model_chunks):
        for name, buffer in unwrap(chunk).named_buffers():
            yield f"{number}.{name}", buffer


def _groups(engine: TrainingEngine) -> Iterator[dict[str, Any]]:
    for member in sub_optimizers(engine.optimizer):
        yield from member.optimizer.param_groups


def _fill_buffers(engine: TrainingEngine, captured: Mapping[str, torch.Tensor]) -> None:
    buffers = dict(_buffers(engine))
    if set(buffers) != set(captured):
        raise RecoveryError(f"buffers differ from the captured ones: {sorted(set(buffers) ^ set(captured))[:5]}")
    for name, value in captured.items():
        # Megatron turns the router bias back into FP32 at the first forward only.
        buffers[name].data = value.to(buffers[name].device)


def _encode(value: Any) -> Any:
    if torch.is_tensor(value):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: base64.b64encode(content).decode(), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _TENSOR in value:
            content = bytearray(base64.b64decode(value[_TENSOR], validate=True))
            flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            return flat.view(getattr(torch, value["dtype"])).view(value["shape"])
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value
