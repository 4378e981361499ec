"""Values that each kind of recovery requires: one table for the checks, ``dry_run`` and ``tools/can_recover``."""

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
    """Whether ``value`` is the one that the key must not have."""
    instead: str = ""
    """Constraint of the key in words, for an excluded value."""
    reason: str = ""
    """Why, as the end of a message."""

    def is_met(self, config: JobConfig) -> bool:
        """Whether ``config`` meets it."""
        return bool(value_of(config, self.key) == self.value) != self.is_excluded

    def constraint(self, feature: str) -> str:
        """The end of an error message; ``feature`` is the key and value that needs this."""
        text = f"must be {self.instead if self.is_excluded else show(self.value)} with {feature}"
        return f"{text}: {self.reason}" if self.reason else text


_NO_CUDA = Requirement(
    key="training.device",
    value="cuda",
    is_excluded=True,
    instead="cpu",
    reason="after the loss of a rank NCCL communicators cannot be formed again yet",
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
        reason="a lost node's experts survive only as replicas on other nodes, e.g. placement=overlap_search",
    ),
    _NO_CUDA,
)
"""Continuing on fewer nodes: every rank holds all dense state, and experts have replicas."""

KEPT_LAYOUT: tuple[Requirement, ...] = (
    Requirement(key="launch.mode", value="local"),
    Requirement(key="launch.master_port", value=0),
    Requirement(key="launch.max_nodes", reason="a job that keeps its layout does not grow"),
    Requirement(
        key="placement.algorithm",
        reason="with replica slots a job continues on fewer ranks and does not keep its layout",
    ),
    Requirement(
        key="snapshot.policy",
        is_excluded=True,
        instead="given",
        reason="a stage that loses a rank goes back to a window, e.g. snapshot=sparse_window",
    ),
    _NO_CUDA,
)
"""Continuing in the same layout: other processes take the places of lost ranks and replay their stage."""


def unmet(config: JobConfig, requirements: Iterable[Requirement]) -> list[Requirement]:
    """Requirements that ``config`` does not meet."""
    return [requirement for requirement in requirements if not requirement.is_met(config)]


def value_of(config: JobConfig, key: str) -> Any:
    """Value of a dotted key."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)
