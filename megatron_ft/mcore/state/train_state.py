"""The state of a rank at an iteration boundary besides its tensors."""

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
    """A rank's state after an iteration, besides parameters and their optimizer state.

    Tensors are copies on the device of the originals, so that a capture does not wait for a GPU. The first six fields
    are captured from the model, the optimizer and the process; the others are set by their owners.
    """

    iteration: int
    """Number of completed iterations."""
    rng: Mapping[str, Any] | None = None
    """Generators from ``capture_rng``. None in state received from other ranks, because each rank has its own."""
    buffers: Mapping[str, torch.Tensor]
    """Buffers of the model by chunk and name: router bias and counters, in their own dtype and shape."""
    grad_scalers: tuple[Mapping[str, Any], ...]
    """Loss scale and its counters, for each part of the optimizer that has one."""
    group_steps: tuple[Any, ...]
    """Step count of each parameter group; None if the optimizer counts per tensor."""
    history: History
    newest_vote: Vote | None = None
    """Vote of the newest iteration; None before the first iteration of this process."""
    rounded_off: int = 0
    """Newest iteration after which all due evaluations, saves and digests are done."""
    stopped: str | None = None
    """Reason why a policy stops the run with the iteration that has just finished; None if it continues."""

    @classmethod
    def capture(
        cls, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, *, iteration: int, history: History
    ) -> "TrainState":
        """Copy the present state of this process, which has completed ``iteration`` iterations."""
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
        """Restore generators (if there are any), buffers, loss scales and step counts.

        Raises:
            RecoveryError: the model has other buffers, or the optimizer other parts; other ranks may not raise it.
        """
        buffers = dict(_buffers(model_chunks))
        if set(buffers) != set(self.buffers):
            raise RecoveryError(
                "the model has other buffers than were captured; they differ in "
                f"{sorted(set(buffers) ^ set(self.buffers))[:5]}"
            )
        for name, value in self.buffers.items():
            # Megatron turns the router bias back into FP32 at the first forward only: the dtype is that of the capture.
            buffers[name].data = value.to(buffers[name].device, copy=True)
        if self.rng is not None:
            restore_rng(self.rng)
        scalers, groups = grad_scalers(optimizer), list(_groups(optimizer))
        if (len(scalers), len(groups)) != (len(self.grad_scalers), len(self.group_steps)):
            parts = f"{len(groups)} groups, {len(scalers)} scalers"
            raise RecoveryError(f"was captured from an optimizer with other numbers of parts; this one has {parts}")
        for scaler, state in zip(scalers, self.grad_scalers, strict=True):
            scaler.load_state_dict(dict(state))
        for group, step in zip(groups, self.group_steps, strict=True):
            if step is not None:
                group["step"] = _copied(step)

    def restore_router_bias(self, model_chunks: list[torch.nn.Module]) -> None:
        """Put back the router bias only: all that a skipped iteration has to undo."""
        for name, buffer in _buffers(model_chunks):
            if name.endswith(".expert_bias"):
                buffer.copy_(self.buffers[name])

    def differences(self, other: "TrainState") -> list[str]:
        """Return the names of captured fields whose bits differ from those of ``other``."""
        mine, theirs = self._captured(), other._captured()
        # As text: NaN equals NaN, and equal digits are equal bits.
        return [name for name in mine if json.dumps(mine[name]) != json.dumps(theirs[name])]

    def to_json(self, *, own: bool = True) -> dict[str, Any]:
        """Return JSON values, tensors as base64 of their bytes; without ``own``, without this rank's generators.

        The header of a slice has contained this since version 1 of the format of windows: fields are added, but none is
        renamed.
        """
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
        """Read the values of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or of another type.
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
        record: dict[str, Any] = encode(
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


def encode(value: Any) -> Any:
    """Convert nested values with tensors to JSON: dtype, shape and base64 of the bytes of each tensor."""
    if torch.is_tensor(value):
        # Bytes, not numbers: JSON has no NaN, and a decimal number has no dtype.
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: base64.b64encode(content).decode(), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _TENSOR in value:
            content = bytearray(base64.b64decode(value[_TENSOR], validate=True))
            flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            return flat.view(getattr(torch, value["dtype"])).view(value["shape"])
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value
