"""Requeues a Slurm job whose batch host is dead: the last thing that a node does when its controller does not answer.

With ``--no-kill`` Slurm keeps an allocation whose batch host has died, and nothing of the job is left in it that could
end it or continue: measured with 22.05, until its time limit. The nodes that live can ask for its return.
"""

import random
import threading
from collections.abc import Callable

from megatron_ft.control.slurm import calls

FIRST_SECONDS, LONGEST_SECONDS = 5.0, 60.0
"""Interval between two queries: at first, and in the end. Each node waits up to half of it longer, for all ask."""
_GROWTH = 1.5


def watch(job_id: str, is_over: threading.Event, *, report: Callable[[str], None]) -> bool:
    """Ask Slurm until it takes the batch host from the job, then requeue the job.

    Slurm's judgement is waited for (``SlurmdTimeout``): a partitioned node cannot know which node has died, and gets
    no answer meanwhile.

    Args:
        report: takes messages for a log: the reader of this process's output may be dead.
        is_over: set when another process continues the job, or ends it.

    Returns:
        Whether the job was requeued.

    Raises:
        SlurmError: Slurm refuses to requeue it.
    """
    pause_seconds, complaint = FIRST_SECONDS, ""
    while not is_over.wait(pause_seconds * random.uniform(1.0, 1.5)):
        pause_seconds = min(LONGEST_SECONDS, pause_seconds * _GROWTH)
        try:
            job = calls.view_job(job_id)
        except calls.SlurmError as error:
            if str(error) != complaint:
                complaint = str(error)
                report(f"Slurm cannot be asked for job {job_id}: {error}")
            continue
        # Another node has requeued it, or an operator has ended it.
        if job.state != "RUNNING":
            return False
        if not job.has_batch_host:
            report(f"batch host {job.batch_host} is dead: job {job_id} is requeued")
            calls.requeue(job_id)
            return True
    return False
