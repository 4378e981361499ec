"""Length, batch size, device, evaluation, and policies for bad iterations (group ``training``)."""

from dataclasses import dataclass


@dataclass
class TrainingConfig:
    """Length and batch size of a run, device, evaluation, and policies for bad iterations."""

    train_iterations: int = 60
    """Iterations of the whole run."""
    exit_at_iteration: int | None = None
    """Stop after this iteration as at the end of a time limit. null runs to the end. Learning-rate schedules do not
    depend on it."""
    micro_batch_size: int = 2
    """Samples per microbatch and data-parallel rank."""
    global_batch_size: int = 16
    """Samples per iteration over all ranks. The number of ranks does not change it."""
    seed: int = 1234
    """Seed of weights and dropout."""
    eval_interval_iterations: int = 30
    """Number of iterations between two evaluations; 0 never evaluates."""
    eval_iterations: int = 4
    """Batches of ``global_batch_size`` per evaluation."""
    deterministic: bool = True
    """Use deterministic kernels and a fixed order of summation: equal inputs give equal bits."""
    num_threads: int = 1
    """CPU threads per rank."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto``: CUDA if the machine that starts the job has a GPU. The device is resolved and
    checked with all other keys before ranks start. A dry run on a machine without a GPU checks both devices."""
    transformer_impl: str = "auto"
    """``local``, ``transformer_engine`` or ``auto`` (Transformer Engine where it is fully installed, on CUDA only)."""
    non_finite_policy: str = "stop"
    """Action if a loss or gradient norm is NaN or infinite: ``stop``, or ``skip`` the update. With ``fp16`` an overflow
    always skips the update and lowers the loss scale."""
    max_consecutive_skips: int = 10
    """Largest number of skipped updates in a row; one more stops the run."""
    loss_spike_factor: float | None = None
    """Limit for a loss spike: this factor times the median of the last ``loss_spike_window`` committed losses. null
    turns the check off."""
    loss_spike_window: int = 50
    """Number of losses in the median for loss spikes. The check starts after half as many."""
    loss_spike_policy: str = "warn"
    """Action on a spike: ``warn``, ``skip`` the update, or ``stop``."""
    recompute_granularity: str | None = None
    """Activation recomputation: ``full`` or ``selective``; null for none."""
    distributed_timeout_seconds: float = 600.0
    """Timeout of collectives."""
    digest_interval_iterations: int = 0
    """Number of iterations between two records with a digest of every rank's whole state; the last iteration has one,
    too. 0 records none."""
