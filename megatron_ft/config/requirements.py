"""Values that keys must have for each kind of recovery. The checks, ``dry_run`` and ``tools/can_recover`` use them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megatron_ft.config.checks.primitives import show
from megatron_ft.config.job import JobConfig


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A change of one key that ``dry_run`` proposes, so that a recovery becomes possible."""

    key: str
    value: Any
    option: str = ""
    """Override to print instead of ``key=value``, e.g. ``placement=overlap_search``; empty to print ``key=value``."""

    def __str__(self) -> str:
        return self.option or f"{self.key}={show(self.value)}"

    def apply(self, config: JobConfig) -> JobConfig:
        """Return ``config`` with the changed key."""
        group, _, name = self.key.partition(".")
        return replace(config, **{group: replace(getattr(config, group), **{name: self.value})})


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A value that a key must have, or must not have, for a kind of recovery."""

    key: str
    """Dotted key, e.g. ``launch.mode``."""
    value: Any = None
    is_excluded: bool = False
    """Whether the requirement forbids ``value`` instead of requiring it."""
    instead: str = ""
    """Description of the allowed values, e.g. ``given`` if null is forbidden; empty if only ``value`` is allowed."""
    reason: str = ""
    """Reason for the requirement, for error messages."""
    unless: Callable[[JobConfig], bool] = lambda config: False
    """Function that returns whether a configuration is exempt from the requirement, because of its other keys."""
    remedy: KeyChange | None = None
    """Key change that meets the requirement and keeps model, layout and device; None if ``dry_run`` proposes none."""

    def is_met(self, config: JobConfig) -> bool:
        """Return whether ``config`` meets the requirement."""
        return bool(value_of(config, self.key) == self.value) != self.is_excluded or self.unless(config)

    @property
    def demand(self) -> str:
        """Return the requirement as a clause such as ``must be false``."""
        return f"must be {self.instead or show(self.value)}"

    def constraint(self, feature: str) -> str:
        """Return the requirement as text for an error message. The setting ``feature`` (``key=value``) imposes it."""
        text = f"{self.demand} with {feature}"
        return f"{text}: {self.reason}" if self.reason else text

    @classmethod
    def unmet(cls, config: JobConfig, requirements: "Iterable[Requirement]") -> "list[Requirement]":
        """Return the requirements that ``config`` does not meet."""
        return [requirement for requirement in requirements if not requirement.is_met(config)]

    @classmethod
    def unmet_values(cls, config: JobConfig, requirements: "Iterable[Requirement]") -> list[str]:
        """Return the setting (``key=value``) of each key whose requirement ``config`` does not meet."""
        keys = [requirement.key for requirement in cls.unmet(config, requirements)]
        return [f"{key}={show(value_of(config, key))}" for key in keys]


_AGENTS = (
    Requirement(
        key="launch.mode",
        value="local",
        reason="other launchers start no agents, and end all ranks when one is lost",
    ),
    Requirement(
        key="launch.master_port",
        value=0,
        reason="each change of the nodes needs a rendezvous store on a new port, so the port cannot be fixed",
    ),
)

_NO_ABORT = "this version cannot abort NCCL communicators, so no process can continue after a rank was lost"


_WINDOWS = KeyChange(
    "snapshot.policy",
    {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"},
    "snapshot=sparse_window",
)


_PROCESSES = KeyChange("recovery.keep_processes", None)


def _windows(reason: str, *, unless: Callable[[JobConfig], bool] = lambda config: False) -> Requirement:
    """Make the requirement that windows (snapshots) are captured. ``reason`` states why."""
    return Requirement(
        key="snapshot.policy",
        is_excluded=True,
        instead="given",
        reason=f"{reason}; choose e.g. snapshot=sparse_window",
        unless=unless,
        remedy=_WINDOWS,
    )


def _processes(reason: str, *, on_cuda: str = "") -> tuple[Requirement, ...]:
    """Make the requirements of a recovery in which living ranks continue and are not restarted. ``reason`` states why
    a restart is not possible. ``on_cuda`` is appended to the reason why CUDA is refused."""
    return (
        Requirement(
            key="recovery.keep_processes",
            value=False,
            is_excluded=True,
            instead="true or null",
            reason=reason,
            remedy=_PROCESSES,
        ),
        Requirement(
            key="training.device", value="cuda", is_excluded=True, instead="cpu", reason=f"{_NO_ABORT}{on_cuda}"
        ),
    )


def _has_copies_of_shards(config: JobConfig) -> bool:
    return (config.placement.state_copies or 0) >= 2


def _shards_optimizer(config: JobConfig) -> bool:
    return config.parallel.use_distributed_optimizer


_USED_COPIES = Requirement(
    key="placement.state_copies",
    instead="null (or a number with parallel.use_distributed_optimizer=true)",
    reason="without parallel.use_distributed_optimizer=true, no recovery uses these copies",
    unless=_shards_optimizer,
    remedy=KeyChange("placement.state_copies", None),
)

REPLICAS: tuple[Requirement, ...] = (
    *_AGENTS,
    Requirement(
        key="parallel.context_parallel_size",
        value=1,
        reason="context parallelism needs Transformer Engine, and so a GPU",
    ),
    Requirement(
        key="parallel.use_distributed_optimizer",
        value=True,
        is_excluded=True,
        instead="false (or placement.state_copies at least 2)",
        reason="only one rank has each shard of the optimizer state, unless other nodes keep copies of it",
        unless=_has_copies_of_shards,
        remedy=KeyChange("placement.state_copies", 2),
    ),
    Requirement(
        key="placement.schedule", value=[], reason="a schedule has no placement for the ranks that remain after a loss"
    ),
    _USED_COPIES,
    Requirement(
        key="placement.algorithm",
        is_excluded=True,
        instead="given",
        reason="experts of a lost node survive only as replicas on other nodes; choose e.g. placement=overlap_search",
        remedy=KeyChange(
            "placement.algorithm",
            {"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"},
            "placement=overlap_search",
        ),
    ),
    *_processes(
        "expert replicas are lost when processes end; to restart ranks, set recovery.keep_layout=true",
        on_cuda="; to restart all ranks after a loss, set recovery.keep_layout=true",
    ),
)
"""Required values of keys for a job that continues on fewer nodes. Experts must have replicas. Non-expert state must be
on every rank, or its shards must have copies on several nodes."""

_REPLACED_NODES = (
    *_AGENTS,
    Requirement(key="nodes.max_nodes", reason="a job that keeps its layout cannot use additional nodes"),
    _USED_COPIES,
)

KEPT_LAYOUT: tuple[Requirement, ...] = (
    *_REPLACED_NODES,
    _windows("all ranks restart from a snapshot after a loss", unless=lambda config: config.keeps_processes),
    Requirement(
        key="recovery.keep_processes",
        value=True,
        is_excluded=True,
        instead="false or null",
        reason=f"{_NO_ABORT}; with training.device=cuda all ranks start again",
        unless=lambda config: config.training.device != "cuda",
    ),
    Requirement(
        key="recovery.max_restarts",
        value=0,
        is_excluded=True,
        instead="above 0",
        reason="all ranks start again after a loss (recovery.keep_processes is false, or null on CUDA)",
        # Without rollback, the check of ``recovery.strategies`` names the key that must change.
        unless=lambda config: config.keeps_processes or not config.recovery.may_use("rollback"),
        remedy=KeyChange("recovery.max_restarts", 3),
    ),
)
"""Required values of keys for ``recovery.keep_layout``: other nodes replace the lost nodes in the same layout."""

LIVING_PLACES: tuple[Requirement, ...] = (
    *_processes("ranks that are not lost keep their state in their processes"),
    *_REPLACED_NODES,
)
"""Required values of keys for a kept layout in which joining ranks receive lost state from living ranks."""

REPLAYS: tuple[Requirement, ...] = (
    *LIVING_PLACES,
    _windows("a replay starts from a snapshot"),
)
"""Required values of keys for a localized replay: in a kept layout, only stages that lost a rank replay."""

ROLLBACK: tuple[Requirement, ...] = (_windows("a rollback loads a snapshot"),)
"""Required values of keys for a rollback: all ranks go back to a window."""

REQUIREMENTS: Mapping[str, tuple[Requirement, ...]] = MappingProxyType(
    {"living_state": REPLICAS, "localized_replay": REPLAYS, "rollback": ROLLBACK, "checkpoint": ()}
)
"""Requirements of each recovery strategy that ``recovery.strategies`` can name."""


def value_of(config: JobConfig, key: str) -> Any:
    """Return the value of a dotted key such as ``launch.mode``."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)
