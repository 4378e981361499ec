"""Decides whether a job array's launcher may start again. It is refused after several starts without progress.

Task 0 of the array runs the launcher. Slurm starts this task again each time its node has died or was taken away.
Nothing records how a lost launcher ended, so only the progress of the run shows whether another start can help.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.control.slurm.attempts import RunAttempts
from megatron_ft.errors import EXIT_OK, ControlError, MegatronFtError
from megatron_ft.planning.recovery.job_attempts import Attempt, why_hopeless


def _count_return(run_dir: Path, array: str, *, max_fruitless: int) -> int:
    """Record that a launcher ended without a result. Return 0 if another launcher may start, otherwise an exit code.

    If no other launcher may start, the marker ``slurm/ARRAY.json`` is written, which ends the array's nodes.

    Raises:
        ControlError: records of earlier launchers or of the run are damaged.
    """
    if not run_dir.is_dir():
        return EXIT_OK  # the launcher ended before it made the run's folder
    gone = Attempt(
        job_id=array, hosts=(), exit_code=None, asked=None, iteration=RunAttempts(run_dir).newest_iteration()
    )
    attempts = [attempt for attempt in RunAttempts(run_dir).read() if attempt.job_id == array]
    # The attempt is recorded before the decision, so it counts even if this process dies here.
    RunAttempts(run_dir).add(gone)
    hopeless = why_hopeless([*attempts, gone], max_fruitless)
    if hopeless is None:
        return EXIT_OK
    RunAttempts(run_dir).leave_marker(array, exit_code=ControlError.exit_code, reason=hopeless, is_final=True)
    print(f"array {array} ends: {hopeless}", file=sys.stderr, flush=True)
    return ControlError.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Record that an array's launcher ended without a result (the command of this module). Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path, help="the run's folder: run.dir/run.name")
    parser.add_argument("--array", required=True, help="id of the Slurm array")
    about = "number of launchers in a row without progress after which the array ends"
    parser.add_argument("--max-fruitless", type=int, required=True, help=about)
    chosen = parser.parse_args(arguments)
    try:
        return _count_return(chosen.run_dir, chosen.array, max_fruitless=chosen.max_fruitless)
    except (MegatronFtError, OSError) as error:
        print(f"array {chosen.array}: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, MegatronFtError) else ControlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
