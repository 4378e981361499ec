"""All kinds of records of a run. Ranks and the control plane write records; sinks, reports and tests read them.

Each kind is a frozen dataclass. ``docs/telemetry.md`` shows its docstring and the docstrings of its fields.
``describe()`` returns its line for the terminal and for reports. Sinks need no change for a new kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.formatting import seconds, size
from megatron_ft.membership_events import *  # noqa: F403 (all events are read from here)
from megatron_ft.records import RECORDS as RECORDS
from megatron_ft.records import SCHEMA_VERSION, Note, Record, field_types
from megatron_ft.records import schema as schema
from megatron_ft.serde import JsonValue, decode
from megatron_ft.snapshot_events import *  # noqa: F403

# A job of thousands of ranks would fill the terminal.
_MOST_PROCESSES_NAMED = 8
"""Largest number of ranks for which the terminal shows all process ids, on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(Record):
    """Metrics of one committed iteration. In the JSON record, each metric is a top-level key beside ``iteration``.

    Names, units and meanings are in ``megatron_ft/telemetry/metrics.py``.
    """

    # Every iteration writes such a line, and a sync of each line would delay training.
    durable: ClassVar[bool] = False

    iteration: int
    """Iteration to which the metrics belong, counted from 1."""
    values: dict[str, float]
    """Value of each metric, by name."""

    def to_record(self) -> dict[str, JsonValue]:
        record = super(Metrics, self).to_record()
        values: dict[str, JsonValue] = record.pop("values")
        return record | values

    @classmethod
    def _of(cls, values: Mapping[str, JsonValue]) -> "Record":
        # A misspelled field counts as a metric here; ``telemetry.metrics`` checks the names of metrics.
        own = {name: values[name] for name in ("time_unix_seconds", "iteration") if name in values}
        if "iteration" not in own:
            raise ValueError("metrics.iteration: is required")
        rest = {name: value for name, value in values.items() if name not in own}
        figures = {name: v if type(v) is int else decode(float, v, name) for name, v in rest.items()}
        hints = field_types(cls.kind)
        return cls(values=figures, **{name: decode(hints[name], own[name], f"metrics.{name}") for name in own})

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Record):
    """A job started a new run, or continued an earlier run."""

    run_name: str
    """Name of the run and of its folder."""
    model: str
    """``model.name`` of the configuration."""
    world_size: int
    """Number of ranks of the job."""
    num_nodes: int | None = None
    """Number of nodes of the job."""
    train_iterations: int | None = None
    """Last iteration of the run, from ``training.train_iterations``."""
    device: str | None = None
    """Device of the ranks, e.g. ``cpu`` or ``cuda: NVIDIA H200``."""
    versions: dict[str, str] | None = None
    """Version of each software package, by the name of the package."""
    config_digest: str | None = None
    """Digest of the resolved configuration, hexadecimal."""
    resumed_from: str | None = None
    """Checkpoint or window from which the job continues the run; absent for a new run."""
    resumed_from_iteration: int | None = None
    """Last iteration of the state in ``resumed_from``. Records of earlier jobs about later iterations are no longer
    valid, because the job runs these iterations again."""
    run_dir: str | None = None
    """Path of the run's folder, as rank 0 sees it."""
    peak_tflops: float | None = None
    """Peak rate of one GPU in TFLOP/s, from which the metric ``mfu`` is computed; absent if it is not known."""
    schema_version: int = SCHEMA_VERSION
    """Version of the format of all records in this run."""

    def describe(self) -> Note:
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes and self.num_nodes > 1 else ""
        device = f", {self.device}" if self.device else ""
        resumed = self.resumed_from_iteration
        origin = "" if resumed is None else f", continues after iteration {resumed}"
        folder = "" if self.run_dir is None else f"; folder of the run: {self.run_dir}"
        is_unknown = self.peak_tflops is None and (self.device or "").startswith("cuda")
        no_mfu = "; no MFU, because the GPU's peak is unknown: set telemetry.peak_tflops" if is_unknown else ""
        return Note("info", f"{self.run_name}: {self.model}, {ranks}{nodes}{device}{origin}{folder}{no_mfu}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady(Record):
    """All ranks have built their model and are about to train."""

    seconds: float
    """Seconds that rank 0 took to build its model and to load the state from which the run continues."""
    world_size: int | None = None
    """Number of ranks of the job, which are all ready."""
    process_ids: tuple[int, ...] | None = None
    """Process id of each rank, in the order of ranks."""

    def describe(self) -> Note:
        named = self.process_ids or ()
        ids = " ".join(map(str, named))
        shown = f"; process ids by rank: {ids}" if 0 < len(named) <= _MOST_PROCESSES_NAMED else ""
        return Note("info", f"all ranks ready after {seconds(self.seconds)}{shown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSkipped(Record):
    """An iteration did not change the weights, because the ranks voted to skip its update."""

    iteration: int
    """Iteration that was skipped."""
    reason: str
    """Reason for the skip, e.g. ``non_finite`` or ``loss_spike``."""
    values: dict[str, float] | None = None
    """Metrics on which the decision to skip is based."""

    def describe(self) -> Note:
        return Note("warning", f"iteration {self.iteration} skipped: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Record):
    """Mean loss over validation data."""

    iteration: int
    """Last iteration whose update the evaluated weights contain."""
    loss: float
    """Mean loss per token, in nats."""
    perplexity: float | None = None
    """Perplexity: the exponential of the mean loss."""
    num_tokens: int | None = None
    """Number of validation tokens over which the mean loss was taken."""
    seconds: float | None = None
    """Duration of the evaluation in seconds."""

    def describe(self) -> Note:
        more = "" if self.perplexity is None else f", perplexity {self.perplexity:.5g}"
        return Note("info", f"evaluation after iteration {self.iteration}: loss {self.loss:.4f}{more}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad(Record):
    """Number of tokens that the router sent to each expert in one iteration, summed over all ranks and microbatches."""

    durable: ClassVar[bool] = False

    iteration: int
    """Iteration in which the tokens were counted."""
    layers: tuple[tuple[int, ...], ...]
    """Tokens per expert: one row for each MoE layer, the first layer first."""
    layer_numbers: tuple[int, ...] | None = None
    """Megatron's layer number, counted from 1, for each row of ``layers``; absent if every layer is an MoE layer."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIdle(Record):
    """Time for which pipeline stages waited for messages of adjacent stages (bubbles)."""

    durable: ClassVar[bool] = False

    iteration: int
    """Iteration in which the time was measured."""
    seconds: tuple[float, ...]
    """Waiting time of each pipeline stage in seconds, as a mean over the ranks of the stage."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInForce(Record):
    """A new assignment of expert replicas to ranks takes effect. It is stored in the run's folder ``placements/``."""

    iteration: int
    """First iteration with the new placement."""
    reason: str
    """Reason: ``first``, ``resumed``, ``scripted`` or ``membership``; for a rebalance, a sentence with the value of
    ``gain``."""
    stages: tuple[str, ...]
    """Description of the new placement, one line for each pipeline stage."""
    moved_bytes: int | None = None
    """Bytes of expert weights and optimizer state that moved between ranks."""
    gain: float | None = None
    """Predicted reduction of the number of tokens on each layer's busiest rank, summed over the layers, as a share of
    their number before the change."""
    imbalance_before: float | None = None
    """Largest imbalance of any layer before the change. The imbalance of a layer is the busiest rank's number of tokens
    divided by the mean per rank, both computed from smoothed loads of experts."""
    imbalance_after: float | None = None
    """Largest imbalance of any layer with the new placement, computed like ``imbalance_before``."""
    seconds: float | None = None
    """Seconds for which the change of the placement paused training."""
    single_loss_survival: float | None = None
    """Probability that the job survives the loss of one failure domain if each domain is equally likely to fail. The
    job survives if every expert keeps a replica and enough nodes remain. Absent if there is only one domain, or if the
    job does not continue after a loss."""
    fewest_replicas: int | None = None
    """Number of replicas of the expert with the fewest replicas, over all layers."""
    mean_replicas: float | None = None
    """Mean number of replicas per expert, over all layers."""
    most_replicas: int | None = None
    """Number of replicas of the expert with the most replicas, over all layers."""
    file_error: str | None = None
    """Error because of which the new placement could not be written to a file; training continues."""

    def describe(self) -> Note:
        found = f"new placement from iteration {self.iteration} on: {self.reason}"
        if self.file_error is not None:
            return Note("bad", f"{found}; it could not be written to placements/: {self.file_error}")
        return Note("info", found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """A dense checkpoint was saved: it is complete, its files were verified on disk, and ``latest`` points to it."""

    iteration: int
    """Last iteration whose update the checkpoint contains."""
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
    """A dense checkpoint could not be written; ``latest`` still points to the previous one."""

    iteration: int
    """Last iteration whose update the checkpoint would contain."""
    error: str
    """Text of the error."""
    path: str | None = None
    """Directory of the checkpoint."""

    def describe(self) -> Note:
        return Note("bad", f"checkpoint of iteration {self.iteration} failed: {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded(Record):
    """Training continues from a dense checkpoint."""

    iteration: int
    """Last iteration whose update the checkpoint contains."""
    path: str | None = None
    """Directory of the checkpoint."""
    seconds: float | None = None
    """Seconds for verification and loading."""
    generators_restored: bool | None = None
    """Whether every rank restored its random generators. After a change of layout, they start from the seed instead."""
    differences: tuple[str, ...] = ()
    """Settings in which the checkpoint differs from the job, or a note that settings cannot be compared. Only filled if
    ``checkpoint.load`` names the checkpoint."""

    def describe(self) -> Note:
        text = "; ".join([f"checkpoint of iteration {self.iteration} loaded", *self.differences])
        return Note("warning" if self.differences else "good", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(Record):
    """The loss of an iteration exceeds ``training.loss_spike_factor`` times the median of recent losses."""

    iteration: int
    """Iteration with the spike."""
    loss: float
    """Loss of the iteration, in nats per token."""
    median: float
    """Median of the losses of recent committed iterations, in nats per token."""
    policy: str | None = None
    """Reaction to the spike: ``warn``, ``skip`` or ``stop``."""

    def describe(self) -> Note:
        policy = f" ({self.policy})" if self.policy else ""
        loss = f"loss {self.loss:.4f}, median {self.median:.4f}"
        return Note("warning", f"loss spike in iteration {self.iteration}: {loss}{policy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest(Record):
    """Digests of each rank's weights, master weights and optimizer moments. Equal digests mean equal bits."""

    iteration: int
    """Last iteration whose update the state contains."""
    digests: tuple[str, ...]
    """Hexadecimal digest of each rank, in rank order."""

    def describe(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointHit(Record):
    """A test fault is about to happen in a rank. The record is written just before the fault."""

    action: str
    """Kind of the fault: ``kill``, ``stop``, ``exit``, ``raise`` or ``delay``."""
    phase: str
    """Phase of the iteration in which the fault happens."""
    iteration: int
    """Iteration in which the fault happens."""
    rank: int | None = None
    """Rank in which the fault happens."""
    node: int | None = None
    """Node of ``rank``."""
    failpoint: str | None = None
    """The failpoint, as written in ``testing.failpoints``."""

    def describe(self) -> Note:
        rank = "" if self.rank is None else f", rank {self.rank}"
        where = f"in {self.phase} of iteration {self.iteration}{rank}"
        return Note("warning", f"injected fault: {self.action} {where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointUnfired(Record):
    """A rank ended before it reached one of its failpoints (test faults), so this fault was not injected."""

    failpoint: str
    """The failpoint, as written in ``testing.failpoints``."""
    rank: int | None = None
    """Rank in which the fault was to happen."""
    node: int | None = None
    """Node of ``rank``."""

    def describe(self) -> Note:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return Note("warning", f"a fault was not injected, because the rank ended first: {self.failpoint}{rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRaised(Record):
    """A measured value is beyond the limit of its alert. Training continues."""

    alert: str
    """Name of the alert; the key is ``telemetry.alert_<alert>``."""
    value: float
    """Measured value."""
    limit: float
    """Limit of the alert: the value of ``telemetry.alert_<alert>``."""
    iteration: int
    """Newest iteration of the run."""
    rank: int | None = None
    """Rank to which ``value`` belongs, by its number in the present membership. Absent if ``value`` belongs to no
    single rank."""
    node: int | None = None
    """Node of ``rank``; the number of a node never changes."""

    def describe(self) -> Note:
        rank = "the slowest rank" if self.rank is None else f"rank {self.rank} on node {self.node}"
        return Note("bad", f"alert: {_alert(self, rank)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCleared(Record):
    """The measured value of an alert is within its limit again."""

    alert: str
    """Name of the alert; the key is ``telemetry.alert_<alert>``."""
    value: float
    """Measured value."""
    limit: float
    """Limit of the alert: the value of ``telemetry.alert_<alert>``."""
    iteration: int
    """Newest iteration of the run."""

    def describe(self) -> Note:
        return Note("good", f"alert cleared: {_alert(self)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecorded(Record):
    """A rank has recorded iterations with ``torch.profiler`` (``telemetry.profile_first_iteration``)."""

    rank: int
    """Rank that recorded the trace."""
    first_iteration: int
    """First recorded iteration."""
    last_iteration: int
    """Last recorded iteration. Its recording may be incomplete if the membership changed or the ranks ended."""
    path: str
    """Path of the trace file."""
    error: str | None = None
    """Error because of which the trace file could not be written; absent if it was written."""

    def describe(self) -> Note:
        what = f"trace of rank {self.rank}, iterations {self.first_iteration} to {self.last_iteration}"
        if self.error is not None:
            return Note("warning", f"{what} could not be written to {self.path}: {self.error}")
        return Note("info", f"{what}: {self.path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Record):
    """Someone requested that the run stops. The run first finishes the present iteration."""

    source: str
    """Name of the signal that requested the stop, or another source of the request."""
    iteration: int | None = None
    """Iteration in progress when the stop was requested."""

    def describe(self) -> Note:
        return Note("warning", f"stop requested ({self.source}): finishing the iteration")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Record):
    """The job ended as planned."""

    exit_code: int
    """Exit code of the run; ``errors.EXIT_CODES`` has the meanings."""
    reason: str
    """Reason for the end, in one sentence."""
    iteration: int | None = None
    """Last iteration that was reported."""
    is_complete: bool = True
    """Whether the run is complete. If not, a later job can continue it."""

    def describe(self) -> Note:
        what = "run finished" if self.is_complete else "job finished, a later job can continue the run"
        return Note("good", f"{what}: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped(Record):
    """The run ended before its last iteration, because it was stopped or failed."""

    exit_code: int
    """Exit code of the run; ``errors.EXIT_CODES`` has the meanings."""
    reason: str
    """Reason for the end, in one sentence."""
    iteration: int | None = None
    """Last iteration that was reported."""

    def describe(self) -> Note:
        return Note("bad", f"run stopped: {self.reason} (exit code {self.exit_code})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed(Record):
    """A sink (destination of records) can no longer write records. All other sinks continue."""

    sink: str
    """Name of the sink."""
    error: str
    """Text of the error."""

    def describe(self) -> Note:
        return Note("bad", f"sink {self.sink} no longer accepts records: {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRecovered(Record):
    """A sink (destination of records) that had failed can write records again."""

    sink: str
    """Name of the sink."""
    num_lost_records: int
    """Number of records that the sink lost between its failure and its recovery."""

    def describe(self) -> Note:
        return Note("good", f"sink {self.sink} works again; lost records: {self.num_lost_records}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRefused(Record):
    """A process reported an invalid record, so no sink received it. This event contains the record's text."""

    problem: str
    """Reason why the record is invalid."""
    content: str
    """Text of the invalid record."""

    def describe(self) -> Note:
        return Note("bad", f"invalid record: {self.problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTruncated(Record):
    """The last line of a log file was incomplete because of a crash, and was removed."""

    file: str
    """Name of the log file."""
    num_dropped_bytes: int
    """Number of bytes that were removed."""

    def describe(self) -> Note:
        return Note(
            "warning", f"the last line of {self.file} was incomplete; {self.num_dropped_bytes} bytes were cut off"
        )


def _alert(record: AlertRaised | AlertCleared, rank: str = "the slowest rank") -> str:
    value, limit = record.value, record.limit
    figures = {
        "single_loss_survival": f"the job survives the loss of one failure domain with probability {value:.3f}",
        "stall_share": f"training spends {100 * value:.1f} % of the iteration time waiting for captures of snapshots",
        "windows_behind": f"no snapshot window was committed while {value:.1f} were due (peers or storage are slow)",
        "free_disk_share": f"{100 * value:.1f} % of the file system of the run's folder is free",
        "slowest_rank_over_median": f"{rank} needs {value:.1f} times as long as the median rank for the same work",
        "lost_token_share": f"expert updates by {value:.2%} of the tokens are lost, or would be lost in a recovery",
    }
    return f"{figures.get(record.alert, record.alert)} (telemetry.alert_{record.alert}={limit:g})"
