"""Captures windows on one rank during training, at the same iterations as on all other ranks.

A ``SnapshotPolicy`` plans the windows. ``WindowCapture`` copies tensors to memory of the node's snapshot server, and
the server replicates the copies to other nodes. All decisions depend only on commit votes and on inputs that are the
same on every rank, so all ranks decide alike.
"""

import json
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import build_policy
from megatron_ft.events import Record, SnapshotProblem, WindowCommitted, WindowDelayed
from megatron_ft.mcore.groups import Collectives
from megatron_ft.mcore.snapshot.local_window import AT_RISK, PLAN
from megatron_ft.mcore.state.operator_view import OperatorView
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.mcore.training.reporting import planned_record
from megatron_ft.operators import moe_layers
from megatron_ft.planning.iteration import Vote, WindowReport
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.planning.snapshot.memory import PeerAssignment, WindowBuffers, buffer_bytes, check_limit, host_bytes
from megatron_ft.planning.snapshot.partial_experts import expert_policy, planned_tokens, stores_fewer_experts
from megatron_ft.planning.snapshot.partial_windows import PartialWindows
from megatron_ft.planning.snapshot.plan import Activations, WindowKey, WindowPlan, window_bytes, window_bytes_by_rank
from megatron_ft.planning.snapshot.policy import SnapshotContext, SnapshotPolicy, replan, why_outdated
from megatron_ft.snapshot.capture.capture import (
    CaptureFigures,
    Header,
    WindowCapture,
    WindowMemory,
    capture_bandwidth,
    open_copier,
)
from megatron_ft.snapshot.server.client import (
    NUM_PROBLEMS,
    PERSISTED_BYTES,
    REPLICATED_BYTES,
    WAITING_BYTES,
    Arena,
    KeeperClient,
)
from megatron_ft.snapshot.window import StoredLevel

_NAMES = ("stalled_seconds", "captured_bytes", "replicated_bytes", "persisted_bytes", "idle_copied_bytes")


class _SnapshotStats:
    """Computes the cost of each committed window from cumulative counters of the capture and of the snapshot server."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = dict.fromkeys(_NAMES, 0)
        self._unreported: dict[str, float] = dict.fromkeys(_NAMES, 0)
        self._arena: Arena | None = None

    def end_captures(self, figures: CaptureFigures) -> None:
        """Add ``figures``, the final costs of a ``WindowCapture``. The next ``WindowCapture`` counts from 0 again."""
        self._add(figures)
        self._seen |= {"stalled_seconds": 0, "captured_bytes": 0, "idle_copied_bytes": 0}

    def watch(self, arena: Arena) -> None:
        """Read the counters in ``arena``, the server's memory, from now on. Earlier costs are not counted."""
        if arena is not self._arena:
            self._arena = arena
            self._seen |= self._server_sums()

    def record(
        self, iteration: int, *, start_iteration: int, num_iterations: int, figures: CaptureFigures
    ) -> WindowCommitted:
        """Return the event for a window that the vote of ``iteration`` has committed. The costs in the event are all
        costs since the previously committed window."""
        self._add(figures)
        cost, self._unreported = self._unreported, dict.fromkeys(_NAMES, 0)
        return WindowCommitted(
            iteration=iteration,
            start_iteration=start_iteration,
            num_iterations=num_iterations,
            stalled_seconds=cost["stalled_seconds"],
            **{name: int(cost[name]) for name in _NAMES if name != "stalled_seconds"},
        )

    def _add(self, figures: CaptureFigures) -> None:
        now = {
            "stalled_seconds": figures.stalled_seconds,
            "captured_bytes": figures.num_bytes,
            "idle_copied_bytes": figures.idle_bytes,
            **self._server_sums(),
        }
        for name, value in now.items():
            self._unreported[name] += value - self._seen[name]
        self._seen |= now

    def _server_sums(self) -> dict[str, float]:
        if self._arena is None:
            return {}
        words = {"replicated_bytes": REPLICATED_BYTES, "persisted_bytes": PERSISTED_BYTES}
        return {name: self._arena.status(word) for name, word in words.items()}


Rows = tuple[tuple[int, ...], ...]
"""Number of tokens that were routed to each expert in one iteration, as [layer][expert]."""

SliceHeader = Callable[[int], Header]
"""Function that takes the index of a slice, and captures the values for the header of this slice. It returns a function
that encodes these values. The vote is added later."""

_NUM_MEASURED = 3
_MAX_LOAD_RECORDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """Objects of a ``Snapshotter`` that are created again when the plan of windows or addresses of tensors change."""

    view: OperatorView
    capture: WindowCapture
    host_bytes: int
    """Host memory in bytes for windows and copies of other nodes' windows, on the node that needs the most memory."""
    partial: PartialWindows | None
    """Records which experts each window has captured; None if every window captures all experts."""

    @property
    def plan(self) -> WindowPlan:
        return self.capture.plan


class Snapshotter:
    """Captures one rank's parts of windows. All ranks must call all methods except ``settle`` in the same order.

    Args:
        client: connection to the snapshot server of this node.
        assignment: for each node, the nodes that store copies of its windows.
        header: makes the content of a slice's header, except the vote.
        report: sends an event to the sinks; called on every rank.
    """

    def __init__(
        self,
        config: JobConfig,
        engine: TrainingEngine,
        *,
        client: KeeperClient,
        assignment: PeerAssignment,
        node: int,
        header: SliceHeader,
        report: Callable[[Record], None],
    ) -> None:
        assert config.snapshot.policy is not None, "snapshot.policy is not set"
        self._config = config
        self._engine = engine
        self._client = client
        self._collectives = Collectives(engine.groups.vote)
        self._assignment = assignment
        self._node = node
        self._header = header
        self._report = report
        self._policy: SnapshotPolicy = build_policy("snapshot.policy", config.snapshot.policy)
        self._policy_text = json.dumps(config.snapshot.policy, sort_keys=True)
        self._expert_policy = expert_policy(config)
        self._stores_fewer = stores_fewer_experts(config)
        gate = engine.boundaries.idle if config.snapshot.copy_in_bubbles else None
        self._copier = open_copier(engine.device, gate)
        self._buffers = WindowBuffers()
        self._start: int | None = None
        self._last_start: int | None = None
        self._lengths: dict[int, int] = {}
        self._kept_generation = -1
        self._num_windows = self._num_commits = 0
        self._stats = _SnapshotStats()
        self._num_problems = 0
        self._is_delayed = False
        self._is_whole_due = False
        self._iteration_seconds: deque[float] = deque(maxlen=10)
        self._loads: deque[Rows] = deque(maxlen=_MAX_LOAD_RECORDS)
        self._plan: WindowPlan | None = None
        self._memory: WindowMemory | None = None
        self._opened: _Opened | None = None
        engine.before_update.append(self.settle)
        engine.window_report = self._window_report

    @property
    def figures(self) -> CaptureFigures:
        """Cost of captures on this rank since the current plan was made."""
        return CaptureFigures() if self._opened is None else self._opened.capture.figures

    @property
    def needs_loads(self) -> bool:
        """Whether ``observe`` must be called after every iteration, because the policy needs the experts' loads."""
        return self._policy.trigger is not None or self._expert_policy is not None

    def observe(self, load: torch.Tensor) -> None:
        """Record the load of an iteration: number of tokens of each expert, int64 [num_layers, num_moe_experts]."""
        self._loads.append(tuple(tuple(row) for row in load.tolist()))

    def resume(self, window: StoredWindow, plan: WindowPlan) -> None:
        """Capture the next windows according to ``plan``. Keep ``window``, from which the job continues (see
        ``LocalWindow.stored``), until a newer window is committed."""
        start, self._plan, self._kept_generation = window.start_iteration, plan, window.generation
        self._buffers = WindowBuffers(held={start: window.buffer or 0}, committed=start)
        is_here = window.where == "own"
        if is_here:
            # Confirm the window in the new generation. Otherwise the server may use its buffer for the next window.
            self._client.committed(start, captured_in=window.generation)
            self._lengths[start] = window.num_slices
        self._opened = self._open(self._engine.iteration, held_bytes=window.buffer_bytes)
        if window.where == "copy":
            # The peers may not know of the window's commit. They could then replace their copy by the next window.
            self._client.keep(window.key)

    def capture_whole(self, vote: Vote) -> None:
        """Capture the whole current state as a window with one slice.

        After a recovery the newest committed window is old. This capture replaces it. The next planned windows follow
        at their usual interval.

        Args:
            vote: vote of the newest iteration.
        """
        opened, memory, iteration = self._opened, self._memory, self._engine.iteration
        assert opened is not None and memory is not None, "call ``resume`` before ``capture_whole``"
        shards, partial = opened.view.shards, opened.partial
        every, reason = chain(*opened.view.shards_by_rank), "whole state in one slice, after a recovery"
        whole = WindowPlan.dense(every, opened.plan.interval_iterations, reason)
        # Use the slice layout of planned windows, because later windows copy experts from this window.
        if partial is not None:
            whole = replace(opened.plan, partial=None, reason=whole.reason)
        # All ranks decide together, because a window that only some ranks capture can never be committed.
        if self._collectives.any(window_bytes(whole, shards) > memory.arena.window_bytes):
            return self._report_plan_problem(
                iteration,
                "the whole state is not captured after this recovery, because it does not fit the window buffers",
            )
        if not self._collectives.all(bool(self._window_report().has_free_buffer)):
            return self._report_delayed(iteration)
        capture = self._capture(whole, opened.view, memory)
        self._begin(iteration, capture)
        if partial is not None:
            partial.begin_whole(iteration, self._tokens())
        header = self._encoder(0, vote, {PLAN: opened.plan.to_json()})
        capture.begin_slice(self._buffers.held[iteration], 0, iteration=iteration, header=header)
        # Wait here, because ``before_update`` waits only for slices of planned windows.
        capture.settle()
        return None

    def capture_whole_next(self) -> None:
        """Make the next ``after_iteration`` call ``capture_whole``, before it continues the planned windows."""
        self._is_whole_due = True

    @property
    def plan(self) -> WindowPlan | None:
        """The current plan; None before the first plan."""
        return self._plan

    @property
    def kept(self) -> WindowKey | None:
        """The newest committed window; None before the first commit."""
        start = self._buffers.committed
        return None if start < 0 else WindowKey(start_iteration=start, generation=self._kept_generation)

    def after_iteration(self, iteration: int, vote: Vote, seconds: float) -> None:
        """Commit or abandon windows, as ``vote`` of ``iteration`` decides. Begin to copy a slice of the present state.

        Args:
            seconds: duration of the iteration, in seconds.
        """
        self.settle()  # a skipped iteration has no update, so ``before_update`` has not called this
        self._iteration_seconds.append(seconds)
        self._apply_vote(iteration, vote)
        has_buffer = bool(vote.has_free_buffer)
        if self._opened is None:
            if self._plan is None and not self._is_measured:
                return
            self._opened = self._open(iteration)
            # The memory may be that of an earlier process, with windows that are still being written to storage.
            has_buffer = self._collectives.all(bool(self._window_report().has_free_buffer))
        if self._is_whole_due:
            self._is_whole_due = False
            self.capture_whole(vote)
        if self._start is None and not self._begin_window(iteration, self._opened, has_buffer=has_buffer):
            return
        assert self._start is not None, "no window has begun"
        failpoints.hit("capture", iteration)
        index = iteration - self._start
        captured_at, content, update, gradients = None, {}, None, []
        partial = self._opened.partial
        if partial is not None:
            pieces, num_layers = self._opened.capture.pieces[index], self._config.model.num_layers
            captured_at = partial.captured_at(self._start, pieces, num_layers)
            if captured_at is not None:
                content[AT_RISK] = partial.at_risk(self._start)
            # A skipped iteration has no update that peers could repeat.
            if partial.sends_gradients and self._engine.history.num_consecutive_skips == 0:
                again = partial.captured_again(self._start, pieces, num_layers)
                update, gradients = self._opened.view.update_of(pieces, again)
        self._opened.capture.begin_slice(
            self._buffers.held[self._start],
            index,
            iteration=iteration,
            header=self._encoder(index, vote, content),
            captured_at=captured_at,
            update=update,
            gradients=gradients,
        )
        if index == self._opened.plan.num_iterations - 1:
            self._start = None

    def settle(self) -> None:
        """Wait until the slice in progress is copied. Afterwards the tensors may change."""
        if self._opened is not None:
            self._opened.capture.settle()

    def pause(self) -> None:
        """Abandon the window in progress, because tensors are about to move. Later windows use the new addresses."""
        self.settle()
        if self._start is not None:
            self._buffers = self._buffers.abandon(self._start)
        self._stats.end_captures(self.figures)
        self._start = self._last_start = self._opened = None

    def persist_newest(self) -> None:
        """Request a write of the newest committed window to storage. ``finish`` waits for it. All ranks call this."""
        self.settle()
        start = self._buffers.committed
        # If the job resumed from this window, the parts of some ranks may be only in the memory of peer nodes. Then the
        # parts on the other nodes are not a complete window.
        is_here = self._collectives.gather(start in self._lengths)
        if all(is_here):
            self._client.persist(start)
        elif any(is_here) and self._collectives.rank == 0:
            lacking = [rank for rank, found in enumerate(is_here) if not found]
            error = (
                f"the window of iteration {start} is not written to storage, because the parts of ranks {lacking} are "
                "not in the memory of their own nodes"
            )
            self._report_problem(self._engine.iteration, "persist", error)

    def finish(self) -> None:
        """Wait, at the end of a run, until all windows that must be written to storage are written."""
        self.settle()
        if not self._client.flush():
            self._report_problem(
                self._engine.iteration, "persist", "timed out waiting until the newest window was written to storage"
            )
        self._report_problems(self._engine.iteration)

    def close(self) -> None:
        """Wait for the slice in progress. Release tensors, memory and connection. The server keeps all windows."""
        self.settle()
        self._copier.close()
        if self.settle in self._engine.before_update:
            self._engine.before_update.remove(self.settle)
        self._engine.window_report = WindowReport
        self._opened = None
        self._release_memory()
        self._client.close()

    @property
    def _plans_again(self) -> bool:
        return self._config.snapshot.replan_interval_windows > 0

    def _window_report(self) -> WindowReport:
        return self._buffers.report(self._client.buffer_states())

    def _apply_vote(self, iteration: int, vote: Vote) -> None:
        before, self._buffers = self._buffers, self._buffers.after_vote(vote)
        if self._buffers.committed > before.committed:
            failpoints.hit("replicate", iteration)
            self._commit(self._buffers.committed, vote)
            self._kept_generation = self._client.generation
            self._report_committed(iteration)
        # If one rank has given up a window, all ranks abandon it at the same vote. Otherwise bit i of a ballot (the
        # i-th oldest window of a rank) would stand for different windows on different ranks.
        for start in before.held:
            if start > self._buffers.committed and start not in self._buffers.held:
                self._client.abandon(start)
                self._start = None if start == self._start else self._start
        self._report_problems(iteration)

    def _commit(self, start: int, vote: Vote) -> None:
        # If files contain fewer new experts than windows, all ranks choose these experts together, so they must also
        # choose the windows that are written. Otherwise each server chooses the windows by counting commits.
        self._num_commits += 1
        every = self._config.snapshot.persist_interval_windows
        if not self._stores_fewer or not every or self._num_commits % every:
            return self._client.committed(start)
        opened, level = self._opened, None
        # After the state was moved, the next file contains all experts, as after a restart.
        partial = None if opened is None else opened.partial
        if opened is not None and partial and partial.store(start, self._tokens(), vote.unwritten_start):
            pieces, num_layers = opened.capture.pieces[0], self._config.model.num_layers
            captured_at, at_risk = partial.stored(start, pieces, num_layers)
            header, is_whole = {AT_RISK: json.dumps(at_risk)}, partial.writes_all_pieces
            level = StoredLevel(captured_at=captured_at, header=header, is_whole=is_whole)
        return self._client.committed(start, is_written=True, level=level)

    @property
    def _is_measured(self) -> bool:
        # Count only iterations since this object was created, so that all ranks plan after the same iteration.
        return self._config.snapshot.iteration_seconds is not None or len(self._iteration_seconds) >= _NUM_MEASURED

    def _begin_window(self, iteration: int, opened: _Opened, *, has_buffer: bool) -> bool:
        if opened.plan.has_other_policy(self._policy_text):  # an earlier job has made the plan
            if not self._is_measured:
                return False
            self._plan = None
            self._opened = opened = self._open(iteration)
        if self._last_start is not None and iteration < self._last_start + opened.plan.interval_iterations:
            return False
        if self._buffers.free() is None or not has_buffer:
            self._report_delayed(iteration)
            return False
        self._opened = opened = self._plan_again(iteration, opened)
        self._is_delayed = False
        if opened.partial is not None:
            opened.partial.begin(iteration, self._buffers.held, self._tokens(), self._loads)
        self._begin(iteration, opened.capture)
        self._start = iteration
        return True

    def _tokens(self) -> TokenLedger:
        tokens, model = self._engine.history.tokens, self._config.model
        # Before the first committed iteration, no expert has processed a token.
        return tokens or TokenLedger.empty([[0] * (model.num_moe_experts or 0) for _ in moe_layers(model)])

    def _begin(self, iteration: int, capture: WindowCapture) -> None:
        self._buffers = self._buffers.begin(iteration, self._client.buffer_states().pinned)
        self._last_start = iteration
        self._lengths = {start: length for start, length in self._lengths.items() if start in self._buffers.held}
        self._lengths[iteration] = capture.plan.num_iterations
        self._num_windows += 1

    def _encoder(self, index: int, vote: Vote, content: Mapping[str, Any]) -> Header:
        rest = self._header(index)
        return lambda: {
            **{name: json.dumps(value) for name, value in {"vote": vote.to_record(), **content}.items()},
            **rest(),
        }

    def _open(self, iteration: int, *, held_bytes: int = 0) -> _Opened:
        """Make a plan if there is none, get memory for its windows, and prepare the capture. Raise ConfigError if the
        windows need more than ``snapshot.host_memory_limit_bytes``."""
        view = OperatorView(
            self._engine.model_chunks,
            self._engine.optimizer,
            groups=self._engine.groups,
            num_layers=self._config.model.num_layers,
        )
        plan, cause = self._plan, "the state was moved or built again"
        if plan is None:
            cause = "" if self._opened is None else "snapshot.policy has changed"
            plan = self._policy.plan(Demand(shards_by_rank=view.shards_by_rank), self._context())
        needed = self._checked_host_bytes(plan, view)
        self._memory = self._take_memory(iteration, plan, view, held_bytes)
        self._stats.watch(self._memory.arena)
        return self._lay_out(iteration, plan, view, self._memory, needed, cause, None)

    def _checked_host_bytes(self, plan: WindowPlan, view: OperatorView) -> int:
        places, shards = self._config.rank_places, view.shards_by_rank
        nodes = host_bytes(window_bytes_by_rank(plan, shards), places, self._assignment, plans_again=self._plans_again)
        needed = max(node.total_bytes for node in nodes)
        check_limit(needed, self._config.snapshot.host_memory_limit_bytes)
        return needed

    def _take_memory(self, iteration: int, plan: WindowPlan, view: OperatorView, held_bytes: int) -> WindowMemory:
        """Return memory for windows of ``plan``: the current memory if it is large enough on all ranks, otherwise new
        memory. If ``held_bytes`` is not 0, the job continues from a window in buffers of this size, on this node or its
        peers. Request this size unless ``plan`` needs more: another size can replace buffers and lose the window."""
        exact = window_bytes(plan, view.shards)
        needed = max(exact, held_bytes) if held_bytes else buffer_bytes(exact, plans_again=self._plans_again)
        is_outgrown = self._memory is not None
        if self._memory is not None:
            if not self._collectives.any(exact > self._memory.arena.window_bytes):
                return self._memory
            self._report_plan_problem(
                iteration,
                "windows no longer fit the allocated memory, so larger memory replaces it; until the next commit, no "
                "window is in memory",
            )
            self._buffers = WindowBuffers(committed=self._buffers.committed)
            self._release_memory()
        # All ranks get new memory, also ranks with enough memory: a window must be on all ranks or on none.
        return WindowMemory(self._client.allocate(needed, new=is_outgrown), self._engine.device)

    def _release_memory(self) -> None:
        # Call this before new memory is allocated, because a node may not have enough memory for both.
        if self._memory is not None:
            self._memory.release()
        self._memory = None

    def _lay_out(
        self,
        iteration: int,
        plan: WindowPlan,
        view: OperatorView,
        memory: WindowMemory,
        needed: int,
        cause: str,
        partial: PartialWindows | None,
    ) -> _Opened:
        # ``partial`` has the records of the windows in memory. They are kept if the new plan has the same layout.
        self._plan = plan
        capture = self._capture(plan, view, memory)
        self._stats.end_captures(self.figures)
        if self._expert_policy is None or plan.partial is None:
            partial = None
        elif partial is None or not partial.replan(plan):
            demand = Demand(shards_by_rank=view.shards_by_rank)
            partial = PartialWindows(self._expert_policy, plan, demand, planned_tokens(self._config))
        opened = _Opened(view=view, capture=capture, host_bytes=needed, partial=partial)
        self._report(planned_record(iteration, plan, view.shards_by_rank, needed, cause))
        return opened

    def _capture(self, plan: WindowPlan, view: OperatorView, memory: WindowMemory) -> WindowCapture:
        about = {"client": self._client, "copier": self._copier, "buffers": memory.buffers}
        return WindowCapture(plan, view.shards, **about, source=view.source, encode=view.encode)

    def _context(self) -> SnapshotContext:
        snapshot = self._config.snapshot
        bandwidth, seconds = snapshot.bandwidth_bytes_per_second, snapshot.iteration_seconds
        # Use the smallest bandwidth and iteration time of all ranks, because one plan must be fast enough on all ranks.
        if bandwidth is None:
            bandwidth = min(self._collectives.gather(capture_bandwidth(self._engine.device, self._copier)))
        if seconds is None:
            seconds = min(self._collectives.gather(statistics.median(self._iteration_seconds)))
        return SnapshotContext(
            bandwidth_bytes_per_second=bandwidth,
            iteration_seconds=seconds,
            activations=Activations.of(self._config.model, self._loads),
            storage_bytes_per_second=snapshot.storage_bandwidth_bytes_per_second,
            windows_per_file=snapshot.windows_per_file,
            policy=self._policy_text,
        )

    def _plan_again(self, iteration: int, opened: _Opened) -> _Opened:
        # Makes a new plan at the configured interval, if the old order of operators does not fit the measured loads.
        interval = self._config.snapshot.replan_interval_windows
        if interval == 0 or self._num_windows == 0 or self._num_windows % interval:
            return opened
        assert self._memory is not None, "no memory for windows is allocated"
        view = opened.view
        demand, context = Demand(shards_by_rank=view.shards_by_rank), self._context()
        cause = why_outdated(self._policy, demand, context, opened.plan)
        if cause is None:
            return opened
        plan = replan(self._policy, demand, context, opened.plan)
        if self._collectives.any(window_bytes(plan, view.shards) > self._memory.arena.window_bytes):
            self._report_plan_problem(
                iteration,
                f"a new snapshot plan is not used, because its windows do not fit the buffers: {plan.summary()}",
            )
            return opened
        return self._lay_out(iteration, plan, view, self._memory, opened.host_bytes, cause, opened.partial)

    def _report_committed(self, iteration: int) -> None:
        start, figures = self._buffers.committed, self.figures
        length = self._lengths.get(start, 0)
        record = self._stats.record(iteration, start_iteration=start, num_iterations=length, figures=figures)
        if not self._config.snapshot.copy_in_bubbles:
            record = replace(record, idle_copied_bytes=None)
        partial = None if self._opened is None else self._opened.partial
        if partial is not None:
            at_risk, lost = partial.shares(start, self._tokens())
            stored = partial.stored_share
            record = replace(record, at_risk_share=at_risk, lost_share=lost, stored_at_risk_share=stored)
            if self._config.snapshot.repay_capacity_share is not None:
                record = replace(record, owed_share=partial.owed_share(self._tokens()))
        self._report(record)

    def _report_delayed(self, iteration: int) -> None:
        if not self._is_delayed:
            waiting = 0 if self._memory is None else self._memory.arena.status(WAITING_BYTES)
            self._report(WindowDelayed(iteration=iteration, replicating_bytes=waiting))
        self._is_delayed = True

    def _report_problems(self, iteration: int) -> None:
        number = 0 if self._memory is None else self._memory.arena.status(NUM_PROBLEMS)
        if number > self._num_problems:
            self._num_problems = number
            for problem in self._client.problems():
                self._report_problem(iteration, problem["what"], problem["error"])

    def _report_plan_problem(self, iteration: int, error: str) -> None:
        # Only the first rank reports, because the problem concerns all ranks.
        if self._collectives.rank == 0:
            self._report_problem(iteration, "plan", error)

    def _report_problem(self, iteration: int, what: str, error: str) -> None:
        self._report(SnapshotProblem(iteration=iteration, node=self._node, what=what, error=error))
