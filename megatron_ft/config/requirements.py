"""Values that each kind of recovery requires. The checks, ``dry_run`` and ``tools/can_recover`` use the same table."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.checks.primitives import show
from megatron_ft.config.job import JobConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A value that a key must have, or must not have."""

    key: str
    """Dotted key, e.g. ``launch.mode``."""
    value: Any = None
    is_excluded: bool = False
    """Whether ``value`` is forbidden instead of required."""
    instead: str = ""
    """Description of the allowed values, if ``value`` is forbidden."""
    reason: str = ""
    """Reason for the requirement, as the end of a message."""

    def is_met(self, config: JobConfig) -> bool:
        """Return whether ``config`` meets the requirement."""
        return bool(value_of(config, self.key) == self.value) != self.is_excluded

    @property
    def demand(self) -> str:
        """The value that the key must have, as ``must be false``."""
        return f"must be {self.instead if self.is_excluded else show(self.value)}"

    def constraint(self, feature: str) -> str:
        """Return the end of an error message. ``feature`` is the key and value that has this requirement."""
        text = f"{self.demand} with {feature}"
        return f"{text}: {self.reason}" if self.reason else text


_NO_CUDA = Requirement(
    key="training.device",
    value="cuda",
    is_excluded=True,
    instead="cpu",
    reason="this version cannot form NCCL communicators again after the loss of a rank",
)

REPLICAS: tuple[Requirement, ...] = (
    Requirement(key="launch.mode", value="local"),
    Requirement(key="launch.master_port", value=0),
    Requirement(key="parallel.pipeline_model_parallel_size", value=1),
    Requirement(key="parallel.tensor_model_parallel_size", value=1),
    Requirement(key="parallel.context_parallel_size", value=1),
    Requirement(key="parallel.use_distributed_optimizer", value=False),
    Requirement(key="placement.schedule", value=[]),
    Requirement(key="placement.state_copies"),
    Requirement(
        key="placement.algorithm",
        is_excluded=True,
        instead="given",
        reason="only replicas on other nodes keep the experts of a lost node; choose e.g. placement=overlap_search",
    ),
    _NO_CUDA,
)
"""Requirements for continuing on fewer nodes: every rank holds all dense state, and experts have replicas."""

KEPT_LAYOUT: tuple[Requirement, ...] = (
    Requirement(key="launch.mode", value="local"),
    Requirement(key="launch.master_port", value=0),
    Requirement(key="nodes.max_nodes", reason="a job that keeps its layout does not grow"),
    Requirement(
        key="placement.algorithm",
        reason="with replica slots a job continues on fewer ranks and does not keep its layout",
    ),
    Requirement(
        key="snapshot.policy",
        is_excluded=True,
        instead="given",
        reason="a stage that loses a rank restarts from a window; choose e.g. snapshot=sparse_window",
    ),
    _NO_CUDA,
)
"""Requirements for continuing in the same layout: other processes replace lost ranks and replay the pipeline stage."""


def unmet(config: JobConfig, requirements: Iterable[Requirement]) -> list[Requirement]:
    """Return the requirements that ``config`` does not meet."""
    return [requirement for requirement in requirements if not requirement.is_met(config)]


def value_of(config: JobConfig, key: str) -> Any:
    """Return the value of a dotted key."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)
