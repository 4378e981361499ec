"""How the model is laid out over ranks (group ``parallel``)."""

from dataclasses import dataclass


@dataclass
class ParallelConfig:
    """Sizes of the parallel groups. Data parallelism is what is left: world / (TP * PP * CP)."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix (TP). More than 1 turns sequence parallelism on."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline stage (VPP); null for one."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer (EP). Divides the experts and, with the expert tensor
    parallel size, the ranks of a pipeline stage (TP * CP * DP)."""
    expert_tensor_parallel_size: int = 1
    """Ranks that share one expert's matrices; gloo allows only 1."""
    context_parallel_size: int = 1
    """Ranks that share a sequence (CP); more than 1 needs Transformer Engine."""
    use_distributed_optimizer: bool = True
    """Shard master weights and moments over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather parameters during the next forward pass. Refused: the commit protocol gathers before it
    calls an iteration done."""
    device_backend: str = "auto"
    """Backend of the process groups that move the model's tensors: ``nccl``, ``gloo`` or ``auto`` (NCCL on CUDA, gloo
    on CPU). gloo on CUDA is for trials where NCCL cannot be used: it copies everything through host memory."""

    def backend_on(self, device: str) -> str:
        """``nccl`` or ``gloo``: what ``device_backend`` is on ``device``, ``cpu`` or ``cuda``."""
        if self.device_backend != "auto":
            return self.device_backend
        return "nccl" if device == "cuda" else "gloo"
