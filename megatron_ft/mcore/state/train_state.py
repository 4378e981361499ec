"""The state of a rank besides parameters and optimizer state, after an iteration and during an iteration."""

import base64
import hashlib
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.model.transformer_config import unwrap
from megatron_ft.mcore.optimizer.adamw import grad_scalers, sub_optimizers
from megatron_ft.planning.iteration import Decision, History, RankFigures, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationResult:
    """Vote, decision and measured values of one iteration, the same on every rank except ``seconds``."""

    vote: Vote
    decision: Decision
    learning_rate: float
    median_loss: float = math.nan
    """Median loss of earlier committed iterations; NaN if there are none."""
    expert_load: torch.Tensor | None = None
    """Number of tokens of each expert, summed over all ranks: int64 [num_layers, num_moe_experts], on the CPU; None if
    not needed."""
    of_ranks: RankFigures = field(default_factory=RankFigures)
    """Compute times and waits of each rank, and the largest memory use of a rank."""
    seconds: float = math.nan
    """Seconds that this rank spent on an iteration that a recovery has finished: before the failure and in the
    recovery, but not between them. NaN for all other iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """State of a rank after an iteration, besides parameters and optimizer state. ``capture`` sets the first six
    fields, and copies tensors on their own device, so that it does not wait for a GPU. The callers set the other
    fields."""

    iteration: int
    """Number of completed iterations."""
    rng: Mapping[str, Any] | None = None
    """States of the random number generators, see ``_capture_rng``. None in state from another rank."""
    buffers: Mapping[str, torch.Tensor]
    """Buffers of the model, such as router biases, by ``<chunk>.<name>``."""
    grad_scalers: tuple[Mapping[str, Any], ...]
    """Loss scale and its counters, for each optimizer (dense, expert) that has a loss scaler."""
    group_steps: tuple[Any, ...]
    """Step count of each parameter group; None for a group whose step counts are in the optimizer's tensors."""
    history: History
    newest_vote: Vote | None = None
    """Vote of the newest iteration; None before the first iteration of this process."""
    rounded_off: int = 0
    """Newest iteration for which all work at its end is done: evaluations, saves and digests."""
    stopped: str | None = None
    """Reason why a policy stopped the run at the newest iteration; None if no policy stopped it."""

    @classmethod
    def capture(
        cls, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, *, iteration: int, history: History
    ) -> "TrainState":
        """Copy the current state of this process, which has completed ``iteration`` iterations of the run."""
        return cls(
            iteration=iteration,
            rng=_capture_rng(),
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
            RecoveryError: the captured state has other buffers than the model, or another number of parameter groups or
                loss scalers than the optimizer. The error may occur on only some ranks.
        """
        buffers = dict(_buffers(model_chunks))
        if set(buffers) != set(self.buffers):
            raise RecoveryError(
                "the model and the captured state have different buffers, for example "
                f"{sorted(set(buffers) ^ set(self.buffers))[:5]}"
            )
        for name, value in self.buffers.items():
            if buffers[name].dtype == value.dtype:
                buffers[name].copy_(value)
            else:
                # Use the captured dtype, because Megatron converts the router bias to FP32 in the first forward pass.
                buffers[name].data = value.to(buffers[name].device, copy=True)
        if self.rng is not None:
            restore_rng(self.rng)
        scalers, groups = grad_scalers(optimizer), list(_groups(optimizer))
        # Without step counts, the number of groups may differ: a stage of one rank has no separate group for experts.
        steps = () if set(self.group_steps) == {None} else self.group_steps
        groups = groups if steps else []
        numbers = (len(steps), len(groups)), (len(self.grad_scalers), len(scalers))
        for what, (stored, present) in zip(("parameter groups", "loss scalers"), numbers, strict=True):
            if stored != present:
                raise RecoveryError(f"the captured state has {stored} {what}, but the optimizer has {present}")
        for scaler, state in zip(scalers, self.grad_scalers, strict=True):
            scaler.load_state_dict(dict(state))
        for group, step in zip(groups, steps, strict=True):
            if step is not None:
                group["step"] = _copied(step)

    def restore_router_bias(self, model_chunks: list[torch.nn.Module]) -> None:
        """Restore only the router biases. After a skipped iteration, nothing else has to be restored."""
        for name, buffer in _buffers(model_chunks):
            if name.endswith(".expert_bias"):
                buffer.copy_(self.buffers[name])

    def differences(self, other: "TrainState") -> list[str]:
        """Return the names of the captured fields that are not bitwise equal in ``other``."""
        mine, theirs = self._captured(), other._captured()
        # Compare JSON texts, because NaN then equals NaN, and numbers are equal only if their bits are equal.
        return [name for name in mine if json.dumps(mine[name]) != json.dumps(theirs[name])]

    def to_json(self, *, own: bool = True) -> dict[str, Any]:
        """Return all fields as JSON values, with tensors in base64. ``own=False`` omits the random number generators.
        Fields may be added but never renamed: slices of all versions of the window format have this record in their
        headers."""
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
        return cls(
            iteration=content["iteration"],
            rng=content.get("rng"),
            buffers=content["buffers"],
            grad_scalers=tuple(content["grad_scalers"]),
            group_steps=tuple(content["group_steps"]),
            history=History.from_json(content["history"]),
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
                "history": self.history.to_json(),
            }
        )
        return record


@dataclass(kw_only=True)
class IterationState:
    """Progress of one iteration, from the start of its forward pass until its decision is carried out."""

    iteration: int
    before: TrainState
    """State before the forward pass, which a rollback of the iteration restores."""
    expert_load: torch.Tensor | None = None
    """Number of tokens of each expert, summed over all ranks: int64 [num_layers, num_moe_experts]; None if unused."""
    repaid: torch.Tensor | None = None
    """Number of tokens that each expert has processed beyond its capacity, in the shape of ``expert_load``."""
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    """Seconds from the start of the iteration until this rank has its ballot; after the update, until the end of the
    update. Time after that, such as waiting for a rank that has failed, does not count."""
    contributed: bool = False
    """Whether this rank may have sent its ballot. If so, other ranks may have the complete vote (all ballots)."""
    vote: Vote | None = None
    """Vote of the iteration; None until it is complete on this rank."""
    of_ranks: RankFigures = field(default_factory=RankFigures)
    """Compute times and waits of each rank, and the largest memory use; empty until the vote is complete."""
    update: Literal["none", "begun", "done"] = "none"
    """Progress of the update of master weights, moments and compute weights."""

    def counts_of(self, layers: Sequence[int]) -> tuple[list[list[int]] | None, list[list[int]] | None]:
        """Return ``expert_load`` and ``repaid`` as lists [layer][expert] for ``layers``, which are numbered from 1. A
        field that is None gives None; if ``layers`` is empty, both results are None."""
        return _rows_of(self.expert_load, layers), _rows_of(self.repaid, layers)

    def contribute(self) -> None:
        """Record that this rank is about to send its ballot."""
        self.contributed, self.seconds = True, time.perf_counter() - self.began

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Set ``update`` to ``begun`` before the block, and to ``done`` after a block without an exception."""
        self.update = "begun"
        # No ``finally``: after an exception the state is partly updated and unusable, so the value must stay ``begun``.
        yield
        self.update, self.seconds = "done", time.perf_counter() - self.began


def _rows_of(load: torch.Tensor | None, layers: Sequence[int]) -> list[list[int]] | None:
    return None if load is None or not layers else [load[layer - 1].tolist() for layer in layers]


def seed_rng(seed: int, pg_collection: ProcessGroupCollection) -> None:
    """Seed the random generators of torch and Megatron from ``seed`` and this rank's coordinates in the layout."""
    pg = pg_collection
    torch.manual_seed(seed + 100 * pg.pp.rank() + 10 * pg.dp.rank())
    model_parallel_cuda_manual_seed(
        seed + 100 * pg.pp.rank(),
        force_reset_rng=True,
        tp_rank=pg.tp.rank(),
        ep_rank=pg.ep.rank(),
        etp_rank=pg.expt_tp.rank(),
    )


def _capture_rng() -> dict[str, Any]:
    """Return the state of the random number generators of Python, numpy, torch (CPU and, if available, CUDA) and
    Megatron. Tensors are copies, so later draws do not change them."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state().clone(),
        "tracker": {name: value.clone() for name, value in _tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().clone()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the generators from ``state``, the result of :func:`_capture_rng`."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    _tracker().set_states({name: value.clone() for name, value in state["tracker"].items()})


def generators_digest() -> str:
    """Return the SHA-256 of the states (uint8) of the generators that ``seed_rng`` seeds, as a hexadecimal number."""
    state, digest = _capture_rng(), hashlib.sha256()
    states = {"torch": state["torch"], **({"cuda": state["cuda"]} if "cuda" in state else {}), **state["tracker"]}
    for name, value in sorted(states.items()):
        digest.update(name.encode() + bytes(value.tolist()))
    return digest.hexdigest()


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


_TENSOR = "tensor_base64"


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
