"""Describes how all ranks agree on an iteration: its samples, one ballot of each rank, the vote, and the decision.

A vote is complete when every rank has contributed its ballot; before that, the iteration can be rolled back. The vote
contains the scalars of the iteration that an exact replay needs.
"""

import math
import operator
import statistics
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import reduce
from typing import Any

from megatron_ft.config.batch_size import BatchSchedule
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError, TrainingStopped
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.topology import Topology

# An iteration reads ``global_batch_size`` samples in ``num_real_microbatches`` microbatches, which are assigned to the
# data-parallel ranks in turn. Every rank runs the same number of microbatches, because expert all-to-all is collective;
# *padding microbatches*, which contribute nothing, fill up the last round.


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Distribution of one iteration's microbatches over ``data_parallel_size`` ranks."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    schedule: BatchSchedule | None = None
    """Number of samples of each iteration if the batch size grows; None if it is always ``global_batch_size``."""
    num_microbatches_multiple: int = 1
    """Number that must divide the number of microbatches per rank: the number of pipeline stages if the schedule is
    interleaved, otherwise 1."""

    @classmethod
    def of(cls, config: JobConfig, topology: Topology) -> "BatchPlan":
        """Plan the batch of a job with the layout ``topology``."""
        interleaved = topology.virtual_pipeline_model_parallel_size > 1
        return cls(
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_size=topology.data_parallel_size,
            schedule=BatchSchedule.of(config.training) if config.training.rampup_batch_size else None,
            num_microbatches_multiple=topology.pipeline_model_parallel_size if interleaved else 1,
        )

    def validate(self) -> None:
        """Check that the global batch size is a multiple of the microbatch size. Raise ConfigError if not."""
        if self.global_batch_size % self.micro_batch_size:
            raise ConfigError.of(
                "training.global_batch_size",
                self.global_batch_size,
                f"must be a multiple of training.micro_batch_size={self.micro_batch_size}",
            )

    @property
    def num_real_microbatches(self) -> int:
        """Number of microbatches that contain samples and not padding, over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of each rank, including padding."""
        per_rank = -(-self.num_real_microbatches // self.data_parallel_size)
        # Megatron's interleaved schedule asserts a multiple of the number of stages.
        return -(-per_rank // self.num_microbatches_multiple) * self.num_microbatches_multiple

    @property
    def num_padding_microbatches(self) -> int:
        """Number of microbatches without samples, over all ranks."""
        return self.num_microbatches * self.data_parallel_size - self.num_real_microbatches

    def first_sample(self, iteration: int, data_parallel_rank: int, microbatch: int) -> int | None:
        """Return the index of the first sample in a rank's microbatch; None for padding. Iterations start at 1."""
        position = microbatch_position(self.data_parallel_size, data_parallel_rank, microbatch)
        # Padding is at the end of the iteration, so the samples before it are the same for every number of ranks.
        if position >= self.num_real_microbatches:
            return None
        return self.samples_before(iteration) + position * self.micro_batch_size

    def at(self, iteration: int) -> "BatchPlan":
        """Return the plan with the batch size of ``iteration``. Iterations are counted from 1."""
        size = self.global_batch_size if self.schedule is None else self.schedule.batch_size(iteration)
        return self if size == self.global_batch_size else replace(self, global_batch_size=size)

    def samples_before(self, iteration: int) -> int:
        """Return the number of samples of all iterations before ``iteration``. Iterations are counted from 1."""
        if self.schedule is None:
            return (iteration - 1) * self.global_batch_size
        return self.schedule.samples_before(iteration)


def microbatch_position(data_parallel_size: int, data_parallel_rank: int, microbatch: int) -> int:
    """Return the position, from 0, of a rank's microbatch among the microbatches of all ranks in the iteration."""
    # Ranks get microbatches in turn, so padding is in the last microbatches of ranks and not on the last ranks.
    return microbatch * data_parallel_size + data_parallel_rank


# All ranks compute these fields from the same reduced values. Any difference means that replicas have diverged.
_SAME_ON_ALL_RANKS = ("generation", "iteration", "grad_norm", "loss_scale")
_FORMER_FIELDS = ("committed_window",)
"""Fields that only votes of earlier versions contain. They are ignored when a vote is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """State of the snapshot windows. A ballot has the state on one rank; a vote combines the states on all ranks.

    Fields named ``..._windows`` are bit masks. Bit i stands for the i-th oldest window. All ranks number windows alike.
    """

    replicated_windows: int = 0
    """Windows that this node and its peers (nodes with copies) have in full. In a vote, those that all ranks report."""
    given_up_windows: int = 0
    """Windows that at least one peer will never receive. In a vote, windows that any rank reports."""
    has_free_buffer: int = 1
    """1 if a buffer for the next window is free now or after the next commit; in a vote, 1 if all ranks report 1."""
    unwritten_start: int = -1
    """Start iteration of the newest window whose file could not be written; -1 if every file was written. In a vote,
    the largest value of all ranks."""


WINDOW_FIELDS = tuple(field.name for field in fields(WindowReport))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot(WindowReport):
    """A rank's contribution to the vote of one iteration.

    Sums are over the rank's microbatches without padding; they are 0 on ranks with padding only. ``found_inf``,
    ``stop_requested`` (the run should end) and ``change_requested`` (nodes should join or leave) are 0 or 1.
    """

    generation: int
    iteration: int
    found_inf: int
    grad_norm: float
    loss_scale: float
    loss_sum: float
    num_tokens: int
    aux_loss_sum: float
    z_loss_sum: float
    stop_requested: int = 0
    change_requested: int = 0
    pass_seconds: float = 0.0
    """Typical seconds of one layer's forward pass on this rank (all ranks do equal work); 0 if unknown. It is not part
    of ``Vote``."""
    idle_seconds: float = 0.0
    """Time for which this rank waited for messages of adjacent pipeline stages; 0 if unknown. It is not part of
    ``Vote``."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_bytes: int = 0
    """Largest memory use of this rank since its process began. ``MemoryUse`` describes this field, ``allocated_bytes``
    and ``reserved_bytes``. All three are 0 if unknown, and not part of ``Vote``."""

    def to_row(self) -> tuple[float, ...]:
        """Return the fields as numbers that float64 represents exactly."""
        # The tuple is not built from a generator: CPython would cache up to 2,000 such tuples, which looks like a leak.
        return (*map(float, astuple(self)),)

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "Ballot":
        values: dict[str, Any] = {
            field.name: int(value) if field.type is int else value
            for field, value in zip(fields(cls), row, strict=True)
        }
        return cls(**values)


BALLOT_FIELDS = len(fields(Ballot))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Largest memory use of any rank in bytes, for each field separately."""

    allocated_bytes: int
    """Memory of tensors on a GPU; on a CPU, resident memory of the process."""
    reserved_bytes: int
    """Memory that PyTorch has taken from the GPU, including unused blocks; 0 on a CPU."""
    peak_bytes: int
    """Largest value of ``allocated_bytes`` since the process began."""
    peak_rank: int
    """Rank with the largest ``peak_bytes``."""

    @classmethod
    def largest(cls, ballots: Sequence[Ballot]) -> "MemoryUse":
        """Return the largest memory use in the ballots of all ranks. ``ballots`` are in rank order."""
        peaks = [ballot.peak_bytes for ballot in ballots]
        return cls(
            allocated_bytes=max(ballot.allocated_bytes for ballot in ballots),
            reserved_bytes=max(ballot.reserved_bytes for ballot in ballots),
            peak_bytes=max(peaks),
            peak_rank=peaks.index(max(peaks)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Measured values of each rank in one iteration; empty if the ballots of the iteration are not known."""

    pass_seconds: tuple[float, ...] = ()
    """Typical seconds of a forward pass of one layer on each rank, measured by ``StragglerTimer``."""
    idle_seconds: tuple[float, ...] = ()
    """Seconds for which each rank waited for messages of adjacent pipeline stages."""
    memory: MemoryUse | None = None
    """Largest memory use of any rank."""

    @classmethod
    def of(cls, ballots: Sequence[Ballot]) -> "RankFigures":
        """Return the times and memory use from the ballots of all ranks. ``ballots`` are in rank order."""
        return cls(
            pass_seconds=tuple(ballot.pass_seconds for ballot in ballots),
            idle_seconds=tuple(ballot.idle_seconds for ballot in ballots),
            memory=MemoryUse.largest(ballots),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote(WindowReport):
    """Result of the vote of one iteration, the same on all ranks.

    Losses are means over the iteration: ``loss`` over tokens, ``aux_loss`` and ``z_loss`` over microbatches and MoE
    layers, without their coefficients. ``grad_norm`` is the norm of the gradient before clipping. With
    ``stop_requested``, this iteration is the last one of the run. With ``change_requested``, it is the last one of its
    membership (the ranks that train together).
    """

    generation: int
    iteration: int
    found_inf: bool
    grad_norm: float
    clip_coefficient: float
    loss_scale: float
    loss: float
    num_tokens: int
    aux_loss: float
    z_loss: float
    stop_requested: bool = False
    change_requested: bool = False

    def to_record(self) -> dict[str, object]:
        """Convert to a JSON object, from which ``from_record`` restores the vote bit for bit."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, object]) -> "Vote":
        return cls(**{name: value for name, value in record.items() if name not in _FORMER_FIELDS})  # type: ignore[arg-type]

    @classmethod
    def of(cls, ballots: Sequence[Ballot], *, clip_grad: float, num_moe_losses: int) -> "Vote":
        """Compute the vote from the ballots of all ranks.

        Args:
            ballots: ballots of all ranks, in rank order.
            num_moe_losses: number of auxiliary losses in the sums: microbatches without padding times MoE layers.

        Raises:
            TrainingStopped: a value that must be bitwise equal on all ranks differs between them.
        """
        for name in _SAME_ON_ALL_RANKS:
            _check_agreement(name, [getattr(ballot, name) for ballot in ballots])
        # Sums are in rank order, because votes must be equal on all ranks and float addition is not associative.
        first = ballots[0]
        num_tokens = sum(ballot.num_tokens for ballot in ballots)
        per_moe_loss = 1.0 / num_moe_losses if num_moe_losses else 0.0
        return cls(
            generation=first.generation,
            iteration=first.iteration,
            found_inf=any(ballot.found_inf for ballot in ballots),
            grad_norm=first.grad_norm,
            clip_coefficient=clip_coefficient(clip_grad, first.grad_norm),
            loss_scale=first.loss_scale,
            loss=sum(ballot.loss_sum for ballot in ballots) / num_tokens if num_tokens else math.nan,
            num_tokens=num_tokens,
            aux_loss=sum(ballot.aux_loss_sum for ballot in ballots) * per_moe_loss,
            z_loss=sum(ballot.z_loss_sum for ballot in ballots) * per_moe_loss,
            stop_requested=any(ballot.stop_requested for ballot in ballots),
            change_requested=any(ballot.change_requested for ballot in ballots),
            # A restart needs the parts of a window from all ranks. So a window is given up if one rank can never
            # complete it, and one rank without a free buffer delays the next window on all ranks.
            replicated_windows=reduce(operator.and_, [ballot.replicated_windows for ballot in ballots]),
            given_up_windows=reduce(operator.or_, [ballot.given_up_windows for ballot in ballots]),
            has_free_buffer=min(ballot.has_free_buffer for ballot in ballots),
            unwritten_start=max(ballot.unwritten_start for ballot in ballots),
        )


def clip_coefficient(clip_grad: float, grad_norm: float) -> float:
    """Return the factor by which clipping scales gradients (Megatron's formula); 1 if clipping is off or not needed."""
    if clip_grad <= 0.0:
        return 1.0
    # This is Megatron's constant; with another one, the results would differ from Megatron's in some bits.
    return min(1.0, clip_grad / (grad_norm + 1.0e-6))


def _check_agreement(name: str, values: Sequence[float]) -> None:
    # NaN has many bit patterns, and devices may produce different ones, so all NaN values count as equal.
    bits = [struct.pack("<d", value) if not math.isnan(value) else b"nan" for value in values]
    for rank, other in enumerate(bits):
        if other != bits[0]:
            raise TrainingStopped(
                f"commit vote of all ranks: {name} must be the same on every rank, but is {values[0]!r} on rank 0 and "
                f"{values[rank]!r} on rank {rank}. A device has computed a wrong result, or ranks are at different "
                "iterations"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Action that follows from the vote of an iteration, and the reason for the action."""

    action: str
    """``commit``, ``skip`` (no update) or ``stop``."""
    reason: str = ""
    spike: bool = False
    """Whether the loss is a spike. The action can be ``commit``, ``skip`` or ``stop`` even then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Losses of earlier committed iterations, oldest first, and number of skipped iterations since the last commit."""

    losses: tuple[float, ...] = ()
    num_consecutive_skips: int = 0
    tokens: TokenLedger | None = None
    """Numbers of processed and lost tokens of each expert; None if windows have always contained all experts."""

    @property
    def median_loss(self) -> float:
        """Median of the losses of recent committed iterations; NaN if there are none."""
        return statistics.median(self.losses) if self.losses else math.nan

    def after(
        self,
        vote: Vote,
        decision: Decision,
        window: int,
        loads: Sequence[Sequence[int]] | None = None,
        repaid: Sequence[Sequence[int]] | None = None,
    ) -> "History":
        """Return the history after ``decision``, with only the newest ``window`` losses.

        Args:
            loads: number of tokens of each expert in the iteration, [MoE layer][expert]; None if they are not counted.
            repaid: number of these tokens that experts processed beyond their usual capacity, to make up for lost
                tokens; None if there are none.
        """
        # Losses of skipped iterations are left out: spikes would raise the median, and hide later spikes.
        if decision.action != "commit":
            return replace(self, num_consecutive_skips=self.num_consecutive_skips + 1)
        tokens = self.tokens
        if loads is not None:
            tokens = (TokenLedger.empty(loads) if tokens is None else tokens).after(loads, repaid)
        return History(losses=(*self.losses, vote.loss)[-window:], num_consecutive_skips=0, tokens=tokens)

    def after_loss(self, lost: Sequence[Sequence[int]]) -> "History":
        """Return the history after a recovery: ``lost`` [MoE layer][expert] is added to the numbers of lost tokens."""
        return replace(self, tokens=(self.tokens or TokenLedger.empty(lost)).after_loss(lost))

    def owed(self, layers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return, for each layer number, the tokens that each expert has not repaid: its lost tokens minus the
        additional tokens that it has processed since. ``layers`` are the MoE layers whose tokens are counted."""
        return {} if self.tokens is None else dict(zip(layers, self.tokens.owed(), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values. The result has no entry ``tokens`` if ``tokens`` is None."""
        return {name: value for name, value in asdict(self).items() if name != "tokens" or value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "History":
        """Read the result of ``to_json``."""
        tokens = content.get("tokens")
        return cls(
            losses=tuple(content["losses"]),
            num_consecutive_skips=content["num_consecutive_skips"],
            tokens=None if tokens is None else TokenLedger.from_json(tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPolicy:
    """Rules by which each rank makes its ``Decision`` from an iteration's vote. Fields are keys of ``training``."""

    non_finite_policy: str
    max_consecutive_skips: int
    loss_spike_factor: float | None
    loss_spike_window: int
    loss_spike_policy: str
    loss_scaling: bool
    """Whether the loss scale is dynamic: an overflow then skips the update and does not stop the run."""

    @classmethod
    def of(cls, config: JobConfig) -> "CommitPolicy":
        training = config.training
        return cls(
            non_finite_policy=training.non_finite_policy,
            max_consecutive_skips=training.max_consecutive_skips,
            loss_spike_factor=training.loss_spike_factor,
            loss_spike_window=training.loss_spike_window,
            loss_spike_policy=training.loss_spike_policy,
            loss_scaling=config.precision.params_dtype == "fp16",
        )

    def decide(self, vote: Vote, history: History) -> Decision:
        """Decide whether to commit the iteration, to skip its update or to stop the run."""
        decision = self._decide(vote, history)
        if decision.action == "skip" and history.num_consecutive_skips + 1 > self.max_consecutive_skips:
            reason = (
                f"{decision.reason}; more consecutive updates were skipped than "
                f"training.max_consecutive_skips={self.max_consecutive_skips} allows"
            )
            return Decision(action="stop", reason=reason, spike=decision.spike)
        return decision

    def _decide(self, vote: Vote, history: History) -> Decision:
        # Checked first: with a dynamic loss scale, an overflow is expected and not a fault.
        if vote.found_inf and self.loss_scaling:
            return Decision(action="skip", reason=f"gradient overflow at loss scale {vote.loss_scale:g}")
        if vote.found_inf or not (math.isfinite(vote.loss) and math.isfinite(vote.grad_norm)):
            return Decision(
                action=self.non_finite_policy,
                reason=f"the loss or a gradient is not finite: loss={vote.loss} grad_norm={vote.grad_norm}",
            )
        return self._decide_spike(vote, history)

    def _decide_spike(self, vote: Vote, history: History) -> Decision:
        # The first losses fall fast, so their median is no basis for judging the next loss.
        if self.loss_spike_factor is None or len(history.losses) < max(1, self.loss_spike_window // 2):
            return Decision(action="commit")
        median = history.median_loss
        if vote.loss <= self.loss_spike_factor * median:
            return Decision(action="commit")
        action = "commit" if self.loss_spike_policy == "warn" else self.loss_spike_policy
        reason = f"loss={vote.loss:g} is above {self.loss_spike_factor:g} times the median of recent losses, {median:g}"
        return Decision(action=action, reason=reason, spike=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """Limits of the values in ``AlertFigures``, from the keys ``telemetry.alert_<name>``; None turns an alert off."""

    single_loss_survival: float | None = None
    """Smallest probability that every expert has a replica left after the loss of one failure domain."""
    stall_share: float | None = None
    """Largest share of an iteration's duration that training may spend waiting for the capture of a snapshot."""
    windows_behind: float | None = None
    """Largest time without a commit of a snapshot window. The unit is the time from one window's start to the next."""
    free_disk_share: float | None = None
    """Smallest allowed share of free space in the file system that contains the run."""
    slowest_rank_over_median: float | None = None
    """Largest ratio of the slowest rank's time to the median rank's time for the same work."""
    lost_token_share: float | None = None
    """Largest share of tokens whose expert updates were lost in recoveries, or would be lost in a recovery now."""

    def judge(self, figures: "AlertFigures") -> "Iterator[Alert]":
        """Compare each value in ``figures`` with its limit; values that are None or have no limit are left out."""
        for name in ALERT_NAMES:
            limit: float | None = getattr(self, name)
            value: float | None = getattr(figures, name)
            if limit is not None and value is not None:
                is_beyond = value < limit if name in _LOWEST else value > limit
                yield Alert(name=name, value=value, limit=limit, is_beyond=is_beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertFigures:
    """Measured values of a run that are compared with ``AlertLimits``; None if a value is unknown."""

    single_loss_survival: float | None = None
    stall_share: float | None = None
    windows_behind: float | None = None
    free_disk_share: float | None = None
    slowest_rank_over_median: float | None = None
    lost_token_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Result of comparing one value of ``AlertFigures`` with its limit in ``AlertLimits``."""

    name: str
    """Name of the compared value, which is a field of ``AlertFigures`` and ``AlertLimits``."""
    value: float
    limit: float
    is_beyond: bool
    """Whether ``value`` violates ``limit``; a value equal to its limit does not violate it."""


_LOWEST = ("single_loss_survival", "free_disk_share")
"""Names of the values whose limit is a minimum. The limits of all other values are maxima."""
ALERT_NAMES = tuple(field.name for field in fields(AlertFigures))
"""Names of all values that can have an alert."""


def windows_behind(iteration: int, *, since_iteration: int, interval_iterations: int) -> float:
    """Return the number of window intervals that have passed since the last commit of a snapshot window.

    Args:
        iteration: newest iteration of the run.
        since_iteration: iteration of the last commit, or the one in which the windows were planned if this is later.
        interval_iterations: iterations from the start of a window to the start of the next.
    """
    assert interval_iterations >= 1, f"interval_iterations={interval_iterations} must be at least 1"
    return max(0, iteration - since_iteration) / interval_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """Slowest rank, and the ratio of its time to the time of the median rank."""

    rank: int
    over_median: float
    """Time of the slowest rank divided by the time of the median rank; 1 if all ranks take the same time."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Slowest | None":
        """Return the slowest rank; None if the times of fewer than two ranks are known.

        The median of an even number of times is the lower of the two middle times.

        Args:
            seconds: time of each rank for the same work; 0 if it is not known.
        """
        known = [value for value in seconds if value > 0.0]
        if len(known) < 2:
            return None
        longest = max(known)
        return cls(rank=seconds.index(longest), over_median=longest / statistics.median_low(known))
