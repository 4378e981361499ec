"""Effective training time ratio (ETTR): the share of wall time that goes into useful training, by a closed formula.

Failures come as a Poisson process of rate 1 / MTBF (MoEvement, section 2.4):
``ETTR = 1 / (1 + T_ckpt / (T_iter * interval)) * 1 / (1 + E[R] / MTBF)``. The first factor is what snapshots cost while
nothing fails, the second what failures cost. The formula does not know a job's start, evaluations, or queues.
"""

import math


def checkpoint_overhead(checkpoint_seconds: float, iteration_seconds: float, interval_iterations: float = 1.0) -> float:
    """Seconds that training waits for snapshots per second of computing: ``T_ckpt / (T_iter * interval)``.

    Args:
        checkpoint_seconds: waited for each snapshot.
        iteration_seconds: of an iteration without any; above 0.
        interval_iterations: from one snapshot to the next; above 0.
    """
    assert checkpoint_seconds >= 0 and math.isfinite(checkpoint_seconds), f"T_ckpt of {checkpoint_seconds} s"
    assert iteration_seconds > 0 and interval_iterations > 0, f"{interval_iterations} iterations, {iteration_seconds} s"
    return checkpoint_seconds / (iteration_seconds * interval_iterations)


def effective_training_time_ratio(*, overhead: float, recovery_seconds: float, mtbf_seconds: float) -> float:
    """Share of wall time that is useful training, above 0 and at most 1.

    Args:
        overhead: as ``checkpoint_overhead`` gives it; 0 where nothing is saved.
        recovery_seconds: E[R], lost to a failure on average: until training goes on, and what is run again then.
        mtbf_seconds: mean time that training goes on between failures; infinite where nothing fails.
    """
    assert overhead >= 0 and math.isfinite(overhead), f"overhead of {overhead}"
    assert recovery_seconds >= 0 and math.isfinite(recovery_seconds), f"E[R] of {recovery_seconds} s"
    assert mtbf_seconds > 0, f"MTBF of {mtbf_seconds} s"
    return 1.0 / (1.0 + overhead) / (1.0 + recovery_seconds / mtbf_seconds)
