"""Builds Megatron's AdamW, divides its step for the commit protocol, and reads and sets its state.

``prepare`` computes the master gradients and their norm. All its changes can be rolled back. ``update`` clips the
gradients, and updates master weights and moments of this rank. ``gather`` all-gathers the parameters.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer, MixedPrecisionOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.model.build import gradients_put_away
from megatron_ft.mcore.model.transformer_config import DTYPES, named_parameters
from megatron_ft.mcore.optimizer import scaled
from megatron_ft.mcore.optimizer.scaled import ScaledDistributedOptimizer, ScaledOptimizer, StateFormat
from megatron_ft.mcore.optimizer.stored_ranges import install_ranges, own_ranges
from transformer_engine_ext.optimizer import ScaledAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER, STEP = "master", "step"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Master:
    """One master weight that this rank updates: the whole tensor, or a flat range of it if the optimizer is sharded.
    ``name`` is the global name of the parameter. ``state`` contains the moments and the step count of torch's
    optimizer. With ``precision.regime``, ``tensor`` is a placeholder that has a gradient but no values."""

    name: str
    unique_name: str
    """Name on which stochastic rounding depends: ``name``, then the tensor-parallel part's number if above 0."""
    start: int
    """Index of the first element of ``tensor`` in the flattened parameter."""
    tensor: torch.Tensor
    state: dict[str, Any]
    parts: dict[str, torch.Tensor]
    """Result of ``state_tensors``: master weight, moments and step count as flat views, by name of the component."""
    weight_decay: float


def masters(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[Master]:
    """Yield all master weights of this rank, in the order of the optimizer. Allocate their moments first."""
    allocate_state(optimizer)
    names = _names_of(model_chunks)
    for member in sub_optimizers(optimizer):
        decay = {id(p): group["weight_decay"] for group in member.optimizer.param_groups for p in group["params"]}
        for parameter, tensor in masters_of(member):
            unique_names = names if state_format_of(member) is None else member.format.names  # type: ignore[attr-defined]
            yield Master(
                name=names[parameter],
                unique_name=unique_names[parameter],
                start=range_of(member, parameter)[0],
                tensor=tensor,
                state=member.optimizer.state[tensor],
                parts=state_tensors(member, tensor),
                weight_decay=decay[id(tensor)],
            )


def _names_of(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    return {parameter: name for chunk in model_chunks for name, parameter in named_parameters(chunk)}


# The distributed optimizer is stored in Megatron's format ``fully_reshardable``, as tensors with the shapes of the
# parameters. So a job with other TP, PP, EP or DP sizes can load the same numbers. Master weights and moments are
# stored in FP32, without rounding.

SHARDING_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Metadata that determines how Megatron lays out the optimizer in a checkpoint."""


def sub_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers in ``optimizer``, in order, without those that have no parameters."""
    return [member for member in _chain(optimizer) if member.optimizer is not None]


def _chain(optimizer: MegatronOptimizer) -> list[Any]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def masters_of(member: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield (model parameter, master weight) for each parameter that the optimizer ``member`` updates on this rank. The
    master weight is the tensor that torch's optimizer updates."""
    for parameters, masters in _group_pairs(member):
        for parameter, master in zip(parameters, masters, strict=True):
            # ``master`` is None with Megatron's precision-aware optimizer, which has its masters in torch's optimizer.
            if master is not None:
                yield parameter, master


def _group_pairs(member: Any) -> Iterator[tuple[Any, Any]]:
    # Megatron stores parameters and their master weights in parallel lists, one pair of lists per parameter group.
    if isinstance(member, DistributedOptimizer):
        yield from zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
        yield from zip(member.model_fp32_groups, member.shard_fp32_groups, strict=True)
    elif hasattr(member, "fp32_from_float16_groups"):
        yield from zip(member.float16_groups, member.fp32_from_float16_groups, strict=True)
        yield from zip(member.fp32_from_fp32_groups, member.fp32_from_fp32_groups, strict=True)
    else:
        groups = [group["params"] for group in member.optimizer.param_groups]
        yield from zip(groups, groups, strict=True)


def state_tensors(member: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the master weight, the moments and the step count that belong to ``master``, as flat views by component,
    in a fixed order. If the state has scales, they are components with names that end with ``_scales``."""
    if isinstance(member, ScaledOptimizer | ScaledDistributedOptimizer):
        return member.parts(master)
    known = member.optimizer.state[master]
    # A fused optimizer has one step count per parameter group instead of ``step``; it is in ``TrainState.group_steps``.
    state = {kind: known[kind].view(-1) for kind in (*MOMENTS, STEP) if torch.is_tensor(known.get(kind))}
    return {MASTER: master.detach().view(-1), **state}


def state_format_of(optimizer: MegatronOptimizer) -> StateFormat | None:
    """Return the formats of quantized optimizer state; None if the state is FP32."""
    formats = (getattr(member, "format", None) for member in _chain(optimizer))
    return next((found for found in formats if found is not None), None)


def weight_of(
    optimizer: MegatronOptimizer, parameter: torch.Tensor, start: int, parts: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Round master weights to compute weights (flat), as ``optimizer`` does.

    Args:
        parameter: parameter to which the weights belong; the result has its dtype.
        start: index of the first master in the flattened parameter; with scales, a multiple of the block size.
        parts: flat tensor ``master`` and, if the masters have scales, flat tensor ``master_scales``.
    """
    found = state_format_of(optimizer)
    if found is None:
        return parts[MASTER].to(parameter.dtype)
    return found.weight(parameter, scaled.quantized(MASTER, parts), start)


def follow_parameters(
    optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
) -> None:
    """Copy names, and the attribute ``shared`` that Megatron sets, from parameters to their master weights. Call this
    after experts have moved in place."""
    names = scaled.names_of(model_chunks, pg_collection)
    for member in sub_optimizers(optimizer):
        for parameter, master in masters_of(member):
            if hasattr(parameter, "shared"):
                master.shared = parameter.shared  # type: ignore[attr-defined]
        if isinstance(member, ScaledOptimizer | ScaledDistributedOptimizer):
            member.rename(names)


def range_of(member: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return the range (start, stop) of the flattened ``parameter`` that the optimizer ``member`` updates on this rank.
    This is the whole parameter if the optimizer is not sharded."""
    if not isinstance(member, DistributedOptimizer):
        return 0, parameter.numel()
    found = member._get_model_param_range_map(parameter)["param"]
    return found.start, found.end


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Create moments and step counts as zeros, as the first update would do."""
    for member in sub_optimizers(optimizer):
        if isinstance(member.optimizer, ScaledAdamW):
            continue  # its constructor has created the state
        # Megatron's function creates moments without a step count, and AdamW does not add one later.
        member.init_state_fn(member.optimizer, member.config)
        if isinstance(member.optimizer, torch.optim.Adam):  # includes AdamW
            for state in member.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


@torch.no_grad()
def adopt_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, state: Mapping[str, torch.Tensor]
) -> None:
    """Make a newly built optimizer use the master weights, moments and step counts in ``state``, without copies. The
    names are those of ``tensors.named_state``. The optimizer keeps its own tensors of a parameter if ``state`` lacks
    its master weight, if the state is quantized, or if the parameter is its own master weight."""
    names = _names_of(model_chunks)
    for member in sub_optimizers(optimizer):
        if isinstance(member.optimizer, ScaledAdamW):
            continue
        for parameter, master in masters_of(member):
            name = names[parameter]
            found = state.get(f"{name}/{MASTER}")
            if found is None or master is parameter:
                continue
            assert found.shape == master.shape, f"{name}: master weight {list(found.shape)} instead of {master.shape}"
            master.data = found
            of_master = ((kind, state.get(f"{name}/{kind}")) for kind in (*MOMENTS, STEP))
            member.optimizer.state[master] = {kind: tensor for kind, tensor in of_master if tensor is not None}


def step_count(optimizer: MegatronOptimizer) -> int:
    """Return the number of updates, which must be the same for every parameter."""
    steps = {int(step) for member in sub_optimizers(optimizer) for step in _steps(member)}
    assert len(steps) <= 1, f"parameters have different numbers of updates: {sorted(steps)}"
    return steps.pop() if steps else 0


def _steps(member: MegatronOptimizer) -> Iterator[Any]:
    if isinstance(member.optimizer, torch.optim.Adam | ScaledAdamW):
        yield from (state["step"] for state in member.optimizer.state.values())
    else:  # fused optimizers count per group
        yield from (group["step"] for group in member.optimizer.param_groups if group["params"] and "step" in group)


def sharded_tree(
    optimizer: MegatronOptimizer, model_shards: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> Any:
    """Build Megatron's nested description of the optimizer's state, whose leaves are shards, numbers or strings."""
    allocate_state(optimizer)
    if state_format_of(optimizer) is not None:
        described = [
            {} if member.optimizer is None else scaled.describe(member, model_shards, is_loading=is_loading)
            for member in _chain(optimizer)
        ]
        return described[0] if len(described) == 1 else dict(enumerate(described))
    with own_ranges(sub_optimizers(optimizer)):
        return optimizer.sharded_state_dict(model_shards, is_loading, metadata=metadata)


def refresh_groups(optimizer: MegatronOptimizer, tree: Any) -> None:
    """Set the learning rates, weight decays and step counts of the parameter groups in ``tree`` to their present
    values. ``tree`` is an earlier result of ``sharded_tree`` without its shards. If state is quantized, change
    nothing."""
    if state_format_of(optimizer) is not None:
        return
    members = sub_optimizers(optimizer)
    frames = [tree] if len(members) == 1 else [tree[index] for index in range(len(members))]
    for member, frame in zip(members, frames, strict=True):
        inner = frame.get("optimizer", frame)
        for stored, group in zip(inner["param_groups"], member.optimizer.param_groups, strict=True):
            stored |= {name: group[name] for name in stored.keys() & group.keys() if name not in ("params", "step")}
            if "step" in stored:
                stored["step"] = type(stored["step"])(step_count(optimizer))


def split_shards(tree: Any) -> dict[str, ShardedBase]:
    """Return a dict of the shards in ``tree``. Each key is the path of a shard in the tree, joined by slashes."""
    return {"/".join(path): leaf for path, leaf in _leaves(tree, ()) if isinstance(leaf, ShardedBase)}


def fill_frame(tree: Any, loaded: dict[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Return ``tree`` with each shard replaced by a loaded value. ``loaded`` has the keys of ``split_shards``."""
    if isinstance(tree, dict):
        return {key: fill_frame(value, loaded, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(fill_frame(value, loaded, (*path, str(index))) for index, value in enumerate(tree))
    if isinstance(tree, LocalNonpersistentObject):
        return tree.unwrap()
    return loaded["/".join(path)] if isinstance(tree, ShardedBase) else tree


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, tree


def install_state(optimizer: MegatronOptimizer, tree: Any, *, step: int, scaler: dict[str, Any] | None) -> None:
    """Set the optimizer's state to ``tree``, the result of :func:`fill_frame`, its step count to ``step``, and its loss
    scale to ``scaler``. Learning rate, weight decay and similar values are not changed, because the configuration and
    the scheduler determine them."""
    members = _chain(optimizer)
    frames = [tree] if len(members) == 1 else [tree[index] for index in range(len(members))]
    for member, frame in zip(members, frames, strict=True):
        if member.optimizer is not None:
            _install_member(member, frame, step, scaler)


def _install_member(member: MegatronOptimizer, frame: dict[str, Any], step: int, scaler: dict[str, Any] | None) -> None:
    if isinstance(member.optimizer, ScaledAdamW):
        scaled.install(member, frame, step)
    else:
        tensors = frame.pop("param_state", None)
        _set_step(member, frame, step)
        member.load_state_dict(frame)
        _own_steps(member, step)
        if tensors is not None:
            with _steps_put_away(member):
                install_ranges(member, tensors)
    if scaler is not None and getattr(member, "grad_scaler", None):
        member.grad_scaler.load_state_dict(scaler)


@contextmanager
def _steps_put_away(member: MegatronOptimizer) -> Iterator[None]:
    """Remove the step counts while the block runs. Megatron's load expects a stored tensor for each entry of the
    optimizer's state, but a checkpoint has no tensors of step counts."""
    states = list(member.optimizer.state.values())
    steps = [state.pop("step", None) for state in states]
    try:
        yield
    finally:
        for state, step in zip(states, steps, strict=True):
            if step is not None:
                state["step"] = step


def _set_step(member: MegatronOptimizer, frame: dict[str, Any], step: int) -> None:
    inner = frame.get("optimizer", frame)
    for group in inner["param_groups"]:
        if isinstance(member, DistributedOptimizer) or "step" in group:
            group["step"] = step
    if not isinstance(member, DistributedOptimizer) and isinstance(member.optimizer, torch.optim.Adam):
        inner["state"]["common_step"] = torch.tensor(float(step), dtype=torch.float32)


def _own_steps(member: MegatronOptimizer, step: int) -> None:
    """Give each parameter its own step tensor, and remove the step counts of parameter groups. After Megatron's load,
    all parameters share one step tensor, which the update of each parameter would increase. Megatron's load also gives
    step counts to the groups, but no update would increase them."""
    if isinstance(member.optimizer, torch.optim.Adam):
        for state in member.optimizer.state.values():
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
        for group in member.optimizer.param_groups:
            group.pop("step", None)


GroupKeys = list[list[Any]]
"""Keys of the optimizer's parameter groups. While Megatron builds the optimizer, it collects the keys of all ranks with
all-gathers; each inner list is the result of one all-gather. A key has two elements: options that replace the
optimizer's for this group, or None; and whether the group has expert parameters."""


@contextmanager
def _agreeing(known: GroupKeys | None, *, is_offline: bool) -> Iterator[GroupKeys]:
    """Yield a list, to which the keys of parameter groups are added when an optimizer is built in the ``with`` block.
    Usually, Megatron gathers the keys of all ranks, because all ranks must have the same groups. If ``known`` is given,
    this rank uses these keys and does not communicate. Otherwise, with ``is_offline``, it uses only its own keys."""
    gathered: GroupKeys = []
    native = dist.all_gather_object

    def gather(found: list[Any], mine: list[Any], *others: Any, **more: Any) -> None:
        if known is None and is_offline:
            found[:] = [list(mine)] * len(found)
            gathered.append(list(mine))
        elif known is None:
            native(found, mine, *others, **more)
            gathered.append(list(dict.fromkeys(key for keys in found for key in keys)))
        else:
            gathered.append(known[len(gathered)])
            found[:] = [gathered[-1]] * len(found)

    dist.all_gather_object = gather
    try:
        yield gathered
    finally:
        dist.all_gather_object = native


def group_keys_from_json(content: Sequence[Any]) -> GroupKeys:
    """Convert ``content``, the JSON form of group keys, to ``GroupKeys``. JSON has lists instead of tuples."""
    return [
        [(None if options is None else tuple(map(tuple, options)), is_expert) for options, is_expert in keys]
        for keys in content
    ]


def build_optimizer(
    config: JobConfig,
    model_chunks: list[torch.nn.Module],
    pg_collection: ProcessGroupCollection,
    group_keys: GroupKeys | None = None,
    *,
    is_offline: bool = False,
    state: Mapping[str, torch.Tensor] | None = None,
) -> tuple[MegatronOptimizer, GroupKeys]:
    """Build AdamW for the parameters of the chunks, and return it with the keys of its parameter groups. Master weights
    and moments are sharded if ``parallel.use_distributed_optimizer`` is true.

    Args:
        group_keys: keys from another rank of the job, if the other ranks do not build an optimizer at the same time;
            None if all ranks build one together and gather the keys.
        is_offline: whether this rank cannot communicate. If so, and without ``group_keys``, only its own keys are used.
        state: tensors that the optimizer uses instead of its own, see ``adopt_state``; None if it uses its own. With
            ``state``, gradient buffers are freed while the optimizer is built, to make room for its own master weights.
    """
    dtype, options, precision = DTYPES[config.precision.params_dtype], config.optimizer, config.precision
    megatron_config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    state_format = StateFormat.of(config, model_chunks, pg_collection)
    with (
        nullcontext() if state is None else gradients_put_away(model_chunks),
        _agreeing(group_keys, is_offline=is_offline) as gathered,
        scaled.scaled_classes(state_format),
    ):
        optimizer = get_megatron_optimizer(
            megatron_config, model_chunks, use_gloo_process_groups=False, pg_collection=pg_collection
        )
        if state is not None:
            adopt_state(model_chunks, optimizer, state)
    return optimizer, gathered


def build_scheduler(config: JobConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build Megatron's schedule of learning rate and weight decay, which counts progress in samples."""
    options = config.optimizer
    warmup, decay, wsd_decay = options.num_samples(config.training)
    wsd: dict[str, Any] = {}
    if options.lr_decay_style == "WSD":
        wsd = {
            "wsd_decay_steps": wsd_decay,
            "lr_wsd_decay_style": options.lr_wsd_decay_style,
        }
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        **wsd,
    )


def set_position(scheduler: OptimizerParamScheduler, consumed_samples: int) -> None:
    """Set learning rate and weight decay for the iteration that follows ``consumed_samples`` samples."""
    # ``step`` adds to the position, so the position is set to zero first.
    scheduler.num_steps = 0
    scheduler.step(increment=consumed_samples)


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yield Megatron's optimizers: one for dense and one for expert parameters. Skip those without parameters."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return (part for part in chained if not getattr(part, "is_stub_optimizer", False))


@torch.no_grad()
def prepare(optimizer: MegatronOptimizer) -> tuple[bool, float]:
    """Copy the reduced gradients to the master gradients, unscale them and compute their norm.

    Returns:
        (found_inf, grad_norm): whether a gradient is not finite after unscaling, and the global gradient norm.
    """
    scalers = grad_scalers(optimizer)
    before = [scaler.state_dict() for scaler in scalers]
    found_inf = bool(optimizer.prepare_grads())
    # Megatron updates the loss scale of each part for an overflow in this part alone. All parts must keep the same loss
    # scale, so each scaler is reset, and updated again for an overflow in any part.
    for scaler, state in zip(scalers, before, strict=True):
        scaler.load_state_dict(state)
        scaler.update(found_inf)
    # Frozen parameters must not contribute to the norm, so their gradients are removed first.
    for part in _parts(optimizer):
        for master in _frozen_masters(part):
            master.grad = None
    return found_inf, float(optimizer.get_grad_norm())


@torch.no_grad()
def prepare_known(
    optimizer: MegatronOptimizer, *, found_inf: bool, without: Collection[torch.nn.Parameter] = frozenset()
) -> None:
    """Copy and unscale the gradients in a replay. Do not communicate, unlike ``prepare``: the logged vote has norm and
    overflow flag. Parameters in ``without`` get no master gradients, so the update does not change their state."""
    for part in _parts(optimizer):
        scaler: Any = getattr(part, "grad_scaler", None)
        if scaler is None:
            part.prepare_grads()
        else:
            # Megatron's method would all-reduce the overflow flag over all stages, also those that do not replay.
            _unscale(part, scaler)
            scaler.update(found_inf)
        for parameter, master in masters_of(part):
            # Remove the gradient: with a gradient of zero, the update would still decay weights and moments.
            if parameter in without or is_frozen(parameter):
                master.grad = None


def is_frozen(parameter: torch.nn.Parameter) -> bool:
    """Return whether ``training.frozen`` excludes ``parameter`` from all updates."""
    return getattr(parameter, "is_frozen", False)


def _frozen_masters(part: MegatronOptimizer) -> list[torch.Tensor]:
    return [master for parameter, master in masters_of(part) if is_frozen(parameter)]


def _count_update(part: Any) -> None:
    """Increase the optimizer's step counts of frozen parameters, so that all its parameters have the same count."""
    masters = _frozen_masters(part)
    # Fused optimizers count per group.
    if not masters or not isinstance(part.optimizer, torch.optim.Adam | ScaledAdamW):
        return
    if any("step" not in part.optimizer.state.get(master, {}) for master in masters):
        allocate_state(part)
    for master in masters:
        part.optimizer.state[master]["step"] += 1


def _unscale(part: Any, scaler: Any) -> None:
    part._copy_model_grads_to_main_grads()
    gradients = part._collect_main_grad_data_for_unscaling()
    overflow = torch.zeros(1, device=scaler.inv_scale.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, scaler.inv_scale)


def grad_scalers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the loss scalers of the dense and the expert optimizer. Only a run in FP16 has loss scalers."""
    scalers = (getattr(part, "grad_scaler", None) for part in _parts(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


@torch.no_grad()
def update(optimizer: MegatronOptimizer, clip_grad: float, grad_norm: float) -> None:
    """Clip the gradients by their norm ``grad_norm`` from the vote, and update this rank's master weights, moments and
    compute weights."""
    for part in _parts(optimizer):
        parameters = part.get_parameters()
        # In a replay all parameters of a part may be frozen. Then no gradient is left to clip.
        if clip_grad > 0.0 and any(parameter.grad is not None for parameter in parameters):
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
        if isinstance(part, DistributedOptimizer):
            # The method of ``DistributedOptimizer`` would also gather parameters, once for each part.
            MixedPrecisionOptimizer.step_with_ready_grads(part)
        else:
            part.step_with_ready_grads()
        _count_update(part)


def gather(optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module]) -> None:
    """All-gather the updated parameters if the optimizer is sharded."""
    if any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer)):
        for chunk in model_chunks:
            chunk.start_param_sync()  # type: ignore[operator]


@torch.no_grad()
def refresh_weights(optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module]) -> None:
    """Set this rank's shard of the compute weights to its rounded master weights, and all-gather the compute weights.
    All ranks must call this. Without a sharded optimizer nothing changes."""
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            part._copy_main_params_to_model_params()
    gather(optimizer, model_chunks)
