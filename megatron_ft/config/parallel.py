"""Parallel layout of the model (group ``parallel``)."""

from dataclasses import dataclass


@dataclass
class ParallelConfig:
    """Sizes of the parallel groups. The data-parallel size follows: world / (TP * PP * CP)."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each matrix (TP); above 1, sequence parallelism is on."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline stage (VPP); null for one."""
    expert_model_parallel_size: int = 1
    """Ranks that split the experts of a layer (EP). It must divide the number of experts. EP times the expert tensor
    parallel size must divide the ranks of a pipeline stage (TP * CP * DP)."""
    expert_tensor_parallel_size: int = 1
    """Ranks that split one expert's matrices; must be 1 with gloo."""
    context_parallel_size: int = 1
    """Ranks that split a sequence (CP); above 1 needs Transformer Engine."""
    use_distributed_optimizer: bool = True
    """Shard master weights and moments over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather parameters during the next forward pass. Must be false: an iteration is committed only after all
    parameters are gathered."""
    device_backend: str = "auto"
    """Backend of the process groups for the model's tensors: ``nccl``, ``gloo`` or ``auto`` (NCCL on CUDA, gloo on
    CPU). gloo on CUDA is for tests without NCCL, because it copies all tensors through host memory."""

    def backend_on(self, device: str) -> str:
        """Resolve ``device_backend`` to ``nccl`` or ``gloo`` for ``device``, ``cpu`` or ``cuda``."""
        if self.device_backend != "auto":
            return self.device_backend
        return "nccl" if device == "cuda" else "gloo"
