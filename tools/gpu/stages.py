"""Lists the stages of each call of ``tools/gpu_day.py`` by priority. If time is short, the last stages do not run."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage of one call of ``tools/gpu_day.py``. Each stage runs in its own process."""

    name: str
    entry: str
    """Function of the stage as ``module:function``. It reports its results to its argument, a ``Day`` object."""
    seconds: float
    """Time limit of the stage in seconds."""
    about: str
    """Text about what the stage checks or measures, shown in the table of results."""


_FIRST = (
    Stage(
        name="facts",
        entry="tools.gpu.facts:run",
        seconds=90,
        about="versions, imports, speed of copies and matrix products",
    ),
    Stage(
        name="training",
        entry="tools.gpu.training:run",
        seconds=180,
        about="training gives the same losses as on the CPU",
    ),
    Stage(
        name="recovery",
        entry="tools.gpu.recovery:run",
        seconds=150,
        about="after kills, training gives the bits of an undisturbed run",
    ),
    Stage(
        name="dispatch",
        entry="tools.gpu.suites:run_dispatch",
        seconds=190,
        about="kernels can be built and are correct",
    ),
    Stage(
        name="fp8",
        entry="tools.gpu.suites:run_fp8",
        seconds=120,
        about="FP8 products and the kernel of scaled AdamW are correct",
    ),
    Stage(name="snapshots", entry="tools.gpu.suites:run_snapshots", seconds=90, about="copier, windows, upstream log"),
    Stage(name="sanitizer", entry="tools.gpu.sanitizer:run", seconds=180, about="kernels access only their memory"),
)
_NCCL = (
    Stage(name="smoke", entry="tools.gpu.collectives:run", seconds=120, about="several ranks on one GPU"),
    Stage(
        name="abort", entry="tools.gpu.abort:run", seconds=200, about="a killed and a stopped rank during a collective"
    ),
    Stage(name="parallel", entry="tools.gpu.layouts:run", seconds=260, about="layouts give the losses of one rank"),
)
_TE = (
    Stage(
        name="engine", entry="tools.gpu.suites:run_engine", seconds=400, about="Transformer Engine's layers are correct"
    ),
)
_SPEED = tuple(
    Stage(name=name, entry="tools.gpu.claims:run", seconds=seconds, about="measures the claim named like this stage")
    for name, seconds in (
        ("gpu-copy-bandwidth", 60.0),
        ("gpu-dispatch", 180.0),
        ("gpu-synchronisations", 60.0),
        ("gpu-deterministic", 90.0),
        ("gpu-loop-overhead", 90.0),
        ("gpu-reform", 240.0),
        ("gpu-recovery-bits", 300.0),
        ("gpu-snapshot-stall", 240.0),
    )
)
CALLS: dict[str, Sequence[Stage]] = {"first": _FIRST, "nccl": _NCCL, "speed": _SPEED, "te": _TE}
