"""Lets the nodes of a Slurm job requeue the job when its batch host is dead.

With ``--no-kill``, Slurm does not end an allocation when its batch host dies, but keeps it until the time limit
(measured with 22.05). No process in the allocation can then end or continue the job, but the living nodes can request a
requeue. A node does this only when its controller no longer answers.
"""

import random
import threading
from collections.abc import Callable

from megatron_ft.control.slurm import calls

FIRST_SECONDS, LONGEST_SECONDS = 5.0, 60.0
"""The first interval between two queries of Slurm, and the limit to which the interval grows. Each node adds a random
time of up to half the interval, so that not all nodes query at the same time."""
_GROWTH = 1.5


def watch(job_id: str, is_over: threading.Event, *, report: Callable[[str], None]) -> bool:
    """Query Slurm until the batch host no longer belongs to the job, then requeue the job.

    Slurm decides whether the host is dead (``SlurmdTimeout``). The node cannot decide this itself, because the node may
    be cut off from the network. In that case, Slurm does not answer.

    Args:
        report: function that logs a message. Standard output is not used, because the process that reads it may be
            dead.
        is_over: event that is set when another process continues the job or ends it.

    Returns:
        Whether the job was requeued.

    Raises:
        SlurmError: Slurm refuses to requeue the job.
    """
    pause_seconds, complaint = FIRST_SECONDS, ""
    while not is_over.wait(pause_seconds * random.uniform(1.0, 1.5)):
        pause_seconds = min(LONGEST_SECONDS, pause_seconds * _GROWTH)
        try:
            job = calls.view_job(job_id)
        except calls.SlurmError as error:
            if str(error) != complaint:
                complaint = str(error)
                report(f"cannot query Slurm for job {job_id}: {error}")
            continue
        # Another node has requeued the job, or an administrator has ended it.
        if job.state != "RUNNING":
            return False
        if not job.has_batch_host:
            report(f"the batch host {job.batch_host} is dead: requeueing job {job_id}")
            calls.requeue(job_id)
            return True
    return False
