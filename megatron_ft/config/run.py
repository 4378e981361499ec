"""Name and folder of a run (group ``run``)."""

from dataclasses import dataclass


@dataclass
class RunConfig:
    """Name and folder of a run, and whether it resumes an earlier one."""

    dir: str = "runs"
    """Folder that holds all runs."""
    name: str | None = None
    """Folder of this run in ``run.dir``. null makes a name from the model and a number (``moe_tiny-001``)."""
    resume: str = "never"
    """``never``: the run must not exist yet. ``must``: the run must exist and hold a checkpoint. ``auto``: continue
    from the newest usable state of the run, or start at iteration 0 if the run has saved none."""
    start_over: bool = False
    """Allow ``run.resume=auto`` to start at iteration 0 although the run has saved state, if none of it is usable. If
    false, such a start is refused, and the message lists all state with the reason why it is not usable."""
