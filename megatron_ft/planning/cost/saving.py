"""Additional memory of a rank while it saves a dense checkpoint.

Megatron's ``fully_reshardable`` format gathers the distributed optimizer: during the save every rank of a data-parallel
group holds master weights and moments of all its parameters, not only of its shard, in host memory.
"""

from dataclasses import dataclass

from megatron_ft.config.job import JobConfig
from megatron_ft.planning.cost.memory import BYTES_PER_VALUE, FP32_BYTES, RankParameters
from megatron_ft.topology import Topology

OPTIMIZER_BYTES = 3 * FP32_BYTES
"""Bytes of the master weight and the two moments of one parameter."""
_MIN_BUCKET = 40_000_000
_MIN_BUCKET_PER_RANK = 1_000_000
"""Megatron's gradient buckets have at least this many parameters times the number of data-parallel ranks, and at least
``_MIN_BUCKET`` parameters, if the gradient reduction overlaps the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingMemory:
    """Memory that one rank needs for a save; all values except ``device_bytes`` are host memory."""

    gathered_bytes: int
    """Bytes of the master weights and moments of all parameters of the rank."""
    gathering_bytes: int
    """Peak host memory during gathering: all state gathered so far, and the copies of one bucket."""
    snapshot_bytes: int
    """Bytes of the rank's copy of the state that it writes. The copy exists until the state is written."""
    device_bytes: int
    """One gathered bucket on the device; 0 on CPU, where ``gathering_bytes`` includes the bucket."""

    @property
    def peak_bytes(self) -> int:
        """Peak host memory."""
        return max(self.gathering_bytes, self.gathered_bytes + self.snapshot_bytes)

    @classmethod
    def of_stage(cls, config: JobConfig, parameters: RankParameters, topology: Topology, device: str) -> "SavingMemory":
        """Compute the memory that each rank of a stage needs for a save, assuming equal buffers in all virtual
        chunks."""
        value_bytes = BYTES_PER_VALUE[config.precision.params_dtype]
        dense, expert = _shards(topology)
        written_dense, written_expert = (dense, expert) if config.checkpoint.fully_parallel else (1, 1)
        written = -(-parameters.num_dense // written_dense) + -(-parameters.num_expert // written_expert)
        if not config.parallel.use_distributed_optimizer:
            # FP32 weights are their own master weights.
            own_master = 0 if value_bytes == FP32_BYTES else FP32_BYTES
            snapshot = written * (value_bytes + own_master + 2 * FP32_BYTES)
            return cls(gathered_bytes=0, gathering_bytes=0, snapshot_bytes=snapshot, device_bytes=0)
        gathering, on_device = _gathering(config, _buffers(parameters, topology))
        return cls(
            gathered_bytes=parameters.total * OPTIMIZER_BYTES,
            gathering_bytes=gathering,
            snapshot_bytes=written * (value_bytes + OPTIMIZER_BYTES),
            device_bytes=on_device if device == "cuda" else 0,
        )


def _shards(topology: Topology) -> tuple[int, int]:
    return topology.data_parallel_size * topology.context_parallel_size, topology.expert_data_parallel_size


def _buffers(parameters: RankParameters, topology: Topology) -> list[tuple[int, int]]:
    """Return (number of parameters, number of ranks that shard them) of each flat buffer, in the order of gathering."""
    dense, expert = _shards(topology)
    # Without expert parallelism Megatron keeps experts in the buffer of the dense parameters.
    if topology.expert_model_parallel_size == 1 and dense == expert:
        return [(parameters.total, dense)]
    return [(parameters.num_dense, dense), (parameters.num_expert, expert)]


def _gathering(config: JobConfig, buffers: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the (host, device) peak bytes while the buffers are gathered one after another."""
    # A bucket needs the rank's shard of all three tensors and the received pieces of one tensor. In addition, the host
    # has the concatenated previous and current tensors, and the device has NCCL's buffer.
    num_chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    gathered = host = device = 0
    for num_parameters, num_ranks in buffers:
        bucket = -(-num_parameters // num_chunks)
        if config.parallel.overlap_grad_reduce:
            bucket = min(bucket, max(_MIN_BUCKET, _MIN_BUCKET_PER_RANK * num_ranks))
        shard = -(-bucket // num_ranks)
        gathered += num_parameters * OPTIMIZER_BYTES
        host = max(host, gathered + shard * OPTIMIZER_BYTES + 3 * bucket * FP32_BYTES)
        device = max(device, (2 * bucket + shard) * FP32_BYTES)
    return host, device
