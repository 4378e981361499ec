"""Assignment of an iteration's microbatches to ranks; the set of samples never depends on the layout.

An iteration reads ``global_batch_size`` samples in ``num_real_microbatches`` microbatches, which are assigned to the
data-parallel ranks in turn. Every rank runs the same number of microbatches, because expert all-to-all is collective;
*padding microbatches*, which contribute nothing, fill up the last round.
"""

from dataclasses import dataclass

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Microbatches of one iteration over ``data_parallel_size`` ranks."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    num_microbatches_multiple: int = 1
    """Number by which the count per rank must be divisible: the number of stages with an interleaved schedule, else
    1."""

    @classmethod
    def of(cls, config: JobConfig, topology: Topology) -> "BatchPlan":
        """Plan the batch of a job with the layout ``topology``."""
        interleaved = topology.virtual_pipeline_model_parallel_size > 1
        return cls(
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_size=topology.data_parallel_size,
            num_microbatches_multiple=topology.pipeline_model_parallel_size if interleaved else 1,
        )

    def validate(self) -> None:
        """Raise ConfigError unless the global batch is a multiple of the microbatch."""
        if self.global_batch_size % self.micro_batch_size:
            raise ConfigError.of(
                "training.global_batch_size",
                self.global_batch_size,
                f"must be a multiple of training.micro_batch_size={self.micro_batch_size}",
            )

    @property
    def num_real_microbatches(self) -> int:
        """Number of microbatches with samples, over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of each rank, padding included."""
        per_rank = -(-self.num_real_microbatches // self.data_parallel_size)
        # Megatron's interleaved schedule asserts a multiple of the stages.
        return -(-per_rank // self.num_microbatches_multiple) * self.num_microbatches_multiple

    @property
    def num_padding_microbatches(self) -> int:
        """Number of microbatches without samples, over all ranks."""
        return self.num_microbatches * self.data_parallel_size - self.num_real_microbatches

    def first_sample(self, iteration: int, data_parallel_rank: int, microbatch: int) -> int | None:
        """Index of the first sample of a rank's microbatch (iterations count from 1); None for padding."""
        position = microbatch_position(self.data_parallel_size, data_parallel_rank, microbatch)
        # Padding lies at the end of the iteration, so the samples before it are the same for every number of ranks.
        if position >= self.num_real_microbatches:
            return None
        return (iteration - 1) * self.global_batch_size + position * self.micro_batch_size


def microbatch_position(data_parallel_size: int, data_parallel_rank: int, microbatch: int) -> int:
    """Position of a rank's microbatch in its iteration, from 0."""
    # In turn and not in blocks: padding then falls into the last rounds of all ranks, not onto the last ranks.
    return microbatch * data_parallel_size + data_parallel_rank
