"""Name and folder of a run (group ``run``)."""

from dataclasses import dataclass


@dataclass
class RunConfig:
    """Name and folder of a run, and whether it resumes an earlier one."""

    dir: str = "runs"
    """Folder that holds all runs."""
    name: str | None = None
    """Folder of this run in ``run.dir``; null makes one from the model's name and a number (``moe_tiny-001``)."""
    resume: str = "never"
    """``never``: the run must not exist yet. ``must``: it must exist and hold a checkpoint. ``auto``: continue from its
    newest usable state, or start from scratch if it has saved none."""
    start_over: bool = False
    """Allow ``run.resume=auto`` to start at iteration 0 if the run has saved state but none of it is usable. Otherwise
    such a start is refused, with the reason for every piece of state."""
