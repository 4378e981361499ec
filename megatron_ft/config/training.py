"""Length, batch size, device, evaluation, and policies for bad iterations (group ``training``)."""

from dataclasses import dataclass


@dataclass
class TrainingConfig:
    """Length and batch size of a run, device, evaluation, and policies for bad iterations."""

    train_iterations: int = 60
    """Number of iterations of the whole run."""
    exit_at_iteration: int | None = None
    """Iteration after which this job stops although the run is not finished; a later job can resume the run. null runs
    to the end. Learning-rate schedules do not depend on this key."""
    micro_batch_size: int = 2
    """Number of samples per microbatch and data-parallel rank."""
    global_batch_size: int = 16
    """Number of samples per iteration, over all ranks. It stays the same when the number of ranks changes."""
    seed: int = 1234
    """Seed of initial weights and dropout."""
    eval_interval_iterations: int = 30
    """Number of iterations between two evaluations; 0 turns evaluation off."""
    eval_iterations: int = 4
    """Number of batches of ``global_batch_size`` samples in one evaluation."""
    deterministic: bool = True
    """Use deterministic kernels and a fixed order of summation, so that equal inputs give equal bits."""
    num_threads: int = 1
    """Number of CPU threads per rank."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto`` (``cuda`` if the machine that starts the job has a GPU). With ``auto``, a dry run
    on a machine without a GPU checks both devices."""
    transformer_impl: str = "auto"
    """Implementation of transformer layers: ``local``, ``transformer_engine`` or ``auto`` (Transformer Engine on CUDA
    if it is fully installed, otherwise ``local``)."""
    non_finite_policy: str = "stop"
    """Action if a loss or gradient norm is NaN or infinite: ``stop`` the run, or ``skip`` the update. With ``fp16`` an
    overflow always skips the update and lowers the loss scale."""
    max_consecutive_skips: int = 10
    """Largest number of updates that may be skipped in a row; one more stops the run."""
    loss_spike_factor: float | None = None
    """Factor above which a loss is a spike: a spike exceeds this factor times the median of the last
    ``loss_spike_window`` committed losses. null turns the check off."""
    loss_spike_window: int = 50
    """Number of newest committed losses whose median a loss is compared with. The check starts after half this
    number."""
    loss_spike_policy: str = "warn"
    """Action if a loss is a spike: ``warn``, ``skip`` the update, or ``stop`` the run."""
    recompute_granularity: str | None = None
    """Recomputation of activations: ``full``, ``selective``, or null for none."""
    distributed_timeout_seconds: float = 600.0
    """Timeout of collective operations."""
    digest_interval_iterations: int = 0
    """Number of iterations after which digests of all ranks' states are recorded, also at the end; 0 records none."""
