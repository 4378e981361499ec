"""How long, how much at once, and what happens to a bad iteration (group ``training``)."""

from dataclasses import dataclass


@dataclass
class TrainingConfig:
    """Length and batch of a run, evaluation, and policies for bad values."""

    train_iterations: int = 60
    """Iterations of the whole run."""
    exit_at_iteration: int | None = None
    """Stop after this iteration as if the time were up; null runs to the end. Schedules do not see it."""
    micro_batch_size: int = 2
    """Samples per microbatch and data-parallel rank."""
    global_batch_size: int = 16
    """Samples per iteration over all ranks, whatever their number."""
    seed: int = 1234
    """Seed of weights and dropout."""
    eval_interval_iterations: int = 30
    """Evaluate every so many iterations; 0 never."""
    eval_iterations: int = 4
    """Batches of ``global_batch_size`` per evaluation."""
    deterministic: bool = True
    """Same inputs, same bits: deterministic kernels and fixed summation order."""
    num_threads: int = 1
    """CPU threads per rank."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto``: CUDA where the machine that starts the job shows a GPU. It is decided, and checked
    against all other keys, before ranks start; a dry run on a machine without a GPU checks both."""
    transformer_impl: str = "auto"
    """``local``, ``transformer_engine`` or ``auto`` (Transformer Engine when complete, on CUDA only)."""
    non_finite_policy: str = "stop"
    """A loss or gradient norm that is NaN or infinite: ``stop``, or ``skip`` the update and go on.
    With ``fp16`` an overflow is skipped in either case: it drives the loss scale."""
    max_consecutive_skips: int = 10
    """Skipped updates in a row that are put up with; one more stops the run."""
    loss_spike_factor: float | None = None
    """A loss above this factor times the median of the last ``loss_spike_window`` committed losses is
    a spike; null looks for none."""
    loss_spike_window: int = 50
    """Losses the median is taken over; half as many are needed before a spike is called."""
    loss_spike_policy: str = "warn"
    """``warn``, ``skip`` the update, or ``stop``."""
    recompute_granularity: str | None = None
    """``full`` or ``selective`` activation recomputation; null for none."""
    distributed_timeout_seconds: float = 600.0
    """Timeout of collectives."""
    digest_interval_iterations: int = 0
    """Record a digest of every rank's whole state every so many iterations and at the end; 0 never."""
