"""Name and folder of a run (group ``run``)."""

from dataclasses import dataclass


@dataclass
class RunConfig:
    """Name and folder of a run, and whether an existing run is resumed."""

    dir: str = "runs"
    """Folder that contains the folders of all runs."""
    name: str | None = None
    """Name of the run and of its folder in ``run.dir``. null: the model's name and a number (``moe_tiny-001``)."""
    resume: str = "never"
    """``never``: the run must not exist yet. ``must``: the run must exist and have saved state, from which it
    continues. ``auto``: it continues from its newest usable state, or starts at iteration 0 if it has saved none."""
    start_over: bool = False
    """Allow ``run.resume=auto`` to start at iteration 0 although the run has saved state, if none of this state is
    usable. If false, the job is refused with a list of all saved states and why they are not usable."""
