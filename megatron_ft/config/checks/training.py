"""Checks of run length, batch size, actions after NaN losses or loss spikes, optimizer, number formats, checkpoints."""

from collections.abc import Callable

from megatron_ft.config.batch_size import with_train_iterations
from megatron_ft.config.checks.parallel import require_local_layers
from megatron_ft.config.checks.primitives import above, at_least, divides, one_of, require, share, show
from megatron_ft.config.job import JobConfig, OptimizerConfig, TrainingConfig
from megatron_ft.config.model import PrecisionConfig

REGIMES = (
    "fp16_fp16_fp16_fp16",
    "fp8_fp32_fp32_fp32",
    "fp8_fp16_fp32_fp32",
    "fp8_fp16_fp8_fp16",
    "fp8_fp8_fp8_fp16",
)
UPDATE_BACKENDS = ("torch", "cpp", "cuda")
FP8_RECIPES = ("tensorwise", "blockwise", "delayed", "mxfp8")
LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LARGEST_SEED = 2**31 - 1


def _check_training(training: TrainingConfig) -> None:
    """Check numbers of iterations, batch size, device, and actions after NaN losses and loss spikes."""
    for name in ("train_iterations", "micro_batch_size", "global_batch_size", "eval_iterations", "num_threads"):
        at_least(1, f"training.{name}", getattr(training, name))
    at_least(1, "training.exit_at_iteration", training.exit_at_iteration)
    at_least(1, "training.exit_interval_iterations", training.exit_interval_iterations)
    above(0, "training.exit_after_minutes", training.exit_after_minutes)
    at_least(0, "training.eval_interval_iterations", training.eval_interval_iterations)
    at_least(0, "training.digest_interval_iterations", training.digest_interval_iterations)
    at_least(1, "training.max_consecutive_skips", training.max_consecutive_skips)
    at_least(2, "training.loss_spike_window", training.loss_spike_window)
    above(1, "training.loss_spike_factor", training.loss_spike_factor)
    above(0, "training.distributed_timeout_seconds", training.distributed_timeout_seconds)
    require(0 <= training.seed <= LARGEST_SEED, "training.seed", training.seed, f"must be in 0..{LARGEST_SEED}")
    divides(
        training.micro_batch_size,
        "training.global_batch_size",
        training.global_batch_size,
        "training.micro_batch_size",
    )
    _check_words(training)
    require(
        training.transformer_impl != "transformer_engine" or training.device != "cpu",
        "training.transformer_impl",
        training.transformer_impl,
        "must be local or auto with training.device=cpu: Transformer Engine needs CUDA",
    )


def _check_evaluate_only(config: JobConfig) -> None:
    """Check that a job with ``training.evaluate_only`` has saved state to load, and captures no windows (snapshots)."""
    if not config.training.evaluate_only:
        return
    checkpoint = config.checkpoint
    require(
        config.run.resume != "never" or checkpoint.load is not None or checkpoint.load_weights is not None,
        "training.evaluate_only",
        True,
        "needs state to evaluate: set run.name and run.resume=must, or checkpoint.load, or checkpoint.load_weights",
    )
    policy = config.snapshot.policy
    require(
        policy is None,
        "snapshot.policy",
        None if policy is None else policy.get("_target_"),
        "must be null with training.evaluate_only=true, which makes no snapshots; use snapshot=none",
    )


def _check_frozen(config: JobConfig) -> None:
    """Check that a job with ``training.frozen`` has experts, and that no key would change frozen parameters."""
    frozen, model = config.training.frozen, config.model
    one_of(("experts", "others"), "training.frozen", frozen)
    if frozen is None:
        return
    require(
        model.num_moe_experts is not None,
        "training.frozen",
        frozen,
        "must be null with model.num_moe_experts=null: a dense model has no experts",
    )
    require(
        config.placement.state_copies is None,
        "placement.state_copies",
        config.placement.state_copies,
        f"must be null with training.frozen={frozen}: with state copies, frozen parameters would be updated too",
    )
    require(
        frozen != "others" or not model.moe_router_enable_expert_bias,
        "model.moe_router_enable_expert_bias",
        model.moe_router_enable_expert_bias,
        "must be false with training.frozen=others: the bias of the router changes in every iteration",
    )


def _check_words(training: TrainingConfig) -> None:
    one_of(("cpu", "cuda", "auto"), "training.device", training.device)
    one_of(("local", "transformer_engine", "auto"), "training.transformer_impl", training.transformer_impl)
    one_of(("stop", "skip"), "training.non_finite_policy", training.non_finite_policy)
    one_of(("warn", "skip", "stop"), "training.loss_spike_policy", training.loss_spike_policy)
    one_of(("full", "selective"), "training.recompute_granularity", training.recompute_granularity)


def _check_batch_size(config: JobConfig) -> None:
    """Check ramp-up and number of samples. LR schedule and run length must both count samples, or both iterations."""
    derived = with_train_iterations(config).training.train_iterations
    training, optimizer = config.training, config.optimizer
    # The entry point has already set the number of iterations that follows from the number of samples.
    require(
        training.train_iterations == derived,
        "training.train_iterations",
        training.train_iterations,
        f"must be {derived} with training.train_samples={training.train_samples}",
    )
    unit, other = ("samples", "iterations") if training.train_samples is not None else ("iterations", "samples")
    for name in ("lr_warmup", "lr_decay", "lr_wsd_decay"):
        value = getattr(optimizer, f"{name}_{other}")
        require(
            value is None,
            f"optimizer.{name}_{other}",
            value,
            f"must be null with training.train_samples={show(training.train_samples)}; set optimizer.{name}_{unit}",
        )


def _check_optimizer(optimizer: OptimizerConfig, training: TrainingConfig) -> None:
    """Check learning rates, their schedule, moments and gradient clipping."""
    above(0, "optimizer.lr", optimizer.lr)
    for name in ("min_lr", "lr_warmup_init", "weight_decay", "clip_grad", "lr_warmup_iterations"):
        at_least(0, f"optimizer.{name}", getattr(optimizer, name))
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(optimizer, name)
        require(value <= optimizer.lr, f"optimizer.{name}", value, f"must not exceed optimizer.lr={optimizer.lr}")
    share("optimizer.adam_beta1", optimizer.adam_beta1)
    share("optimizer.adam_beta2", optimizer.adam_beta2)
    above(0, "optimizer.adam_eps", optimizer.adam_eps)
    one_of(LR_STYLES, "optimizer.lr_decay_style", optimizer.lr_decay_style)
    styles = ("exponential", "linear", "cosine", "minus_sqrt")
    one_of(styles, "optimizer.lr_wsd_decay_style", optimizer.lr_wsd_decay_style)
    if training.train_samples is None:
        _check_schedule(optimizer, training.train_iterations)
    else:
        _check_schedule_of_samples(optimizer, training)


def _check_schedule_of_samples(optimizer: OptimizerConfig, training: TrainingConfig) -> None:
    at_least(1, "optimizer.lr_decay_samples", optimizer.lr_decay_samples)
    at_least(0, "optimizer.lr_warmup_samples", optimizer.lr_warmup_samples)
    warmup, decay, wsd_decay = optimizer.num_samples(training)
    named = "training.train_samples" if optimizer.lr_decay_samples is None else "optimizer.lr_decay_samples"
    require(
        warmup < decay,
        "optimizer.lr_warmup_samples",
        optimizer.lr_warmup_samples,
        f"must be less than {named}={decay}",
    )
    require(
        optimizer.lr_decay_style != "WSD" or 1 <= wsd_decay <= decay,
        "optimizer.lr_wsd_decay_samples",
        optimizer.lr_wsd_decay_samples,
        f"must be from 1 to {named}={decay} with optimizer.lr_decay_style=WSD",
    )


def _check_schedule(optimizer: OptimizerConfig, train_iterations: int) -> None:
    at_least(1, "optimizer.lr_decay_iterations", optimizer.lr_decay_iterations)
    decay = optimizer.num_decay_iterations(train_iterations)
    named = "training.train_iterations" if optimizer.lr_decay_iterations is None else "optimizer.lr_decay_iterations"
    require(
        optimizer.num_warmup_iterations(train_iterations) < decay,
        "optimizer.lr_warmup_iterations",
        optimizer.lr_warmup_iterations,
        f"must be less than {named}={decay}",
    )
    if optimizer.lr_decay_style != "WSD":
        return
    length = optimizer.lr_wsd_decay_iterations
    require(
        length is not None and 1 <= length <= decay,
        "optimizer.lr_wsd_decay_iterations",
        length,
        f"must be from 1 to {named}={decay} with optimizer.lr_decay_style=WSD",
    )


def _check_precision(precision: PrecisionConfig) -> None:
    """Check number formats and loss scaling."""
    one_of(("fp32", "bf16", "fp16"), "precision.params_dtype", precision.params_dtype)
    one_of(("e4m3", "hybrid"), "precision.fp8", precision.fp8)
    one_of(FP8_RECIPES, "precision.fp8_recipe", precision.fp8_recipe)
    one_of(REGIMES, "precision.regime", precision.regime)
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        above(0, f"precision.{name}", getattr(precision, name))
    at_least(1, "precision.loss_scale_window", precision.loss_scale_window)
    at_least(1, "precision.hysteresis", precision.hysteresis)
    at_least(1, "precision.fp8_amax_history_length", precision.fp8_amax_history_length)
    require(
        precision.loss_scale is None or precision.params_dtype == "fp16",
        "precision.loss_scale",
        precision.loss_scale,
        f"must be null with precision.params_dtype={precision.params_dtype}: only fp16 scales the loss",
    )
    require(
        precision.min_loss_scale <= precision.initial_loss_scale,
        "precision.min_loss_scale",
        precision.min_loss_scale,
        f"must not exceed precision.initial_loss_scale={precision.initial_loss_scale}",
    )


def _check_update_backend(config: JobConfig) -> None:
    """Check that ``optimizer.update_backend`` exists, and supports the optimizer state's formats and the device."""
    backend, device = config.optimizer.update_backend, config.training.device
    one_of(UPDATE_BACKENDS, "optimizer.update_backend", backend)
    if backend == "torch":
        return
    named = f"precision.regime={'null' if config.precision.regime is None else config.precision.regime}"
    require(
        config.precision.regime is not None,
        "optimizer.update_backend",
        backend,
        f"must be torch with {named}: the backends cpp and cuda update only quantized state",
    )
    other = {"cpp": "cuda", "cuda": "cpu"}[backend]
    constraint = f"must be torch or {'cuda' if device == 'cuda' else 'cpp'} with training.device={device}"
    require(device != other, "optimizer.update_backend", backend, constraint)


def _check_regime(precision: PrecisionConfig) -> None:
    """Check that ``params_dtype`` and ``fp8`` match the format of the compute weights in ``precision.regime``."""
    if precision.regime is None:
        return
    needs_fp8, named = precision.regime.startswith("fp8"), f"precision.regime={precision.regime}"
    advice = f": choose precision={precision.regime}"
    wanted = "bf16" if needs_fp8 else "fp16"
    require(
        precision.params_dtype == wanted,
        "precision.params_dtype",
        precision.params_dtype,
        f"must be {wanted} with {named}{advice}",
    )
    require(
        (precision.fp8 is not None) == needs_fp8,
        "precision.fp8",
        precision.fp8,
        f"must {'not ' if needs_fp8 else ''}be null with {named}{advice}",
    )


def _check_fp8(config: JobConfig) -> None:
    """Check that all other keys allow linear layers with FP8 operands (``precision.fp8``)."""
    precision, parallel = config.precision, config.parallel
    if precision.fp8 is None:
        return
    named = f"precision.fp8={precision.fp8}"
    require(
        precision.fp8_recipe != "mxfp8",
        "precision.fp8_recipe",
        precision.fp8_recipe,
        f"must be tensorwise, blockwise or delayed with {named}: PyTorch has no matrix product for this recipe",
    )
    require(
        precision.params_dtype in ("bf16", "fp32"),
        "precision.params_dtype",
        precision.params_dtype,
        f"must be bf16 or fp32 with {named}",
    )
    for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
        value = getattr(parallel, name)
        require(value == 1, f"parallel.{name}", value, f"must be 1 with {named}: ranks cannot share FP8 layers yet")
    require(
        not config.model.multi_latent_attention,
        "model.multi_latent_attention",
        config.model.multi_latent_attention,
        f"must be false with {named}: latent attention does not support FP8 layers yet",
    )
    reason = "the FP8 state of Transformer Engine's layers is not captured"
    require_local_layers(config, named, "local", reason)


def _check_checkpoint(config: JobConfig) -> None:
    """Check intervals of saves, numbers of kept checkpoints, and that at most one checkpoint is loaded."""
    for name in ("save_interval_iterations", "keep_last", "keep_every_iterations"):
        at_least(0, f"checkpoint.{name}", getattr(config.checkpoint, name))
    weights = config.checkpoint.load_weights
    require(
        weights is None or config.checkpoint.load is None,
        "checkpoint.load_weights",
        weights,
        "must be null if checkpoint.load is given: it also loads the weights",
    )
    interval, keep = config.checkpoint.save_interval_iterations, config.checkpoint.keep_every_iterations
    # Saves fall only on multiples of the interval, so other multiples would never be kept.
    if keep and interval:
        divides(interval, "checkpoint.keep_every_iterations", keep, "checkpoint.save_interval_iterations")


CHECKS: tuple[Callable[[JobConfig], None], ...] = (
    lambda config: _check_training(config.training),
    lambda config: _check_precision(config.precision),
    lambda config: _check_regime(config.precision),
    _check_update_backend,
    _check_batch_size,
    lambda config: _check_optimizer(config.optimizer, config.training),
    _check_checkpoint,
    _check_evaluate_only,
    _check_frozen,
    _check_fp8,
)
"""All checks of this file."""
