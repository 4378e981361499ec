"""Checks of parallel sizes. The batch size need not be a multiple of these sizes: padding microbatches are added."""

from megatron_ft.config.checks.primitives import at_least, divides, one_of, require
from megatron_ft.config.job import JobConfig
from megatron_ft.topology import Topology


def _check_sizes(config: JobConfig) -> None:
    """Check that the parallel sizes fit the number of ranks."""
    parallel = config.parallel
    virtual = parallel.virtual_pipeline_model_parallel_size
    at_least(2, "parallel.virtual_pipeline_model_parallel_size", virtual)
    require(
        not parallel.overlap_param_gather,
        "parallel.overlap_param_gather",
        True,
        "must be false: an iteration must gather its updated parameters before the next iteration begins",
    )
    # ``Topology.of`` raises an error if the sizes do not divide the number of ranks.
    Topology.of(parallel, config.launch.num_nodes * config.launch.ranks_per_node)


def _check_backend(config: JobConfig) -> None:
    parallel, device = config.parallel, config.training.device
    key = "parallel.device_backend"
    one_of(("auto", "nccl", "gloo"), key, parallel.device_backend)
    require(
        parallel.device_backend != "nccl" or device != "cpu",
        key,
        parallel.device_backend,
        "must be auto or gloo with training.device=cpu: NCCL needs GPUs",
    )
    is_chosen = parallel.device_backend == "gloo"
    require(
        parallel.expert_tensor_parallel_size == 1 or not (is_chosen or device == "cpu"),
        "parallel.expert_tensor_parallel_size",
        parallel.expert_tensor_parallel_size,
        f"must be 1 with training.device=cpu or {key}=gloo: gloo cannot gather tensors of different sizes",
    )
    require(
        parallel.context_parallel_size == 1 or not is_chosen,
        "parallel.context_parallel_size",
        parallel.context_parallel_size,
        f"must be 1 with {key}=gloo: context parallelism sends GPU memory, which gloo does not support",
    )


def _check_pipeline(config: JobConfig) -> None:
    pp, vpp = config.parallel.pipeline_model_parallel_size, config.parallel.virtual_pipeline_model_parallel_size
    require(
        pp > 1 or vpp is None,
        "parallel.virtual_pipeline_model_parallel_size",
        vpp,
        f"must be null with parallel.pipeline_model_parallel_size={pp}",
    )
    product = f"PP * VPP (parallel.pipeline_model_parallel_size={pp}"
    product += ")" if vpp is None else f", parallel.virtual_pipeline_model_parallel_size={vpp})"
    divides(pp * (vpp or 1), "model.num_layers", config.model.num_layers, product)


def _check_tensor(config: JobConfig) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    name = "parallel.tensor_model_parallel_size"
    divides(tp, "model.num_attention_heads", model.num_attention_heads, name)
    divides(tp, "model.num_query_groups", model.num_query_groups or model.num_attention_heads, name)
    divides(tp, "model.ffn_hidden_size", model.ffn_hidden_size, name)
    divides(tp, "model.make_vocab_size_divisible_by", model.make_vocab_size_divisible_by, name)
    if model.moe_shared_expert_intermediate_size is not None:
        key = "model.moe_shared_expert_intermediate_size"
        divides(tp, key, model.moe_shared_expert_intermediate_size, name)
    sequence_ranks = tp * config.parallel.context_parallel_size
    if tp > 1:
        what = "TP * CP (sequence parallelism splits the sequence over parallel.tensor_model_parallel_size)"
        divides(sequence_ranks, "model.seq_length", model.seq_length, what)


def _check_experts(config: JobConfig) -> None:
    model, ep = config.model, config.parallel.expert_model_parallel_size
    etp = config.parallel.expert_tensor_parallel_size
    if model.num_moe_experts is None:
        dense = "must be 1 in a dense model (model.num_moe_experts=null)"
        require(ep == 1, "parallel.expert_model_parallel_size", ep, dense)
        require(etp == 1, "parallel.expert_tensor_parallel_size", etp, dense)
        return
    require(
        model.num_moe_experts % ep == 0,
        "parallel.expert_model_parallel_size",
        ep,
        f"must divide model.num_moe_experts={model.num_moe_experts}",
    )
    require(
        etp == 1 or not model.add_bias_linear,
        "parallel.expert_tensor_parallel_size",
        etp,
        "must be 1 with model.add_bias_linear=true",
    )
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    divides(etp, "model.moe_ffn_hidden_size", width, "parallel.expert_tensor_parallel_size")


def _check_context(config: JobConfig) -> None:
    cp = config.parallel.context_parallel_size
    if cp > 1:
        # A rank has a chunk of the front half and one of the back half, so causal attention costs each rank the same.
        divides(2 * cp, "model.seq_length", config.model.seq_length, "2 * parallel.context_parallel_size")


def _check_transformer_engine(config: JobConfig) -> None:
    """Check that no key needs Transformer Engine if the device or ``training.transformer_impl`` rules it out."""
    training = config.training
    without = [
        ("training.device", training.device, "cpu"),
        ("training.transformer_impl", training.transformer_impl, "local"),
    ]
    for key, value, constraint in needs_transformer_engine(config):
        for reason, chosen, excluded in without:
            why = f"with {reason}={excluded}: this value needs Transformer Engine"
            require(chosen != excluded, key, value, f"{constraint} {why}")


def needs_transformer_engine(config: JobConfig) -> list[tuple[str, object, str]]:
    """Return key, value and constraint of every setting that only Transformer Engine's layers support."""
    needs: list[tuple[str, object, str]] = []
    if config.parallel.context_parallel_size > 1:
        needs.append(("parallel.context_parallel_size", config.parallel.context_parallel_size, "must be 1"))
    if config.model.add_bias_linear and config.model.num_moe_experts is not None:
        # Megatron's local experts add their bias in place to a view, which autograd refuses.
        needs.append(("model.add_bias_linear", True, "must be false in a model with experts"))
    return needs


def require_local_layers(config: JobConfig, named: str, accepted: str, reason: str) -> None:
    """Check that no key needs or chooses Transformer Engine.

    Args:
        named: setting (``key=value``) with which Transformer Engine cannot be used.
        accepted: allowed values of ``training.transformer_impl``, for the error message.
        reason: why the layers of Transformer Engine do not support the setting ``named``.
    """
    for key, value, constraint in needs_transformer_engine(config):
        require(False, key, value, f"{constraint}: this value needs Transformer Engine, which {named} excludes")
    chosen = config.training.transformer_impl
    constraint = f"must be {accepted} with {named}: {reason}"
    require(chosen != "transformer_engine", "training.transformer_impl", chosen, constraint)


CHECKS = (
    _check_sizes,
    _check_pipeline,
    _check_tensor,
    _check_experts,
    _check_context,
    _check_backend,
    _check_transformer_engine,
)
"""All checks of this file. The checks after ``_check_sizes`` assume that the parallel sizes fit the number of ranks."""
