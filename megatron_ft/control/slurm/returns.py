"""Decides whether an array's launcher that returned may start; after several returns without progress it may not.

Slurm starts task 0 again each time that its node has died, or was taken away before the launcher could end. The end of
such a launcher was not seen, so only the progress of the run can be counted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.control.slurm.attempts import add_attempt, leave_marker, newest_iteration, read_attempts
from megatron_ft.errors import EXIT_OK, ControlError, MegatronFtError
from megatron_ft.planning.recovery.job_attempts import Attempt, why_hopeless


def count_return(run_dir: Path, array: str, *, max_fruitless: int) -> int:
    """Record that a launcher has gone; return 0 if another may start, else the exit code of the array.

    The marker ``slurm/ARRAY.json`` then ends the array's nodes.

    Raises:
        ControlError: records of earlier launchers or of the run are damaged.
    """
    if not run_dir.is_dir():
        return EXIT_OK  # it came to nothing that could be counted
    gone = Attempt(job_id=array, hosts=(), exit_code=None, asked=None, iteration=newest_iteration(run_dir))
    attempts = [attempt for attempt in read_attempts(run_dir) if attempt.job_id == array]
    # Counted before the decision, so that a launcher that dies here is not forgotten.
    add_attempt(run_dir, gone)
    hopeless = why_hopeless([*attempts, gone], max_fruitless)
    if hopeless is None:
        return EXIT_OK
    leave_marker(run_dir, array, exit_code=ControlError.exit_code, reason=hopeless, is_final=True)
    print(f"array {array} ends: {hopeless}", file=sys.stderr, flush=True)
    return ControlError.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path, help="the run's folder: run.dir/run.name")
    parser.add_argument("--array", required=True, help="id of the Slurm array")
    parser.add_argument("--max-fruitless", type=int, required=True, help="launchers in a row without progress")
    chosen = parser.parse_args(arguments)
    try:
        return count_return(chosen.run_dir, chosen.array, max_fruitless=chosen.max_fruitless)
    except (MegatronFtError, OSError) as error:
        print(f"array {chosen.array}: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, MegatronFtError) else ControlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
