"""Effective training time ratio (ETTR), the share of wall time for useful training, by a closed formula.

With failures as a Poisson process of rate 1 / MTBF (MoEvement, section 2.4):
``ETTR = 1 / (1 + T_ckpt / (T_iter * interval)) * 1 / (1 + E[R] / MTBF)``. The first factor is the cost of snapshots
without failures, the second the cost of failures. Start-up, evaluations and queueing are not included.
"""

import math


def checkpoint_overhead(checkpoint_seconds: float, iteration_seconds: float, interval_iterations: float = 1.0) -> float:
    """Stall time per compute time, ``T_ckpt / (T_iter * interval)``.

    Args:
        checkpoint_seconds: stall of each snapshot.
        iteration_seconds: time of an iteration without a snapshot; above 0.
        interval_iterations: from one snapshot to the next; above 0.
    """
    assert checkpoint_seconds >= 0 and math.isfinite(checkpoint_seconds), f"T_ckpt of {checkpoint_seconds} s"
    assert iteration_seconds > 0 and interval_iterations > 0, f"{interval_iterations} iterations, {iteration_seconds} s"
    return checkpoint_seconds / (iteration_seconds * interval_iterations)


def effective_training_time_ratio(*, overhead: float, recovery_seconds: float, mtbf_seconds: float) -> float:
    """Share of wall time for useful training, above 0 and at most 1.

    Args:
        overhead: result of ``checkpoint_overhead``; 0 without snapshots.
        recovery_seconds: E[R], the average loss by a failure: the interruption and the iterations that run again.
        mtbf_seconds: mean time between failures; infinite without failures.
    """
    assert overhead >= 0 and math.isfinite(overhead), f"overhead of {overhead}"
    assert recovery_seconds >= 0 and math.isfinite(recovery_seconds), f"E[R] of {recovery_seconds} s"
    assert mtbf_seconds > 0, f"MTBF of {mtbf_seconds} s"
    return 1.0 / (1.0 + overhead) / (1.0 + recovery_seconds / mtbf_seconds)
