"""One run's name and place (group ``run``)."""

from dataclasses import dataclass


@dataclass
class RunConfig:
    """Directory of a run and whether it may continue an older one."""

    dir: str = "runs"
    """Folder that holds all runs."""
    name: str | None = None
    """Folder of this run; null numbers one from the model's name (``moe_tiny-001``)."""
    resume: str = "never"
    """``never``: an existing ``run.name`` is refused. ``must``: it has to exist and hold a checkpoint.
    ``auto``: continue from the newest state it has saved that can be used; start where it has saved none."""
    start_over: bool = False
    """With ``run.resume=auto``: start at iteration 0 although the run has saved state, where none of it can be used.
    Without it such a start is refused, and the refusal says why each piece was not used."""
