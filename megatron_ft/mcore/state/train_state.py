"""The state of a rank after an iteration, besides parameters and optimizer state."""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.checkpoint.optimizer_state import sub_optimizers
from megatron_ft.mcore.checkpoint.rng import capture_rng, restore_rng
from megatron_ft.mcore.model.names import unwrap
from megatron_ft.mcore.optimizer.commit import grad_scalers
from megatron_ft.planning.commit import History, Vote

_TENSOR = "tensor_base64"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """State of a rank after an iteration, besides parameters and optimizer state. Tensors are copied on their own
    device, so that a capture does not wait for a GPU. ``capture`` sets the first six fields. The callers set the other
    fields."""

    iteration: int
    """Number of completed iterations."""
    rng: Mapping[str, Any] | None = None
    """Random number generators from ``capture_rng``. None in state from other ranks, because each rank has its own."""
    buffers: Mapping[str, torch.Tensor]
    """Buffers of the model, such as router biases, by ``<chunk>.<name>``."""
    grad_scalers: tuple[Mapping[str, Any], ...]
    """Loss scale and its counters, for each part of the optimizer that has a loss scaler."""
    group_steps: tuple[Any, ...]
    """Step count of each parameter group; None for a group whose steps the optimizer counts per tensor."""
    history: History
    newest_vote: Vote | None = None
    """Vote of the newest iteration; None before the first iteration of this process."""
    rounded_off: int = 0
    """Newest iteration after which all evaluations, saves and digests that were due are done."""
    stopped: str | None = None
    """Reason why a policy stopped the run at the newest iteration; None if it did not."""

    @classmethod
    def capture(
        cls, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, *, iteration: int, history: History
    ) -> "TrainState":
        """Copy the current state of this process, which has completed ``iteration`` iterations."""
        return cls(
            iteration=iteration,
            rng=capture_rng(),
            buffers={name: _copied(buffer) for name, buffer in _buffers(model_chunks)},
            grad_scalers=tuple(
                {name: _copied(value) for name, value in scaler.state_dict().items()}
                for scaler in grad_scalers(optimizer)
            ),
            group_steps=tuple(_copied(group.get("step")) for group in _groups(optimizer)),
            history=history,
        )

    def restore(self, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        """Restore buffers, loss scales, step counts and, unless ``rng`` is None, random number generators.

        Raises:
            RecoveryError: the model has other buffers, or the optimizer other parts, than those that were captured.
                It may be raised on some ranks only.
        """
        buffers = dict(_buffers(model_chunks))
        if set(buffers) != set(self.buffers):
            raise RecoveryError(
                "the model and the captured state have different buffers, for example "
                f"{sorted(set(buffers) ^ set(self.buffers))[:5]}"
            )
        for name, value in self.buffers.items():
            # The dtype of the capture is used, because Megatron converts the router bias to FP32 at the first forward.
            buffers[name].data = value.to(buffers[name].device, copy=True)
        if self.rng is not None:
            restore_rng(self.rng)
        scalers, groups = grad_scalers(optimizer), list(_groups(optimizer))
        if (len(scalers), len(groups)) != (len(self.grad_scalers), len(self.group_steps)):
            parts = f"{len(groups)} and {len(scalers)}"
            raise RecoveryError(
                f"the captured state has {len(self.group_steps)} parameter groups and {len(self.grad_scalers)} loss "
                f"scalers, but the optimizer has {parts}"
            )
        for scaler, state in zip(scalers, self.grad_scalers, strict=True):
            scaler.load_state_dict(dict(state))
        for group, step in zip(groups, self.group_steps, strict=True):
            if step is not None:
                group["step"] = _copied(step)

    def restore_router_bias(self, model_chunks: list[torch.nn.Module]) -> None:
        """Restore only the router biases. A skipped iteration has to restore nothing else."""
        for name, buffer in _buffers(model_chunks):
            if name.endswith(".expert_bias"):
                buffer.copy_(self.buffers[name])

    def differences(self, other: "TrainState") -> list[str]:
        """Return the names of the captured fields whose bits are not equal in ``other``."""
        mine, theirs = self._captured(), other._captured()
        # Compared as texts: NaN equals NaN, and numbers with the same digits have the same bits.
        return [name for name in mine if json.dumps(mine[name]) != json.dumps(theirs[name])]

    def to_json(self, *, own: bool = True) -> dict[str, Any]:
        """Return all fields as JSON values, with tensors in base64. ``own=False`` omits the random number generators.
        The headers of slices contain this record since version 1 of the window format. So fields may be added, but must
        not be renamed."""
        record = self._captured()
        if not own:
            del record["rng"]
        if self.newest_vote is not None:
            record["newest_vote"] = self.newest_vote.to_record()
        if self.stopped is not None:
            record["stopped"] = self.stopped
        return {**record, "rounded_off": self.rounded_off}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "TrainState":
        """Create the state from the result of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or has a wrong type.
        """
        content, vote = _decode(record), record.get("newest_vote")
        history = content["history"]
        return cls(
            iteration=content["iteration"],
            rng=content.get("rng"),
            buffers=content["buffers"],
            grad_scalers=tuple(content["grad_scalers"]),
            group_steps=tuple(content["group_steps"]),
            history=History(**{**history, "losses": tuple(history["losses"])}),
            newest_vote=None if vote is None else Vote.from_record(vote),
            rounded_off=content.get("rounded_off", 0),
            stopped=content.get("stopped"),
        )

    def _captured(self) -> dict[str, Any]:
        record: dict[str, Any] = _encode(
            {
                "iteration": self.iteration,
                "rng": self.rng,
                "buffers": self.buffers,
                "grad_scalers": self.grad_scalers,
                "group_steps": self.group_steps,
                "history": asdict(self.history),
            }
        )
        return record


def _buffers(model_chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, chunk in enumerate(model_chunks):
        for name, buffer in unwrap(chunk).named_buffers():
            yield f"{number}.{name}", buffer


def _groups(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    for member in sub_optimizers(optimizer):
        yield from member.optimizer.param_groups


def _copied(value: Any) -> Any:
    return value.detach().clone() if torch.is_tensor(value) else value


def _encode(value: Any) -> Any:
    """Convert nested values to JSON values. Each tensor becomes its dtype, its shape and its bytes in base64."""
    if torch.is_tensor(value):
        # Tensors are stored as bytes, because JSON has no NaN, and a decimal number has no dtype.
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: base64.b64encode(content).decode(), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, Mapping):
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
