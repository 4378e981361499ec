"""Environment variables that a rank on CUDA needs before its first call to CUDA or NCCL.

Sources: Megatron-Core 0.16.1 (``CUDA_DEVICE_MAX_CONNECTIONS``); NVIDIA's documentation of cuBLAS ("Results
reproducibility"), NCCL ("Environment Variables") and Transformer Engine; PyTorch's notes "CUDA semantics" and
"ProcessGroupNCCL Environment Variables".
"""

from collections.abc import Mapping

from megatron_ft.config.job import JobConfig

_ABORTS_ITSELF = {
    # A failed communicator must not end the process: the control plane decides what to do.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Non-blocking initialization can be aborted.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # After a peer has died, NVLS multicast memory cannot be freed; cuMem mappings are reference-counted and can.
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "1",
}
# By default NCCL chooses algorithm and protocol by message size and topology; each choice has its own order of sums.
_FIXED_ORDER_OF_SUMS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
# NCCL treats ranks with different host ids as separate machines, which share neither GPU nor host memory.
_SOCKETS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def rank_environment(config: JobConfig, rank: int | None = None) -> dict[str, str]:
    """Return the environment variables that a rank needs; empty on CPU. Values that the user sets take precedence.

    Args:
        config: configuration of the job, in which ``training.device`` is not ``auto``.
        rank: global rank of the process; None leaves out variables that differ between ranks.
    """
    parallel, training = config.parallel, config.training
    if training.device != "cuda":
        return {}
    # A new membership has buffers of other sizes. In segments of fixed size, old buffers would leave unusable gaps.
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1:
        # Communication must be enqueued before the computation that it overlaps with.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if training.deterministic:
        # With several streams, repeated cuBLAS calls give the same bits only with a workspace of fixed size.
        variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    if parallel.backend_on(training.device) == "nccl":
        variables |= _of_nccl(config, rank)
    return dict(sorted(variables.items()))


def _of_nccl(config: JobConfig, rank: int | None) -> dict[str, str]:
    variables: dict[str, str] = {}
    if config.training.deterministic:
        variables |= _FIXED_ORDER_OF_SUMS
    if config.may_lose_nodes:
        variables |= _ABORTS_ITSELF
    if config.launch.ranks_per_gpu > 1:
        # NCCL refuses two ranks of one host on the same GPU, so each rank gets its own host id.
        variables |= _SOCKETS_ONLY
        if rank is not None:
            variables["NCCL_HOSTID"] = f"rank-{rank}"
    return variables


def set_otherwise(table: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of ``variables`` to which ``table`` assigns a different value."""
    return {name: variables[name] for name, value in table.items() if variables.get(name, value) != value}
