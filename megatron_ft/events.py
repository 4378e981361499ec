"""Every record of a run: what ranks and the control plane report, and what sinks, reports and tests read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.membership_events import (
    ControllerGoesOn,
    ControllerReplaced,
    ControllerWaits,
    MembershipChanged,
    NodeLost,
    NodeStartFailed,
    RankFailed,
    RanksRestarted,
    RecoveryDecided,
    RunFolderMissing,
    StageRecovery,
)
from megatron_ft.records import RECORDS, SCHEMA_VERSION, Record, field_types, schema
from megatron_ft.snapshot_events import (
    RecoveryChosen,
    SnapshotPlanned,
    SnapshotProblem,
    UpstreamLogFull,
    UpstreamLogPlanned,
    WindowCommitted,
    WindowDelayed,
    WindowReplayed,
)
from megatron_ft.strict_json import JsonValue, decode, to_number

__all__ = [
    "RECORDS",
    "ControllerGoesOn",
    "ControllerReplaced",
    "ControllerWaits",
    "MembershipChanged",
    "NodeLost",
    "NodeStartFailed",
    "RankFailed",
    "RanksRestarted",
    "Record",
    "RecoveryChosen",
    "RecoveryDecided",
    "RunFolderMissing",
    "SnapshotPlanned",
    "SnapshotProblem",
    "StageRecovery",
    "UpstreamLogFull",
    "UpstreamLogPlanned",
    "WindowCommitted",
    "WindowDelayed",
    "WindowReplayed",
    "schema",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(Record):
    """Figures of one committed iteration; in JSON they lie beside ``iteration``, without ``values``.

    Names, units and meanings are in ``megatron_ft/telemetry/metrics.py``.
    """

    durable: ClassVar[bool] = False

    iteration: int
    """Iteration the figures belong to, counted from 1."""
    values: dict[str, float]
    """Metric name to figure."""

    def to_record(self) -> dict[str, JsonValue]:
        record = super(Metrics, self).to_record()
        values: dict[str, JsonValue] = record.pop("values")
        return record | values

    @classmethod
    def _of(cls, values: Mapping[str, JsonValue]) -> "Record":
        own = {name: values[name] for name in ("time_unix_seconds", "iteration") if name in values}
        if "iteration" not in own:
            raise ValueError("metrics.iteration: is required")
        figures = {name: to_number(value, name) for name, value in values.items() if name not in own}
        hints = field_types(cls.kind)
        return cls(values=figures, **{name: decode(hints[name], own[name], f"metrics.{name}") for name in own})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Record):
    """A run, or another attempt of it, begins."""

    run_name: str
    """Name of the run: its folder's."""
    model: str
    """``model.name`` of the configuration."""
    world_size: int
    """Ranks of the job."""
    num_nodes: int | None = None
    """Nodes of the job."""
    train_iterations: int | None = None
    """Iteration the run ends at."""
    device: str | None = None
    """Where it computes, e.g. ``cpu`` or ``cuda: NVIDIA H200``."""
    versions: dict[str, str] | None = None
    """Software name to version."""
    config_digest: str | None = None
    """Digest of the resolved configuration, hexadecimal."""
    resumed_from: str | None = None
    """Checkpoint it continues from; absent when it starts afresh."""
    resumed_from_iteration: int | None = None
    """Last iteration that checkpoint contains. Later iterations reported by older attempts are void."""
    schema_version: int = SCHEMA_VERSION
    """Version of these records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady(Record):
    """All ranks have built their part and are about to train."""

    seconds: float
    """Seconds rank 0 took to build its part and to load what the run continues from."""
    world_size: int | None = None
    """Ranks that are ready."""
    process_ids: tuple[int, ...] | None = None
    """Process of each rank, numbered by its node's operating system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSkipped(Record):
    """The vote did not commit an iteration: weights stay as they were."""

    iteration: int
    """Iteration that was skipped."""
    reason: str
    """Why, e.g. ``non_finite`` or ``loss_spike``."""
    values: dict[str, float] | None = None
    """Figures the decision was taken on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Record):
    """Loss over validation data."""

    iteration: int
    """Evaluated after this iteration."""
    loss: float
    """Mean loss per token, in nats."""
    num_tokens: int | None = None
    """Tokens the mean is taken over."""
    seconds: float | None = None
    """Seconds it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad(Record):
    """How many tokens the router gave each expert, over all ranks and microbatches of an iteration."""

    durable: ClassVar[bool] = False

    iteration: int
    """Iteration counted."""
    layers: tuple[tuple[int, ...], ...]
    """Tokens per expert, one row per mixture layer from the bottom up."""
    layer_numbers: tuple[int, ...] | None = None
    """Megatron's number (from 1) of each row's layer; absent when every layer is a mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInForce(Record):
    """Where expert replicas sit from an iteration on; the plan itself lies in ``placements/`` of the run."""

    iteration: int
    """First iteration it holds for."""
    reason: str
    """``first``, ``resumed``, ``scripted``, ``membership``, or what a rebalance gains."""
    stages: tuple[str, ...]
    """One line per pipeline stage."""
    moved_bytes: int | None = None
    """Bytes of expert weights and optimizer state that moved."""
    gain: float | None = None
    """Share of the busiest ranks' tokens that the change is predicted to save."""
    imbalance_before: float | None = None
    """Busiest rank over mean rank under the smoothed loads, worst layer, before the change."""
    imbalance_after: float | None = None
    """The same after it."""
    seconds: float | None = None
    """Seconds training stood still for it."""
    single_loss_survival: float | None = None
    """Probability that the job goes on in its ranks when one failure domain is lost, each being as likely: every expert
    has a copy left, and enough nodes; absent where there is one domain, or a lost node ends the job."""
    fewest_replicas: int | None = None
    """Copies of the expert that has fewest, over all layers."""
    mean_replicas: float | None = None
    """Copies of an expert on average."""
    most_replicas: int | None = None
    """Copies of the expert that has most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """A dense checkpoint is complete, verified on disk, and ``latest`` points to it."""

    iteration: int
    """Last iteration it contains."""
    path: str | None = None
    """Where it lies."""
    num_bytes: int | None = None
    """Bytes of all its files."""
    seconds: float | None = None
    """Seconds from its start until it was complete."""
    blocked_seconds: float | None = None
    """Seconds of these that training stood still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Record):
    """A dense checkpoint could not be written; ``latest`` did not move."""

    iteration: int
    """Iteration it would have contained."""
    error: str
    """What went wrong."""
    path: str | None = None
    """Where it would have lain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded(Record):
    """Training continues from a dense checkpoint."""

    iteration: int
    """Last iteration it contains."""
    path: str | None = None
    """Where it lies."""
    seconds: float | None = None
    """Seconds of verifying and loading."""
    generators_restored: bool | None = None
    """Whether every rank got its random generators back; on another layout they start from the seed again."""
    differences: tuple[str, ...] = ()
    """In what it differs from the job, where it was named by ``checkpoint.load`` or cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(Record):
    """A loss far above the recent ones."""

    iteration: int
    """Iteration of the loss."""
    loss: float
    """That loss, in nats per token."""
    median: float
    """Median of the recent committed losses, in nats per token."""
    policy: str | None = None
    """What is done about it: ``warn``, ``skip`` or ``stop``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest(Record):
    """Digests of all weights, master weights and moments: equal digests, equal bits."""

    iteration: int
    """State after this iteration."""
    digests: tuple[str, ...]
    """One per rank, in rank order; hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointHit(Record):
    """An injected fault is about to happen."""

    action: str
    """``kill``, ``stop``, ``exit``, ``raise`` or ``delay``."""
    phase: str
    """Phase of the iteration it sits in."""
    iteration: int
    """Iteration it happens in."""
    rank: int | None = None
    """Rank it happens to."""
    node: int | None = None
    """Node of that rank."""
    failpoint: str | None = None
    """The fault as it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointUnfired(Record):
    """A fault was armed in a rank that came to its end without it: nothing was injected."""

    failpoint: str
    """Its spec."""
    rank: int | None = None
    """Rank it was armed in."""
    node: int | None = None
    """Its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRaised(Record):
    """A figure went beyond its limit: somebody should look. Training goes on."""

    alert: str
    """Which: the key is ``telemetry.alert_<alert>``."""
    value: float
    """The figure."""
    limit: float
    """What the key says."""
    iteration: int
    """Newest iteration of the run."""
    rank: int | None = None
    """Whose figure it is, where it is one rank's: its number among those that train now."""
    node: int | None = None
    """The node of that rank, by its number since the job began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCleared(Record):
    """A figure that was beyond its limit is back."""

    alert: str
    """Which: the key is ``telemetry.alert_<alert>``."""
    value: float
    """The figure."""
    limit: float
    """What the key says."""
    iteration: int
    """Newest iteration of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Record):
    """Somebody asked the run to stop after the current iteration."""

    source: str
    """Who: a signal's name, or what asked."""
    iteration: int | None = None
    """Iteration running at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Record):
    """The run reached its end."""

    exit_code: int
    """Exit code of the run, see ``errors.EXIT_CODES``."""
    reason: str
    """In words."""
    iteration: int | None = None
    """Last iteration reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped(Record):
    """The run ended before its end: stopped, or failed."""

    exit_code: int
    """Exit code of the run, see ``errors.EXIT_CODES``."""
    reason: str
    """In words."""
    iteration: int | None = None
    """Last iteration reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed(Record):
    """A sink cannot take records; the others go on."""

    sink: str
    """Name of the sink."""
    error: str
    """What went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRecovered(Record):
    """A sink that had failed takes records again."""

    sink: str
    """Name of the sink."""
    num_lost_records: int
    """Records it lost meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRefused(Record):
    """Something was reported that is no valid record; kept here so that nothing is lost."""

    problem: str
    """What is wrong with it."""
    content: str
    """What was reported, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHealed(Record):
    """A log file ended in half a line (a crash); the half line was cut off."""

    file: str
    """Name of the file."""
    num_dropped_bytes: int
    """Length of what was cut off."""
