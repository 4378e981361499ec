"""Every record of a run: ranks and the control plane report them; sinks, reports and tests read them.

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
    """Iteration of the figures, counted from 1."""
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
    """A run, or another attempt of it, starts."""

    run_name: str
    """Name of the run and of its folder."""
    model: str
    """``model.name`` of the configuration."""
    world_size: int
    """Number of ranks of the job."""
    num_nodes: int | None = None
    """Number of nodes of the job."""
    train_iterations: int | None = None
    """Last iteration of the run, as configured."""
    device: str | None = None
    """Device of the ranks, e.g. ``cpu`` or ``cuda: NVIDIA H200``."""
    versions: dict[str, str] | None = None
    """Software name to version."""
    config_digest: str | None = None
    """Digest of the resolved configuration, hexadecimal."""
    resumed_from: str | None = None
    """Checkpoint or window from which the run continues; absent for a new run."""
    resumed_from_iteration: int | None = None
    """Last iteration of that state. Later iterations of older attempts are void."""
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
    """All ranks have built their model and are about to train."""

    seconds: float
    """Seconds that rank 0 took to build its model and to load the state from which the run continues."""
    world_size: int | None = None
    """Number of ranks that are ready."""
    process_ids: tuple[int, ...] | None = None
    """Process of each rank, numbered by its node's operating system."""

    def describe(self) -> Note:
        named = self.process_ids or ()
        shown = f"; process ids by rank: {' '.join(map(str, named))}" if 0 < len(named) <= _MOST_PROCESSES_NAMED else ""
        return Note("info", f"all ranks ready after {seconds(self.seconds)}{shown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSkipped(Record):
    """The vote did not commit an iteration: weights did not change."""

    iteration: int
    """Iteration that was skipped."""
    reason: str
    """Reason, e.g. ``non_finite`` or ``loss_spike``."""
    values: dict[str, float] | None = None
    """Figures on which the decision is based."""

    def describe(self) -> Note:
        return Note("warning", f"iteration {self.iteration} skipped: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Record):
    """Mean loss over validation data."""

    iteration: int
    """Newest iteration of the evaluated weights."""
    loss: float
    """Mean loss per token, in nats."""
    num_tokens: int | None = None
    """Number of tokens of the mean."""
    seconds: float | None = None
    """Duration of the evaluation in seconds."""

    def describe(self) -> Note:
        return Note("info", f"evaluation after iteration {self.iteration}: loss {self.loss:.4f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad(Record):
    """Tokens that the router gave each expert, over all ranks and microbatches of an iteration."""

    durable: ClassVar[bool] = False

    iteration: int
    """Iteration in which the tokens were counted."""
    layers: tuple[tuple[int, ...], ...]
    """Tokens per expert, one row per MoE layer from the bottom up."""
    layer_numbers: tuple[int, ...] | None = None
    """Megatron's number (from 1) of the layer of each row; absent if every layer is an MoE layer."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInForce(Record):
    """The placement of expert replicas changes; the plan is in ``placements/`` of the run."""

    iteration: int
    """First iteration with this placement."""
    reason: str
    """``first``, ``resumed``, ``scripted``, ``membership``, or the gain of a rebalance."""
    stages: tuple[str, ...]
    """One line per pipeline stage."""
    moved_bytes: int | None = None
    """Bytes of expert weights and optimizer state that moved."""
    gain: float | None = None
    """Predicted saving, as a share of the busiest ranks' tokens."""
    imbalance_before: float | None = None
    """Tokens of the busiest rank over the mean rank, by smoothed loads, in the worst layer, before the change."""
    imbalance_after: float | None = None
    """The same ratio after the change."""
    seconds: float | None = None
    """Seconds for which the change paused training."""
    single_loss_survival: float | None = None
    """Probability that the job survives the loss of one failure domain, all being equally likely: every expert keeps a
    copy, and enough nodes remain. Absent if there is one domain, or if a lost node ends the job."""
    fewest_replicas: int | None = None
    """Number of copies of the expert with the fewest, over all layers."""
    mean_replicas: float | None = None
    """Mean number of copies of an expert."""
    most_replicas: int | None = None
    """Number of copies of the expert with the most."""
    file_error: str | None = None
    """Why the file of the placement could not be written; training continues without it."""

    def describe(self) -> Note:
        found = f"new placement from iteration {self.iteration} on: {self.reason}"
        if self.file_error is not None:
            return Note("bad", f"{found}; its file in placements/ could not be written: {self.file_error}")
        return Note("info", found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """A dense checkpoint is complete, verified on disk, and ``latest`` points to it."""

    iteration: int
    """Newest iteration in the checkpoint."""
    path: str | None = None
    """Directory of the checkpoint."""
    num_bytes: int | None = None
    """Bytes of all files of the checkpoint."""
    seconds: float | None = None
    """Seconds from the start of the save until the checkpoint was complete."""
    blocked_seconds: float | None = None
    """Seconds for which the save paused training."""

    def describe(self) -> Note:
        parts = [] if self.num_bytes is None else [size(self.num_bytes)]
        parts += [] if self.seconds is None else [f"in {seconds(self.seconds)}"]
        cost = f": {' '.join(parts)}" if parts else ""
        return Note("good", f"checkpoint of iteration {self.iteration} saved{cost}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Record):
    """A dense checkpoint could not be written; ``latest`` did not change."""

    iteration: int
    """Iteration of the checkpoint."""
    error: str
    """The error."""
    path: str | None = None
    """Directory of the checkpoint."""

    def describe(self) -> Note:
        return Note("bad", f"checkpoint of iteration {self.iteration} failed: {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded(Record):
    """Training continues from a dense checkpoint."""

    iteration: int
    """Newest iteration in the checkpoint."""
    path: str | None = None
    """Directory of the checkpoint."""
    seconds: float | None = None
    """Seconds for verification and loading."""
    generators_restored: bool | None = None
    """Whether every rank restored its random generators; with another layout they start from the seed."""
    differences: tuple[str, ...] = ()
    """Differences between checkpoint and job, if ``checkpoint.load`` names it; or that they cannot be compared."""

    def describe(self) -> Note:
        text = "; ".join([f"checkpoint of iteration {self.iteration} loaded", *self.differences])
        return Note("warning" if self.differences else "good", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(Record):
    """A loss is far above the recent ones."""

    iteration: int
    """Iteration of the loss."""
    loss: float
    """The loss, in nats per token."""
    median: float
    """Median of recent committed losses, in nats per token."""
    policy: str | None = None
    """The reaction: ``warn``, ``skip`` or ``stop``."""

    def describe(self) -> Note:
        policy = f" ({self.policy})" if self.policy else ""
        loss = f"loss {self.loss:.4f}, median {self.median:.4f}"
        return Note("warning", f"loss spike in iteration {self.iteration}: {loss}{policy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest(Record):
    """Digests of all weights, master weights and moments; equal digests mean equal bits."""

    iteration: int
    """Newest iteration of the state."""
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
    """Phase in which the fault happens."""
    iteration: int
    """Iteration in which the fault happens."""
    rank: int | None = None
    """Rank in which the fault happens."""
    node: int | None = None
    """Node of that rank."""
    failpoint: str | None = None
    """The failpoint as configured."""

    def describe(self) -> Note:
        rank = "" if self.rank is None else f", rank {self.rank}"
        where = f"in {self.phase} of iteration {self.iteration}{rank}"
        return Note("warning", f"injected fault: {self.action} {where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointUnfired(Record):
    """A rank ended before one of its failpoints was reached: no fault was injected."""

    failpoint: str
    """The failpoint as configured."""
    rank: int | None = None
    """Rank of the failpoint."""
    node: int | None = None
    """Node of that rank."""

    def describe(self) -> Note:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return Note("warning", f"a fault was never injected: {self.failpoint}{rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRaised(Record):
    """A figure passed its limit. Training continues."""

    alert: str
    """Name of the alert; the key is ``telemetry.alert_<alert>``."""
    value: float
    """The figure."""
    limit: float
    """The limit, which is the value of that key."""
    iteration: int
    """Newest iteration of the run."""
    rank: int | None = None
    """The rank with that figure, if it is the figure of one rank; numbered among the ranks that train now."""
    node: int | None = None
    """The node of that rank; node numbers never change."""

    def describe(self) -> Note:
        rank = "the slowest rank" if self.rank is None else f"rank {self.rank} on node {self.node}"
        return Note("bad", f"alert: {_alert(self, rank)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCleared(Record):
    """A figure is within its limit again."""

    alert: str
    """Name of the alert; the key is ``telemetry.alert_<alert>``."""
    value: float
    """The figure."""
    limit: float
    """The limit, which is the value of that key."""
    iteration: int
    """Newest iteration of the run."""

    def describe(self) -> Note:
        return Note("good", f"alert cleared: {_alert(self)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Record):
    """The run was requested to stop after the current iteration."""

    source: str
    """The signal's name, or another origin of the request."""
    iteration: int | None = None
    """Iteration that ran at that time."""

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
    """A sink can no longer write records; the other sinks continue."""

    sink: str
    """Name of the sink."""
    error: str
    """The error."""

    def describe(self) -> Note:
        return Note("bad", f"sink {self.sink} no longer accepts records: {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRecovered(Record):
    """A failed sink can write records again."""

    sink: str
    """Name of the sink."""
    num_lost_records: int
    """Number of records that were lost meanwhile."""

    def describe(self) -> Note:
        lost = f"{self.num_lost_records} records lost" if self.num_lost_records else "nothing lost"
        return Note("good", f"{self.sink} works again, {lost}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRefused(Record):
    """An invalid record was reported; its content is kept here."""

    problem: str
    """The reason for the refusal."""
    content: str
    """The report, as text."""

    def describe(self) -> Note:
        return Note("bad", f"invalid record: {self.problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTruncated(Record):
    """A log file ended in a partial line because of a crash; that line was cut off."""

    file: str
    """Name of the file."""
    num_dropped_bytes: int
    """Number of bytes that were cut off."""

    def describe(self) -> Note:
        return Note(
            "warning", f"the last line of {self.file} was incomplete; {self.num_dropped_bytes} bytes were cut off"
        )


def _alert(record: AlertRaised | AlertCleared, rank: str = "the slowest rank") -> str:
    value, limit = record.value, record.limit
    figures = {
        "single_loss_survival": f"the job survives the loss of one failure domain with probability {value:.3f}",
        "stall_share": f"training spends {100 * value:.1f} % of its time waiting for captures",
        "windows_behind": f"{value:.1f} windows are due but not committed (peers or storage are too slow)",
        "free_disk_share": f"{100 * value:.1f} % of the run's file system is free",
        "slowest_rank_over_median": f"{rank} takes {value:.1f} times as long as the median rank for the same work",
    }
    return f"{figures.get(record.alert, record.alert)} (telemetry.alert_{record.alert}={limit:g})"
