"""Computes the effective training time ratio (ETTR), which is the share of wall time that is useful training.

If failures are a Poisson process of rate 1 / MTBF (MoEvement, section 2.4), then
``ETTR = 1 / (1 + T_ckpt / (T_iter * interval)) * 1 / (1 + E[R] / MTBF)``. ``T_ckpt`` is the stall of a snapshot,
``T_iter`` the time of an iteration, and ``E[R]`` the mean time that a failure costs. The first factor counts the cost
of snapshots, the second factor the cost of failures. Start-up, evaluations and queueing are not included.
"""

import math


def checkpoint_overhead(checkpoint_seconds: float, iteration_seconds: float, interval_iterations: float = 1.0) -> float:
    """Return the ratio of stall time to compute time, ``T_ckpt / (T_iter * interval)``.

    Args:
        checkpoint_seconds: time for which each snapshot stalls training.
        iteration_seconds: time of an iteration without a snapshot; above 0.
        interval_iterations: iterations from one snapshot to the next; above 0.
    """
    assert checkpoint_seconds >= 0 and math.isfinite(checkpoint_seconds), (
        f"checkpoint_seconds={checkpoint_seconds} must be finite and at least 0"
    )
    assert iteration_seconds > 0, f"iteration_seconds={iteration_seconds} must be above 0"
    assert interval_iterations > 0, f"interval_iterations={interval_iterations} must be above 0"
    return checkpoint_seconds / (iteration_seconds * interval_iterations)


def effective_training_time_ratio(*, overhead: float, recovery_seconds: float, mtbf_seconds: float) -> float:
    """Return the share of wall time that is useful training, above 0 and at most 1.

    Args:
        overhead: result of ``checkpoint_overhead``; 0 without snapshots.
        recovery_seconds: E[R], average time lost by a failure: the interruption and the iterations that run again.
        mtbf_seconds: mean time between failures; infinite without failures.
    """
    assert overhead >= 0 and math.isfinite(overhead), f"overhead={overhead} must be finite and at least 0"
    assert recovery_seconds >= 0 and math.isfinite(recovery_seconds), (
        f"recovery_seconds={recovery_seconds} must be finite and at least 0"
    )
    assert mtbf_seconds > 0, f"mtbf_seconds={mtbf_seconds} must be above 0"
    return 1.0 / (1.0 + overhead) / (1.0 + recovery_seconds / mtbf_seconds)
