"""Parallel layout of the model (group ``parallel``)."""

from dataclasses import dataclass


@dataclass
class ParallelConfig:
    """Sizes of the parallel groups. The data-parallel size is the number of ranks divided by (TP * PP * CP)."""

    tensor_model_parallel_size: int = 1
    """Number of ranks that split each matrix (TP). Above 1, sequence parallelism is used, too."""
    pipeline_model_parallel_size: int = 1
    """Number of pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Number of model chunks per pipeline stage (VPP); null means one."""
    expert_model_parallel_size: int = 1
    """Number of ranks over which the experts of a layer are distributed (EP). It must divide the number of experts. EP
    times ``expert_tensor_parallel_size`` must divide the number of ranks of a pipeline stage (TP * CP * DP)."""
    expert_tensor_parallel_size: int = 1
    """Number of ranks that split the matrices of one expert; must be 1 with gloo."""
    context_parallel_size: int = 1
    """Number of ranks that split a sequence (CP); above 1 needs Transformer Engine."""
    use_distributed_optimizer: bool = True
    """Shard master weights and moments over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather parameters during the next forward pass. Must be false, because an iteration must gather its
    updated parameters before the next iteration begins."""
    device_backend: str = "auto"
    """Backend of the process groups for the model's tensors: ``nccl``, ``gloo`` or ``auto`` (NCCL on CUDA, gloo on
    CPU). gloo on CUDA is slow, because it copies tensors through host memory; it is for tests without NCCL."""

    def backend_on(self, device: str) -> str:
        """Return the backend that ``device_backend`` selects on ``device``: ``nccl`` or ``gloo``."""
        if self.device_backend != "auto":
            return self.device_backend
        return "nccl" if device == "cuda" else "gloo"
