"""Policies whose windows capture only some experts, and copy the state of all other experts from an earlier window. So
captures and transfers are smaller, but a recovery from such a window loses the newest updates of the other experts. A
window has one slice and contains the whole state. The copies come from an earlier window in host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from megatron_ft.config.batch_size import BatchSchedule
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import build_policy
from megatron_ft.errors import ConfigError
from megatron_ft.formatting import counted
from megatron_ft.operators import Component, moe_layers
from megatron_ft.planning.snapshot.demand import Demand, Matrix
from megatron_ft.planning.snapshot.expert_choice import (
    Counts,
    ExpertChoice,
    LoadAware,
    Mask,
    RoundRobin,
    Sequential,
    worst_next_loss,
)
from megatron_ft.planning.snapshot.plan import PartialPlan, Unit, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, SnapshotPolicy, make_plan

_COMPONENTS = {"masters": ("master",), "moments": ("exp_avg", "exp_avg_sq")}
"""Parts of an expert's state that a policy can leave out of windows, and the components of each part. Compute weights
are not among them: a window contains no compute weights, because these follow from the master weights. Step counts are
always captured, because they must be equal for all parameters."""
_STORED = "snapshot.policy.num_persisted_experts"
_NO_EXPERTS = "the model has no experts, so every window captures the whole state"
_NO_BOUND = (
    "each expert loses the updates since it was last captured; no key limits their number, and "
    "telemetry.alert_lost_token_share only warns"
)


@dataclass(frozen=True, kw_only=True)
class ExpertBytes:
    """Bytes that a window captures, on each rank."""

    layers: tuple[int, ...]
    """MoE layers, in Megatron's numbering (from 1)."""
    always: Matrix
    """Bytes that every window captures, ``[ranks]``."""
    left_out: Matrix
    """Bytes that a window captures only if it captures the expert, ``[MoE layers, experts, ranks]``."""

    @classmethod
    def of(cls, demand: Demand, components: Sequence[str]) -> "ExpertBytes":
        """Compute the bytes for windows that may leave out ``components`` of experts."""
        experts = [operator for operator in demand.operators if operator.expert is not None]
        layers = tuple(sorted({operator.layer for operator in experts}))
        row_of = {layer: row for row, layer in enumerate(layers)}
        width = 1 + max((operator.expert or 0 for operator in experts), default=-1)
        always = np.zeros(demand.num_ranks, dtype=np.int64)
        left_out = np.zeros((len(layers), width, demand.num_ranks), dtype=np.int64)
        for rank, shards in enumerate(demand.shards_by_rank):
            for shard in shards:
                for component in shard.full:
                    num_bytes = _bytes(component, shard.num_elements)
                    if shard.operator.expert is not None and component.name in components:
                        left_out[row_of[shard.operator.layer], shard.operator.expert, rank] += num_bytes
                    else:
                        always[rank] += num_bytes
        return cls(layers=layers, always=always, left_out=left_out)

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer."""
        return int(self.left_out.shape[1])

    @cached_property
    def num_groups(self) -> int:
        """Number of groups of consecutive experts, where the experts of a group are on the same ranks. It is 1 unless
        all groups have the same size."""
        places = [tuple(np.flatnonzero(of_expert.any(axis=0)).tolist()) for of_expert in self.left_out.swapaxes(0, 1)]
        number = len(set(places))
        size = self.num_experts // max(1, number)
        is_equal = all(places[expert] == places[expert // size * size] for expert in range(number * size) if size)
        return number if number * size == self.num_experts and is_equal else 1

    def captured(self, chosen: Mask) -> Matrix:
        """Return the bytes of a window that captures the experts ``chosen``, ``[ranks]``."""
        found: Matrix = self.always + self.left_out[chosen].sum(axis=0)
        return found

    def most_captured(self, num_experts: int) -> int:
        """Return the most bytes that a window captures on a rank, for any ``num_experts`` experts per layer."""
        largest = np.sort(self.left_out, axis=1)[:, self.num_experts - num_experts :, :]
        return int((self.always + largest.sum(axis=(0, 1))).max())


def _bytes(component: Component, num_elements: int) -> int:
    return component.item_bytes * component.num_values(num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceBasis:
    """Inputs of the choice of experts for one window, equal on all ranks. Arrays have the MoE layers as rows."""

    number: int
    """Index of the window, counted from the start of the run."""
    at_risk: Counts
    """Tokens that each expert has processed since its last capture, ``[MoE layers, experts]``."""
    iteration_loads: np.ndarray
    """Tokens that each expert processes in an iteration on average, ``[MoE layers, experts]``."""
    lost_share: float
    """Share of the planned tokens that have been lost so far (PLT)."""
    planned_tokens: int
    """Tokens that the router assigns in one layer in the whole training."""
    budget_bytes: int | None
    """Bytes that a rank can capture within one iteration; None if the policy states the number of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageBasis:
    """Inputs for choosing the experts whose state in a window is written to the window's file; equal on all ranks.
    Arrays are ``[MoE layers, experts]``."""

    captured_at: Counts
    """Iteration after which each expert's state in the window was captured."""
    stored_at: Counts
    """Iteration after which each expert's state in the newest file was captured."""
    since: int
    """Start iteration of the window from which the newest file was written."""
    at_risk: Counts
    """Tokens of each expert that a recovery from the window in memory would lose."""
    stored_at_risk: Counts
    """Tokens of each expert that a recovery from the next file would lose if the next file copied the state of this
    expert from the newest file."""
    lost_share: float
    """Share of the planned tokens that have been lost so far (PLT)."""
    planned_tokens: int
    """Tokens that the router assigns in one layer in the whole training."""
    num_groups: int = 1
    """Number of equal groups of consecutive experts; the experts of a group are on the same ranks."""
    num_experts: int | None = None
    """Planned number of experts of each layer whose newer state is written to the file (K_persist). If it is None,
    ``choose`` must not be called."""

    def choose(self, *, oldest_first: bool, max_lost_share: float | None) -> Mask:
        """Choose ``num_experts`` experts of each layer that are newer in the window than on storage (MoC-System,
        section 5.1). Choose twice, four times, ... as many if a recovery could otherwise exceed ``max_lost_share``.

        Experts that were captured since the newest file are chosen before all others, because their state in the window
        is the newest.

        Args:
            oldest_first: order within these experts and within the others. If true, experts with the oldest stored
                state come first; if false, experts whose newer state includes the most tokens that storage lacks.
        """
        is_newer = self.captured_at > self.stored_at
        urgency = self.stored_at if oldest_first else self.at_risk - self.stored_at_risk
        num_layers, num_experts_of_layer = is_newer.shape
        groups = np.arange(num_experts_of_layer) * self.num_groups // num_experts_of_layer
        # The group whose experts are written first differs between layers, so that all ranks write equally many bytes.
        turn = (groups[None, :] - np.arange(num_layers)[:, None]) % self.num_groups
        # The last key counts first. The sort is stable, so the number of the expert decides ties on all ranks alike.
        order = np.lexsort((turn, urgency, self.captured_at <= self.since, ~is_newer), axis=1)
        number = self.num_experts
        assert number is not None, "files have all experts of their windows"
        while True:
            chosen = np.zeros_like(is_newer)
            np.put_along_axis(chosen, order[:, :number], True, axis=1)
            chosen &= is_newer
            if number >= is_newer.shape[1] or max_lost_share is None:
                return chosen
            # A file with all experts loses what the window in memory loses, which is within the bound already.
            lost = float(np.where(chosen, self.at_risk, self.stored_at_risk).sum())
            if self.lost_share + lost / (len(chosen) * max(1, self.planned_tokens)) <= max_lost_share:
                return chosen
            number *= 2


@runtime_checkable
class ExpertPolicy(SnapshotPolicy, Protocol):
    """Protocol of a snapshot policy whose windows leave out experts. The field ``partial`` of its plans is not None,
    except for models without experts."""

    leaves_out_experts: ClassVar[bool]
    """Always true: windows of the policy leave out experts. Checks of a configuration read this value before they use
    anything else of the policy."""

    def plan_unmeasured(self, demand: Demand) -> WindowPlan:
        """Plan windows without measurements. ``partial`` of the plan (what windows leave out) is None if the number of
        experts depends on measurements."""
        ...

    def choose(self, plan: WindowPlan, basis: ChoiceBasis, state: ExpertBytes) -> Mask:
        """Choose the experts of the next window, in the same way on every rank."""
        ...

    @property
    def num_persisted_experts(self) -> int | None:
        """Number of experts of each layer whose newer state a window's file contains; None if the policy sets none."""

    def choose_stored(self, basis: StorageBasis) -> Mask:
        """Choose the experts of the next file, in the same way on every rank."""
        ...

    def update_loss(self, num_experts: int, windows_per_file: int = 1, stored: int | None = None) -> str:
        """Describe in words how much a recovery from a window can lose.

        Args:
            num_experts: number of experts of a layer.
            windows_per_file: n if every n-th window is written to a file on storage.
            stored: experts of each layer whose newer state a file gets; used only if ``num_persisted_experts`` is None.
        """
        ...


def _components(leave_out: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for part in leave_out for name in _COMPONENTS[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartialPolicy:
    """Base of the two policies of this module: their common fields, and how they plan windows."""

    num_experts: int | None = None
    """Experts of each layer that a window captures, on average over layers (K of MoC-System, S of MoEtion). null
    means as many as possible without stalls of training."""
    interval_iterations: int = 1
    """Iterations from one window to the next."""
    num_persisted_experts: int | None = None
    """Experts of each layer whose state is written to storage with a window (K_persist); at most ``num_experts``. null
    writes all experts, or as many as ``snapshot.storage_bandwidth_bytes_per_second`` allows."""
    leave_out: tuple[str, ...] = ("masters", "moments")
    """Parts of the state of an expert that a window leaves out: ``masters`` (master weights), ``moments``, or both."""
    send_gradients: bool = False
    """Whether peers get only the gradients of an expert (4 bytes per parameter instead of 12) and repeat its update, if
    the window that started one iteration earlier has also captured the expert (MoEtion, section 5.2)."""
    replan_drift: float = 0.2
    """Relative change above which a new plan is made: the change of the bytes that an iteration can capture, or of the
    whole state's bytes."""
    trigger: ClassVar[None] = None
    leaves_out_experts: ClassVar[bool] = True

    def plan_unmeasured(self, demand: Demand) -> WindowPlan:
        """Plan windows without measurements. ``partial`` of the plan is None if ``num_experts`` is None.

        Raises:
            ConfigError: a field of the policy is out of range.
        """
        self._check()
        num_experts = self.num_experts
        state = ExpertBytes.of(demand, _components(self.leave_out))
        units = tuple(Unit(operator=operator) for operator in demand.operators)
        partial = None
        if not state.layers:
            reason = _NO_EXPERTS
        elif num_experts is None:
            reason = "the number of experts of a window is unknown until bandwidth and iteration time are measured"
        else:
            number = min(num_experts, state.num_experts)
            partial = self._partial(number, self._peak_bytes(state, number), self.num_persisted_experts)
            reason = f"snapshot.policy.num_experts={num_experts}; whether a window stalls training is not measured yet"
        interval = self.interval_iterations
        plan = WindowPlan(slices=(units,), interval_iterations=interval, reason=reason, partial=partial)
        plan.validate(demand.operators)
        return plan

    def plan(self, demand: Demand, context: SnapshotContext) -> WindowPlan:
        """Plan windows with one slice.

        Raises:
            ConfigError: a field of the policy or a measurement is out of range.
        """
        self._check()
        context.validate()
        state = ExpertBytes.of(demand, _components(self.leave_out))
        interval, stored = self.interval_iterations, self.num_persisted_experts
        units = [Unit(operator=operator) for operator in demand.operators]
        if not state.layers:
            return make_plan(demand, context, [units], interval_iterations=interval, reason=_NO_EXPERTS)
        num_experts = self._most_experts(state, context) if self.num_experts is None else self.num_experts
        num_experts = min(num_experts, state.num_experts)
        peak_bytes = self._peak_bytes(state, num_experts)
        over = peak_bytes - context.budget_bytes
        fits = f"{over:,} bytes above" if over > 0 else "within"
        reason = (
            f"each window captures {num_experts} of {state.num_experts} experts of a layer, at most {peak_bytes:,} "
            f"bytes on a rank, {fits} the budget of an iteration; the first window captures everything"
        )
        budget = context.file_budget_bytes(interval)
        if stored is None and budget is not None:
            stored = _most_fitting(state, num_experts, budget, self._peak_bytes)
            stored_bytes = self._peak_bytes(state, stored)
            reason += f"; a file has {stored} of them, {stored_bytes:,} bytes, and storage can take {budget:,}"
        plan = make_plan(demand, context, [units], interval_iterations=interval, reason=reason)
        basis = plan.basis
        if basis is not None and self.num_experts is not None and budget is None:
            # Measured times vary. A plan that does not depend on them must not be made again because of them.
            basis = replace(basis, budget_bytes=None)
        return replace(plan, partial=self._partial(num_experts, peak_bytes, stored), basis=basis)

    def _partial(self, num_experts: int, captured_bytes: int, stored: int | None) -> PartialPlan:
        return PartialPlan(
            num_experts=num_experts,
            components=_components(self.leave_out),
            captured_bytes=captured_bytes,
            num_persisted_experts=stored,
            sends_gradients=self.send_gradients,
        )

    def _most_experts(self, state: ExpertBytes, context: SnapshotContext) -> int:
        """Return the largest number of experts of a layer whose capture does not stall training; at least 1."""
        return _most_fitting(state, state.num_experts, context.budget_bytes, self._peak_bytes)

    def _peak_bytes(self, state: ExpertBytes, number: int) -> int:
        return state.most_captured(number)

    def _check(self) -> None:
        leave_out, num_experts, stored = self.leave_out, self.num_experts, self.num_persisted_experts
        if self.interval_iterations < 1:
            raise ConfigError.of("snapshot.policy.interval_iterations", self.interval_iterations, "must be at least 1")
        if num_experts is not None and num_experts < 1:
            raise ConfigError.of("snapshot.policy.num_experts", num_experts, "must be null or at least 1")
        if stored is not None and not 1 <= stored <= (stored if num_experts is None else num_experts):
            bound = "" if num_experts is None else f" and at most snapshot.policy.num_experts={num_experts}"
            bound += bound and ", because a file cannot contain more experts than its window has captured"
            raise ConfigError.of(_STORED, stored, f"must be null or at least 1{bound}")
        if not leave_out or len(set(leave_out)) != len(leave_out) or not set(leave_out) <= set(_COMPONENTS):
            constraint = f"must be a list of one or more of {', '.join(_COMPONENTS)}, each at most once"
            raise ConfigError.of("snapshot.policy.leave_out", list(leave_out), constraint)
        if self.send_gradients and self.interval_iterations != 1:
            constraint = f"must be false with snapshot.policy.interval_iterations={self.interval_iterations}: gradients"
            raise ConfigError.of(
                "snapshot.policy.send_gradients", "true", f"{constraint} of one iteration give one update"
            )
        if self.replan_drift < 0:
            raise ConfigError.of("snapshot.policy.replan_drift", self.replan_drift, "must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialExperts(_PartialPolicy):
    """Captures K experts of each layer in every window (MoC-System, sections 3 and 5)."""

    choice: ExpertChoice = field(default_factory=Sequential)
    """Rule that chooses the experts that a window should capture."""
    max_lost_share: float | None = 0.0375
    """Bound of the proportion of lost tokens (PLT) in the whole training. A window captures more experts, up to all, if
    the next failure could exceed this bound. null sets no bound."""
    fill_ranks: bool = False
    """Whether a window also captures further experts, as long as no rank captures more bytes than the busiest rank
    captures anyway (MoC-System, section 5.3). The further experts cost no time, and a recovery loses fewer tokens."""

    def update_loss(self, num_experts: int, windows_per_file: int = 1, stored: int | None = None) -> str:
        """Describe in words how much a recovery from a window can lose."""
        if self.max_lost_share is not None:
            return (
                f"experts lose updates by at most {100 * self.max_lost_share:g} % of the whole training's tokens, over "
                f"all recoveries together, because windows capture more experts if necessary "
                f"(snapshot.policy.max_lost_share={self.max_lost_share:g})"
            )
        if not isinstance(self.choice, Sequential | RoundRobin):
            return _NO_BOUND
        # An expert's turn comes again after this number of windows. At least one expert is captured in each.
        captured = min(self.num_experts or 1, num_experts)
        windows = -(-num_experts // captured)
        skipped = counted((windows - 1) * self.interval_iterations, "iteration")
        in_files, of_file = "", self.num_persisted_experts or stored
        if of_file is not None:
            most = _most_windows(num_experts, captured, of_file, windows_per_file)
            in_files = f" ({counted((most - 1) * self.interval_iterations, 'iteration')} if it is read from storage)"
        return (
            f"each expert loses updates of at most {skipped} before the window{in_files}, because experts are captured "
            "in turn; more if a window was delayed (event window_delayed)"
        )

    def choose(self, plan: WindowPlan, basis: ChoiceBasis, state: ExpertBytes) -> Mask:
        """Choose K experts of each layer, or twice, four times, ... as many if ``max_lost_share`` requires it."""
        assert plan.partial is not None, "the plan captures all experts"
        number = plan.partial.num_experts
        while True:
            chosen = self.choice.choose(basis.number, number, basis.at_risk, state.num_groups)
            chosen = _filled(state, chosen, basis.at_risk) if self.fill_ranks else chosen
            if number == state.num_experts or self.max_lost_share is None:
                return chosen
            # A recovery from this window loses exactly the updates that the window leaves out. The largest loss of a
            # later window counts too, so that the number grows before the bound is reached.
            left_out = float(np.where(chosen, 0, basis.at_risk).sum())
            later = sum(worst_next_loss(row, self.interval_iterations, number) for row in basis.iteration_loads)
            next_share = max(left_out, later) / (len(chosen) * max(1, basis.planned_tokens))
            if basis.lost_share + next_share <= self.max_lost_share:
                return chosen
            number = min(2 * number, state.num_experts)

    def choose_stored(self, basis: StorageBasis) -> Mask:
        """Choose the K_persist experts of each layer whose newer state a file gets. The oldest stored state comes first
        if ``choice`` takes experts in turn, otherwise the newer state that prevents the loss of the most tokens."""
        in_turn = isinstance(self.choice, Sequential | RoundRobin)
        return basis.choose(oldest_first=in_turn, max_lost_share=self.max_lost_share)

    def _check(self) -> None:
        _PartialPolicy._check(self)
        bound = self.max_lost_share
        if bound is not None and not 0 < bound < 1:
            raise ConfigError.of("snapshot.policy.max_lost_share", bound, "must be null or between 0 and 1")

    def _peak_bytes(self, state: ExpertBytes, number: int) -> int:
        # If experts take turns, the choice for every window is known in advance. Otherwise all may be on one rank.
        if not isinstance(self.choice, Sequential | RoundRobin):
            return state.most_captured(number)
        nothing = np.zeros(state.left_out.shape[:2], dtype=np.int64)
        groups = state.num_groups
        turns = (self.choice.choose(turn, number, nothing, groups) for turn in range(state.num_experts))
        return max(int(state.captured(chosen).max()) for chosen in turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveExperts(_PartialPolicy):
    """Captures in every window the experts that have the most tokens at risk, as many as the budgets allow (MoEtion,
    section 4).

    The budgets apply to each rank separately. If a rank has no room for an expert, the expert waits for a later window.
    Instead, an expert of another rank is captured, although it has fewer tokens at risk.
    """

    remote_bandwidth_bytes_per_second: float | None = None
    """Bytes that a rank can send to peers per second. If it is null, only the bandwidth of captures limits windows."""
    choice: ExpertChoice = field(default_factory=LoadAware)
    """Rule that chooses the experts that a window should capture."""

    def update_loss(self, num_experts: int, windows_per_file: int = 1, stored: int | None = None) -> str:
        """Return a text which says that a recovery from a window can lose any number of updates."""
        return _NO_BOUND

    def choose(self, plan: WindowPlan, basis: ChoiceBasis, state: ExpertBytes) -> Mask:
        """Choose the planned number of experts per layer, on average over layers. Choose other or fewer experts, unless
        ``num_experts`` is configured, if a rank could not capture all bytes within one iteration."""
        assert plan.partial is not None, "the plan captures all experts"
        wanted = self.choice.choose(basis.number, plan.partial.num_experts, basis.at_risk, state.num_groups)
        if basis.budget_bytes is None or self.num_experts is not None:
            return wanted
        return _within(state, wanted, basis.at_risk, basis.budget_bytes)

    def choose_stored(self, basis: StorageBasis) -> Mask:
        """Choose the experts whose newer state is written to a file, the planned number in each layer. Prefer experts
        whose newer state includes the most tokens that storage lacks."""
        return basis.choose(oldest_first=False, max_lost_share=None)

    def _check(self) -> None:
        _PartialPolicy._check(self)
        remote = self.remote_bandwidth_bytes_per_second
        if remote is not None and not 0 < remote < float("inf"):
            key = "snapshot.policy.remote_bandwidth_bytes_per_second"
            raise ConfigError.of(key, remote, "must be null, or above 0 and finite")

    def _most_experts(self, state: ExpertBytes, context: SnapshotContext) -> int:
        budget, remote = context.budget_bytes, self.remote_bandwidth_bytes_per_second
        if remote is not None:
            # A transfer may take until the next window, a capture only until the next update.
            budget = min(budget, int(remote * context.iteration_seconds * self.interval_iterations))
        # For each rank, bytes that are always captured are subtracted from the budget, and experts count at their mean
        # size. The rank with room for the fewest experts decides.
        of_expert = state.left_out.sum(axis=(0, 1)) / max(1, state.num_experts)
        room = budget - state.always
        return max(1, int(min((room[of_expert > 0] / of_expert[of_expert > 0]).tolist(), default=1)))


def expert_policy(config: JobConfig) -> ExpertPolicy | None:
    """Return the snapshot policy of a job if its windows leave out experts; None otherwise.

    Raises:
        ConfigError: ``snapshot.policy`` cannot be built.
    """
    if config.snapshot.policy is None or config.model.num_moe_experts is None:
        return None
    policy = build_policy("snapshot.policy", config.snapshot.policy)
    return policy if isinstance(policy, ExpertPolicy) else None


def stores_fewer_experts(config: JobConfig) -> bool:
    """Return whether a job's files have an older state of some experts than the windows from which they are written."""
    policy = expert_policy(config)
    is_chosen = config.snapshot.storage_bandwidth_bytes_per_second is not None
    return policy is not None and (is_chosen or policy.num_persisted_experts is not None)


def counted_layers(config: JobConfig) -> tuple[int, ...]:
    """Return the layers whose tokens a job counts: all MoE layers if windows leave out experts, otherwise none."""
    return () if expert_policy(config) is None else moe_layers(config.model)


def planned_tokens(config: JobConfig) -> int:
    """Return how many assignments of a token to an expert the router makes in one layer in the whole training."""
    training, model = config.training, config.model
    num_samples = BatchSchedule.of(training).samples_before(training.train_iterations + 1)
    return num_samples * model.seq_length * model.moe_router_topk


def _filled(state: ExpertBytes, chosen: Mask, at_risk: Counts) -> Mask:
    """Add experts to ``chosen``, the experts with the most tokens at risk first. No rank may then capture more bytes
    than the busiest rank captures for ``chosen`` alone."""
    used = state.captured(chosen)
    room, found = used.max() - used, chosen.copy()
    layers, experts = np.nonzero(~chosen & (at_risk > 0))
    for row in np.lexsort((experts, layers, -at_risk[layers, experts])).tolist():
        place = layers[row], experts[row]
        if (state.left_out[place] <= room).all():
            found[place], room = True, room - state.left_out[place]
    return found


def _most_windows(num_experts: int, captured: int, stored: int, windows_per_file: int) -> int:
    """Return after at most how many windows a file again contains newer state of an expert, if experts take turns.

    Args:
        captured: number of experts of a layer that each window captures.
        stored: number of experts of a layer whose newer state is written with each file.
    """
    # Experts captured since the last file compete for the next file: those stored longest ago are written. If an expert
    # always competes with the same rivals, every ``rivals / stored``-th file for which they compete contains it.
    # Otherwise all other experts of the layer can be written before it.
    rivals = min(num_experts, captured * windows_per_file)
    files = -(-(rivals if num_experts % rivals == 0 else num_experts) // stored)
    return files * max(-(-num_experts // captured), windows_per_file)


def _within(state: ExpertBytes, wanted: Mask, at_risk: Counts, budget_bytes: int) -> Mask:
    """Choose at least one expert, and at most as many as ``wanted`` has, so that no rank exceeds ``budget_bytes``. Take
    experts in ``wanted`` first, then others; of both, first those with the most tokens at risk."""
    if (state.captured(wanted) <= budget_bytes).all():
        return wanted
    layers, experts = np.nonzero(np.ones_like(wanted))
    order = np.lexsort((experts, layers, -at_risk[layers, experts], ~wanted[layers, experts]))
    chosen, used, left = np.zeros_like(wanted), state.always.copy(), int(wanted.sum())
    for row in order.tolist():
        place = layers[row], experts[row]
        after = used + state.left_out[place]
        # One expert is always captured, even above the budget: otherwise no expert would ever be captured again.
        if (after <= budget_bytes).all() or not chosen.any():
            chosen[place], used, left = True, after, left - 1
        if not left:
            break
    return chosen


PeakBytes = Callable[[ExpertBytes, int], int]
"""Function that returns the most bytes that a window with a given number of experts per layer captures on any rank."""


def _most_fitting(state: ExpertBytes, most: int, budget_bytes: int, peak_of: PeakBytes) -> int:
    """Return the largest number of experts of a layer, from 1 to ``most``, that fit into ``budget_bytes``."""
    return next((number for number in range(most, 1, -1) if peak_of(state, number) <= budget_bytes), 1)
