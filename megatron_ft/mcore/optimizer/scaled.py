"""Megatron's optimizers with master weights and moments stored as codes and scales (``precision.regime``).

The classes replace the masters, the update, and the copy of masters to compute weights. They keep Megatron's buffers,
ranges and collectives. The parameters of the inner optimizer are placeholders, which have gradients but no values. A
scale belongs to 64 consecutive elements of a parameter, and ranges begin at multiples of 64. So an update needs no
communication, and its result does not depend on the ranges. Compute weights are stored in ``precision.params_dtype``.
Weights of FP8 layers are first rounded to FP8 with one scale per 64 elements. BF16 holds the rounded values exactly.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.model.transformer_config import named_parameters, tensor_part
from megatron_ft.runtime.dispatch import extension
from transformer_engine_ext.adamw import REFERENCE, Backend, compute_weights
from transformer_engine_ext.codec import from_parts
from transformer_engine_ext.formats import E4M3
from transformer_engine_ext.kernels import BackendError, backend_for
from transformer_engine_ext.optimizer import ParameterRange, ScaledAdamW, placeholder
from transformer_engine_ext.quantized import BLOCK_ELEMENTS, QuantizedTensor, quantize_blocks
from transformer_engine_ext.regimes import REGIMES, Regime


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateFormat:
    """Formats of a job's optimizer state. Random numbers of stochastic rounding depend on ``seed`` and ``names``."""

    regime: Regime
    seed: int | None
    """Seed of stochastic rounding of masters; None rounds to nearest."""
    names: Mapping[torch.nn.Parameter, str]
    """Global name of each parameter, with the number of the tensor-parallel part if it is above 0."""
    backend: Backend = REFERENCE
    """Implementation that computes the optimizer's updates: PyTorch, C++ or CUDA."""

    @classmethod
    def of(
        cls, config: JobConfig, model_chunks: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
    ) -> "StateFormat | None":
        """Return the format of a job, or None if its optimizer state is FP32.

        Raises:
            ConfigError, SoftwareError: the kernel of ``optimizer.update_backend`` cannot be used, or cannot be built.
        """
        if config.precision.regime is None:
            return None
        regime = REGIMES[config.precision.regime]
        # Masters with 16 bits need no stochastic rounding.
        seed = config.training.seed if regime.master is E4M3 else None
        key = "optimizer.update_backend"
        device = next(parameter.device for chunk in model_chunks for parameter in chunk.parameters())
        try:
            backend = backend_for(config.optimizer.update_backend, device, lambda kind: extension.load(kind, key))
        except BackendError as error:
            raise ConfigError.of(key, config.optimizer.update_backend, f"cannot be used: {error}") from error
        return cls(regime=regime, seed=seed, names=names_of(model_chunks, pg_collection), backend=backend)

    def build(self, groups: Sequence[dict[str, Any]], **options: Any) -> ScaledAdamW:
        """Build a torch optimizer for ``groups`` of placeholders. ``options``: other arguments of ``ScaledAdamW``."""
        return ScaledAdamW(groups, regime=self.regime, seed=self.seed, backend=self.backend, **options)

    def weight(self, parameter: torch.Tensor, master: QuantizedTensor, start: int) -> torch.Tensor:
        """Round ``master``, the elements of ``parameter`` from ``start`` on, to compute weights: flat, in the dtype of
        ``parameter``. ``start`` must be a multiple of the block size."""
        if self.regime.is_compute_scaled and not has_fp8_values(parameter):
            return master.decode(parameter.dtype)
        return compute_weights(self.regime, master, start).decode(parameter.dtype)

    def round_weight(self, parameter: torch.Tensor) -> None:
        """Round a whole compute weight as the first update would round it: first to the format of master weights, then
        to the format of compute weights. The result is the same on every rank, without communication."""
        master = quantize_blocks(parameter.detach().reshape(-1).float(), self.regime.master)
        parameter.detach().copy_(self.weight(parameter, master, 0).view_as(parameter))


def names_of(
    model_chunks: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
) -> dict[torch.nn.Parameter, str]:
    """Return the names of all parameters for ``StateFormat.names``."""
    found = {}
    for chunk in model_chunks:
        for name, parameter in named_parameters(chunk):
            part = tensor_part(name, parameter, pg_collection)
            found[parameter] = f"{name}.{part}" if part else name
    return found


def quantized(kind: str, parts: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """Return component ``kind``, e.g. a moment, as a quantized tensor: codes and, if ``parts`` has any, its scales."""
    none = torch.empty(0, dtype=torch.uint8, device=parts[kind].device)
    return from_parts(kind, {f"{kind}_scales": none, **parts}, BLOCK_ELEMENTS)


def has_fp8_values(parameter: torch.Tensor) -> bool:
    """Return whether a layer multiplies ``parameter`` in FP8."""
    return getattr(parameter, "has_fp8_values", False)


class _Scaled:
    """Base class of Megatron optimizers that store master weights and moments as codes and scales."""

    format: ClassVar[StateFormat]
    optimizer: Any

    def pairs(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield (parameter, placeholder of its master weight) for each parameter that this rank updates."""
        raise NotImplementedError

    def whole(self) -> Iterator[torch.nn.Parameter]:
        """Yield each parameter of the optimizer, also parameters of which this rank updates no element."""
        raise NotImplementedError

    def start_of(self, parameter: torch.nn.Parameter) -> int:
        """Return the index of the first element of ``parameter`` that this rank updates."""
        raise NotImplementedError

    def target_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the elements of ``parameter`` that this rank updates (compute weights), as a flat view."""
        raise NotImplementedError

    def parts(self, held: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return master, moments, their scales, and the step count of the placeholder ``held``, as flat views, in a
        fixed order. Components without values are left out."""
        found = {kind: part for kind, part in self.optimizer.scaled_state(held).parts().items() if part.numel()}
        return {**found, "step": self.optimizer.state[held]["step"].view(-1)}

    def rename(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Rename parameters after experts have moved. Checkpoints and stochastic rounding depend on the names."""
        self.format = replace(self.format, names=names)  # type: ignore[misc]
        self.optimizer.rename(
            {id(held): ParameterRange(name=names[p], start=self.start_of(p)) for p, held in self.pairs()}
        )

    def _replace_masters(self, groups: Sequence[tuple[list[Any], list[Any]]]) -> None:
        """Convert FP32 masters to codes and scales, and put placeholders into ``groups``: (parameters, masters)."""
        native, new = self.optimizer, {}
        ranges, initial = {}, {}
        for parameters, masters in groups:
            for place, (parameter, master) in enumerate(zip(parameters, masters, strict=True)):
                held = placeholder(master.shape, master.device)
                tensor_parallel.copy_tensor_model_parallel_attributes(held, parameter)
                if hasattr(parameter, "shared"):
                    held.shared = parameter.shared  # type: ignore[attr-defined]
                masters[place] = parameter.main_param = new[id(master)] = held
                name = self.format.names[parameter]
                ranges[id(held)] = ParameterRange(name=name, start=self.start_of(parameter))
                initial[id(held)] = master
        defaults = {name: native.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        groups = [{**group, "params": [new[id(master)] for master in group["params"]]} for group in native.param_groups]
        self.optimizer = self.format.build(groups, ranges=ranges, initial=initial, **defaults)
        for parameter in self.whole():
            self.format.round_weight(parameter)

    @torch.no_grad()
    def _copy_main_params_to_model_params(self) -> None:
        for parameter, held in self.pairs():
            found = self.optimizer.scaled_state(held)
            self.target_of(parameter).copy_(self.format.weight(parameter, found.master, found.start))

    @torch.no_grad()
    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        assert state_dict is None, "masters are set from the weights of the model"
        for parameter, held in self.pairs():
            self.optimizer.reset(held, self.target_of(parameter).float())
        for parameter in self.whole():
            self.format.round_weight(parameter)


class ScaledOptimizer(_Scaled, Float16OptimizerWithFloat16Params):
    """Megatron's optimizer for 16-bit weights, with state in codes and scales. Each rank updates whole parameters."""

    def __init__(self, optimizer: Any, *others: Any) -> None:
        super().__init__(optimizer, *others)
        if optimizer:
            assert not any(self.fp32_from_fp32_groups), "all weights have 16 bits"
            self._replace_masters(list(zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)))

    def pairs(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for parameters, masters in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
            yield from zip(parameters, masters, strict=True)

    def whole(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for parameter, _ in self.pairs())

    def start_of(self, parameter: torch.nn.Parameter) -> int:
        return 0

    def target_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.detach().view(-1)


class ScaledDistributedOptimizer(_Scaled, DistributedOptimizer):
    """Megatron's distributed optimizer, with state in codes and scales. Each rank updates ranges of parameters."""

    def __init__(self, optimizer: Any, *others: Any, **more: Any) -> None:
        super().__init__(optimizer, *others, **more)
        if optimizer:
            assert not any(self.model_fp32_groups), "all weights have 16 bits"
            self._replace_masters(
                list(zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True))
            )

    def pairs(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for parameters, masters in zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True):
            yield from zip(parameters, masters, strict=True)

    def whole(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for buffer in self.buffers for parameter in buffer.param_index_map)

    def start_of(self, parameter: torch.nn.Parameter) -> int:
        start: int = self._get_model_param_range_map(parameter)["param"].start
        return start

    def target_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        found = self._get_model_param_range_map(parameter)["param"]
        return parameter.detach().view(-1)[found.start : found.end]


@contextmanager
def scaled_classes(state_format: StateFormat | None) -> Iterator[None]:
    """Make Megatron build optimizers with state as in ``state_format`` during the block. If it is None, do nothing."""
    native = DistributedOptimizer, Float16OptimizerWithFloat16Params
    if state_format is not None:
        given = {"format": state_format}
        megatron_optimizer.DistributedOptimizer = type("Scaled", (ScaledDistributedOptimizer,), given)
        megatron_optimizer.Float16OptimizerWithFloat16Params = type("Scaled", (ScaledOptimizer,), given)
    try:
        yield
    finally:
        megatron_optimizer.DistributedOptimizer, megatron_optimizer.Float16OptimizerWithFloat16Params = native


# A checkpoint contains each component of a parameter's state as a flat tensor, with the name of the parameter. The
# bytes of the state are stored without conversion: FP8 codes as uint8, and one byte for each scale. So jobs with other
# PP, EP or DP sizes can load them.

Described = dict[str, dict[str, ShardedTensor]]
"""This rank's shards of the optimizer state for a checkpoint, as [component][name of the parameter]."""


def describe(member: Any, model_shards: dict[str, Any], *, is_loading: bool) -> Described:
    """Return this rank's shards of the state of ``member``, an optimizer of this module, for a checkpoint."""
    tensors, _ = extract_sharded_tensors_and_factories(model_shards)
    replicas = {shard.data: shard.replica_id for shard in nested_values(tensors)}
    is_shared = isinstance(member, DistributedOptimizer) and member.data_parallel_group.size() > 1
    found: Described = {}
    for parameter, held in member.pairs():
        # If ranks have different ranges of a parameter, each rank writes its own range.
        replica_id = (*replicas[parameter][:-1], 0) if is_shared else replicas[parameter]
        for kind, part in _stored(member, held):
            per_value = BLOCK_ELEMENTS if kind.endswith("_scales") else 1
            name = member.format.names[parameter]
            found.setdefault(kind, {})[name] = ShardedTensor(
                key=f"optimizer.state.{kind}.{name}",
                data=None if is_loading else part,
                dtype=part.dtype,
                local_shape=(part.numel(),),
                global_shape=(-(-parameter.numel() // per_value),),
                global_offset=(member.start_of(parameter) // per_value,),
                axis_fragmentations=None,
                replica_id=replica_id,
            )
    return found


@torch.no_grad()
def install(member: Any, loaded: Mapping[str, Mapping[str, torch.Tensor]], step: int) -> None:
    """Set the state of ``member`` to ``loaded``: the form of :func:`describe`, with tensors instead of shards."""
    for parameter, held in member.pairs():
        for kind, part in _stored(member, held):
            part.copy_(loaded[kind][member.format.names[parameter]])
        member.optimizer.state[held]["step"].fill_(step)


def _stored(member: Any, held: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, part in member.parts(held).items():
        if kind != "step":
            yield kind, part.view(torch.uint8) if part.itemsize == 1 else part
