"""Every record of a run: what ranks and the control plane report, and what sinks, reports and tests read.

An event is a frozen dataclass: its docstring and those of its fields are its row in ``docs/telemetry.md``, and
``describe()`` is its line on the terminal and in a report. A sink needs no change for a new event.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.formatting import seconds, size
from megatron_ft.membership_events import *  # noqa: F403 (all events are read from here)
from megatron_ft.records import RECORDS as RECORDS
from megatron_ft.records import SCHEMA_VERSION, Note, Record, field_types
from megatron_ft.records import schema as schema
from megatron_ft.snapshot_events import *  # noqa: F403
from megatron_ft.strict_json import JsonValue, decode, to_number

# A job of thousands of ranks would fill the terminal.
_MOST_PROCESSES_NAMED = 8
"""Limit of processes named on one line of the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(Record):
    """Figures of one committed iteration; in JSON they are top-level keys beside ``iteration``.

    Names, units and meanings are in ``megatron_ft/telemetry/metrics.py``.
    """

    # One line per iteration: fsync would cost each iteration a wait for the disk.
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
        # Every other name is a metric, so a misspelled field is taken for one; ``telemetry.metrics`` checks names.
        own = {name: values[name] for name in ("time_unix_seconds", "iteration") if name in values}
        if "iteration" not in own:
            raise ValueError("metrics.iteration: is required")
        figures = {name: to_number(value, name) for name, value in values.items() if name not in own}
        hints = field_types(cls.kind)
        return cls(values=figures, **{name: decode(hints[name], own[name], f"metrics.{name}") for name in own})

    def describe(self) -> None:
        return None


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
    """Device it computes on, e.g. ``cpu`` or ``cuda: NVIDIA H200``."""
    versions: dict[str, str] | None = None
    """Software name to version."""
    config_digest: str | None = None
    """Digest of the resolved configuration, hexadecimal."""
    resumed_from: str | None = None
    """Checkpoint or window it continues from; absent for a new run."""
    resumed_from_iteration: int | None = None
    """Last iteration of that state. Later iterations that older attempts reported are void."""
    schema_version: int = SCHEMA_VERSION
    """Version of these records."""

    def describe(self) -> Note:
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes and self.num_nodes > 1 else ""
        device = f", {self.device}" if self.device else ""
        resumed = self.resumed_from_iteration
        origin = "" if resumed is None else f", continues after iteration {resumed}"
        return Note("info", f"{self.run_name}: {self.model}, {ranks}{nodes}{device}{origin}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady(Record):
    """All ranks have built their part and are about to train."""

    seconds: float
    """Seconds rank 0 took to build its part and to load what the run continues from."""
    world_size: int | None = None
    """Ranks that are ready."""
    process_ids: tuple[int, ...] | None = None
    """Process of each rank, numbered by its node's operating system."""

    def describe(self) -> Note:
        named = self.process_ids or ()
        shown = f"; process ids by rank: {' '.join(map(str, named))}" if 0 < len(named) <= _MOST_PROCESSES_NAMED else ""
        return Note("info", f"all ranks ready after {seconds(self.seconds)}{shown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSkipped(Record):
    """The vote did not commit an iteration: weights stay as they were."""

    iteration: int
    """Iteration that was skipped."""
    reason: str
    """Reason, e.g. ``non_finite`` or ``loss_spike``."""
    values: dict[str, float] | None = None
    """Figures that the decision was based on."""

    def describe(self) -> Note:
        return Note("warning", f"iteration {self.iteration} skipped: {self.reason}")


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

    def describe(self) -> Note:
        return Note("info", f"evaluation after iteration {self.iteration}: loss {self.loss:.4f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad(Record):
    """Tokens that the router gave each expert, over all ranks and microbatches of an iteration."""

    durable: ClassVar[bool] = False

    iteration: int
    """Iteration counted."""
    layers: tuple[tuple[int, ...], ...]
    """Tokens per expert, one row per mixture layer from the bottom up."""
    layer_numbers: tuple[int, ...] | None = None
    """Megatron's number (from 1) of each row's layer; absent when every layer is a mixture."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInForce(Record):
    """The placement of expert replicas from an iteration on; the plan is in ``placements/`` of the run."""

    iteration: int
    """First iteration it holds for."""
    reason: str
    """``first``, ``resumed``, ``scripted``, ``membership``, or the gain of a rebalance."""
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
    """Seconds that training was paused for it."""
    single_loss_survival: float | None = None
    """Probability that the job survives the loss of one failure domain, each being equally likely: every expert keeps a
    copy, and enough nodes are left; absent where there is one domain, or a lost node ends the job."""
    fewest_replicas: int | None = None
    """Copies of the expert that has fewest, over all layers."""
    mean_replicas: float | None = None
    """Copies of an expert on average."""
    most_replicas: int | None = None
    """Copies of the expert that has most."""

    def describe(self) -> Note:
        return Note("info", f"placement from iteration {self.iteration} on: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """A dense checkpoint is complete, verified on disk, and ``latest`` points to it."""

    iteration: int
    """Last iteration it contains."""
    path: str | None = None
    """Its directory."""
    num_bytes: int | None = None
    """Bytes of all its files."""
    seconds: float | None = None
    """Seconds from its start until it was complete."""
    blocked_seconds: float | None = None
    """Seconds of these that training was paused."""

    def describe(self) -> Note:
        parts = [] if self.num_bytes is None else [size(self.num_bytes)]
        parts += [] if self.seconds is None else [f"in {seconds(self.seconds)}"]
        cost = f": {' '.join(parts)}" if parts else ""
        return Note("good", f"checkpoint of iteration {self.iteration} saved{cost}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Record):
    """A dense checkpoint could not be written; ``latest`` did not move."""

    iteration: int
    """Iteration it would have contained."""
    error: str
    """The error."""
    path: str | None = None
    """The directory it was written to."""

    def describe(self) -> Note:
        return Note("bad", f"checkpoint of iteration {self.iteration} failed: {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded(Record):
    """Training continues from a dense checkpoint."""

    iteration: int
    """Last iteration it contains."""
    path: str | None = None
    """Its directory."""
    seconds: float | None = None
    """Seconds of verifying and loading."""
    generators_restored: bool | None = None
    """Whether every rank restored its random generators; at another layout they start from the seed."""
    differences: tuple[str, ...] = ()
    """Differences from the job, where ``checkpoint.load`` names it or they cannot be compared."""

    def describe(self) -> Note:
        text = "; ".join([f"checkpoint of iteration {self.iteration} loaded", *self.differences])
        return Note("warning" if self.differences else "good", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(Record):
    """A loss far above the recent ones."""

    iteration: int
    """Iteration of the loss."""
    loss: float
    """The loss, in nats per token."""
    median: float
    """Median of the recent committed losses, in nats per token."""
    policy: str | None = None
    """The reaction: ``warn``, ``skip`` or ``stop``."""

    def describe(self) -> Note:
        policy = f" ({self.policy})" if self.policy else ""
        loss = f"loss {self.loss:.4f}, median {self.median:.4f}"
        return Note("warning", f"loss spike in iteration {self.iteration}: {loss}{policy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest(Record):
    """Digests of all weights, master weights and moments: equal digests, equal bits."""

    iteration: int
    """State after this iteration."""
    digests: tuple[str, ...]
    """One per rank, in rank order; hexadecimal."""

    def describe(self) -> None:
        return None


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
    """The fault as it was requested."""

    def describe(self) -> Note:
        rank = "" if self.rank is None else f", rank {self.rank}"
        where = f"in {self.phase} of iteration {self.iteration}{rank}"
        return Note("warning", f"injected fault: {self.action} {where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointUnfired(Record):
    """A fault was armed in a rank that ended before it: nothing was injected."""

    failpoint: str
    """The fault as it was requested."""
    rank: int | None = None
    """Rank it was armed in."""
    node: int | None = None
    """Its node."""

    def describe(self) -> Note:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return Note("warning", f"fault never injected: {self.failpoint}{rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRaised(Record):
    """A figure passed its limit. Training continues."""

    alert: str
    """Its name: the key is ``telemetry.alert_<alert>``."""
    value: float
    """The figure."""
    limit: float
    """The limit of that key."""
    iteration: int
    """Newest iteration of the run."""
    rank: int | None = None
    """The rank with that figure, where it is one rank's: its number among those that train now."""
    node: int | None = None
    """The node of that rank, by its number since the job began."""

    def describe(self) -> Note:
        rank = "the slowest rank" if self.rank is None else f"rank {self.rank} on node {self.node}"
        return Note("bad", f"alert: {_alert(self, rank)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCleared(Record):
    """A figure that had passed its limit is back."""

    alert: str
    """Its name: the key is ``telemetry.alert_<alert>``."""
    value: float
    """The figure."""
    limit: float
    """The limit of that key."""
    iteration: int
    """Newest iteration of the run."""

    def describe(self) -> Note:
        return Note("good", f"alert cleared: {_alert(self)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Record):
    """The run was requested to stop after the current iteration."""

    source: str
    """The signal's name, or what requested it."""
    iteration: int | None = None
    """Iteration running at that time."""

    def describe(self) -> Note:
        return Note("warning", f"stop requested ({self.source}): finishing the iteration")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Record):
    """The run reached its end."""

    exit_code: int
    """Exit code of the run, see ``errors.EXIT_CODES``."""
    reason: str
    """One sentence."""
    iteration: int | None = None
    """Last iteration reported."""

    def describe(self) -> Note:
        return Note("good", f"run finished: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped(Record):
    """The run ended early: stopped, or failed."""

    exit_code: int
    """Exit code of the run, see ``errors.EXIT_CODES``."""
    reason: str
    """One sentence."""
    iteration: int | None = None
    """Last iteration reported."""

    def describe(self) -> Note:
        return Note("bad", f"run stopped: {self.reason} (exit code {self.exit_code})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed(Record):
    """A sink cannot take records; the others continue."""

    sink: str
    """Name of the sink."""
    error: str
    """The error."""

    def describe(self) -> Note:
        return Note("bad", f"{self.sink} takes no records: {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRecovered(Record):
    """A sink that had failed takes records again."""

    sink: str
    """Name of the sink."""
    num_lost_records: int
    """Records it lost meanwhile."""

    def describe(self) -> Note:
        lost = f"{self.num_lost_records} records lost" if self.num_lost_records else "nothing lost"
        return Note("good", f"{self.sink} works again, {lost}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRefused(Record):
    """An invalid record was reported; its content is kept here."""

    problem: str
    """The reason it is refused."""
    content: str
    """The report, as text."""

    def describe(self) -> Note:
        return Note("bad", f"invalid record: {self.problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTruncated(Record):
    """A log file ended in half a line (a crash); the half line was cut off."""

    file: str
    """Name of the file."""
    num_dropped_bytes: int
    """Length of what was cut off."""

    def describe(self) -> Note:
        return Note("warning", f"{self.file} ended in half a line; {self.num_dropped_bytes} bytes were cut off")


def _alert(record: AlertRaised | AlertCleared, rank: str = "the slowest rank") -> str:
    value, limit = record.value, record.limit
    figures = {
        "single_loss_survival": f"the job survives the loss of one failure domain with probability {value:.3f}",
        "stall_share": f"training waits for captures for {100 * value:.1f} % of its iterations",
        "windows_behind": f"{value:.1f} windows are due and none was committed: peers or storage are behind",
        "free_disk_share": f"{100 * value:.1f} % of the run's file system are free",
        "slowest_rank_over_median": f"{rank} takes {value:.1f} times as long as the median rank for the same work",
    }
    return f"{figures.get(record.alert, record.alert)} (telemetry.alert_{record.alert}={limit:g})"
