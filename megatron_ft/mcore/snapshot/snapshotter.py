"""Captures windows on one rank, in step with all others, while training continues.

The policy decides, ``WindowCapture`` copies, the node's snapshot server owns and replicates. Values on which ranks must
agree come from the commit vote or from the same inputs on every rank.
"""

import json
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.config.policy import build_policy
from megatron_ft.events import Record, SnapshotProblem, WindowDelayed
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.snapshot.local_window import PLAN
from megatron_ft.mcore.snapshot.stats import SnapshotStats
from megatron_ft.mcore.state.operator_view import OperatorView
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.mcore.training.reporting import planned_record
from megatron_ft.planning.commit import Vote, WindowReport
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.activations import Activations
from megatron_ft.planning.snapshot.buffers import WindowBuffers
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.memory import buffer_bytes, host_bytes
from megatron_ft.planning.snapshot.peers import PeerAssignment
from megatron_ft.planning.snapshot.pieces import window_bytes
from megatron_ft.planning.snapshot.plan import WindowKey, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, SnapshotPolicy, replan
from megatron_ft.planning.snapshot.report import check_limit, whole_plan
from megatron_ft.snapshot.capture.capture import CaptureFigures, WindowCapture, WindowMemory
from megatron_ft.snapshot.capture.copier import capture_bandwidth, open_copier
from megatron_ft.snapshot.server.client import NUM_PROBLEMS, WAITING_BYTES, KeeperClient

Rows = tuple[tuple[int, ...], ...]
"""Tokens by layer and expert."""

Header = Callable[[int], dict[str, str]]
"""Function that builds the header of slice ``index``, except the vote: names to JSON text."""

_MEASURED_ITERATIONS = 3
_MAX_LOAD_RECORDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """Objects that are valid as long as tensors stay in place and the plan is in force."""

    view: OperatorView
    capture: WindowCapture
    host_bytes: int
    """Memory of windows and copies on the node that needs most."""

    @property
    def plan(self) -> WindowPlan:
        return self.capture.plan


class Snapshotter:
    """One rank's part in capturing windows; all ranks call all methods except ``settle`` in the same order.

    Args:
        client: the connection to this node's snapshot server.
        assignment: the nodes that hold copies of each node.
        header: builds the header of a slice, except the vote.
        report: takes records; called on every rank.
    """

    def __init__(
        self,
        config: JobConfig,
        engine: TrainingEngine,
        *,
        client: KeeperClient,
        assignment: PeerAssignment,
        node: int,
        header: Header,
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
        self._copier = open_copier(engine.device)
        self._buffers = WindowBuffers()
        self._start: int | None = None
        self._last_start: int | None = None
        self._lengths: dict[int, int] = {}
        self._kept_generation = -1
        self._num_windows = 0
        self._stats = SnapshotStats()
        self._num_problems = 0
        self._is_delayed = False
        self._iteration_seconds: deque[float] = deque(maxlen=10)
        self._loads: deque[Rows] = deque(maxlen=_MAX_LOAD_RECORDS)
        self._plan: WindowPlan | None = None
        self._memory: WindowMemory | None = None
        self._opened: _Opened | None = None
        engine.before_update = self.settle
        engine.window_report = self._window_report

    @property
    def figures(self) -> CaptureFigures:
        """Cost of capturing on this rank since the plan came into force."""
        return CaptureFigures() if self._opened is None else self._opened.capture.figures

    @property
    def needs_loads(self) -> bool:
        """Whether every iteration's loads are needed, for the order of operators."""
        return self._policy.trigger is not None

    def observe(self, load: torch.Tensor) -> None:
        """Record the tokens per expert of one iteration: int64 [num_layers, num_moe_experts] over the job."""
        self._loads.append(tuple(tuple(row) for row in load.tolist()))

    def resume(self, window: StoredWindow, plan: WindowPlan) -> None:
        """Keep ``window``, to which the job could return (``LocalWindow.stored``), until a newer one is committed."""
        start, self._plan, self._kept_generation = window.start_iteration, plan, window.generation
        self._buffers = WindowBuffers(held={start: window.buffer or 0}, committed=start)
        is_here = window.where == "own"
        if is_here:
            # Confirmed in this generation: otherwise the server may give its buffer to the next window.
            self._client.committed(start, captured_in=window.generation)
            self._lengths[start] = window.num_slices
        self._opened = self._open(self._engine.iteration, is_resumed=is_here)

    def capture_whole(self, vote: Vote) -> None:
        """Capture the present state at once, as a window of one slice, because after a recovery the newest committed
        window is old. Windows of the plan follow at their usual interval.

        Args:
            vote: vote of the newest iteration.
        """
        opened, memory, iteration = self._opened, self._memory, self._engine.iteration
        assert opened is not None and memory is not None, "resumed"
        shards, whole = opened.view.shards, whole_plan(opened.view.shards_by_rank, opened.plan.interval_iterations)
        # Both answers are gathered: a rank that captured alone would have a window that can never be committed.
        if self._collectives.any(window_bytes(whole, shards) > memory.arena.window_bytes):
            return self._report_plan_problem(iteration, "the whole state is not captured: it does not fit the buffers")
        if not self._collectives.all(bool(self._window_report().has_free_buffer)):
            return self._report_delayed(iteration)
        capture = self._capture(whole, opened.view, memory)
        self._begin(iteration, capture)
        header = {"vote": json.dumps(vote.to_record()), PLAN: json.dumps(opened.plan.to_json()), **self._header(0)}
        capture.begin_slice(self._buffers.held[iteration], 0, iteration=iteration, header=header)
        # At once: ``before_update`` waits for slices of the planned capture, not for this one.
        capture.settle()
        return None

    @property
    def plan(self) -> WindowPlan | None:
        """The plan in force; None before the first."""
        return self._plan

    @property
    def kept(self) -> WindowKey | None:
        """The newest committed window; None before the first."""
        start = self._buffers.committed
        return None if start < 0 else WindowKey(start_iteration=start, generation=self._kept_generation)

    def after_iteration(self, iteration: int, vote: Vote, seconds: float) -> None:
        """Forget windows that are no longer needed, and start to copy a slice of the complete state after
        ``iteration``."""
        self.settle()  # a skipped iteration made no update: its slice may still be under way
        self._iteration_seconds.append(seconds)
        self._apply_vote(iteration, vote)
        has_buffer = bool(vote.has_free_buffer)
        if self._opened is None:
            if not self._can_plan:
                return
            self._opened = self._open(iteration)
            # Memory that survived an earlier process may hold what is still being written to storage.
            has_buffer = self._collectives.all(bool(self._window_report().has_free_buffer))
        if self._start is None and not self._begin_window(iteration, self._opened, has_buffer=has_buffer):
            return
        assert self._start is not None, "no window has begun"
        failpoints.hit("capture", iteration)
        index = iteration - self._start
        header = {"vote": json.dumps(vote.to_record()), **self._header(index)}
        self._opened.capture.begin_slice(self._buffers.held[self._start], index, iteration=iteration, header=header)
        if index == self._opened.plan.num_iterations - 1:
            self._start = None

    def settle(self) -> None:
        """Wait for the slice in progress; afterwards its tensors may change."""
        if self._opened is not None:
            self._opened.capture.settle()

    def pause(self) -> None:
        """Abandon the window in progress before tensors move; the next one begins with their new places."""
        self.settle()
        if self._start is not None:
            self._buffers = self._buffers.abandon(self._start)
        self._stats.end_captures(self.figures)
        self._start = self._last_start = self._opened = None

    def persist_newest(self) -> None:
        """Request the newest committed window on storage; ``finish`` waits until it is there. Collective."""
        start = self._buffers.committed
        # One that the job went back to may lie with peers for some ranks: the parts of the others are no window.
        is_here = self._collectives.gather(start in self._lengths)
        if all(is_here):
            self._client.persist(start)
        elif any(is_here) and self._collectives.rank == 0:
            lacking = [rank for rank, found in enumerate(is_here) if not found]
            error = f"window {start} is not written: memory of their own nodes lacks the parts of ranks {lacking}"
            self._report_problem(self._engine.iteration, "persist", error)

    def finish(self) -> None:
        """Wait at the end of a run until all requested windows are on storage."""
        self.settle()
        if not self._client.flush():
            self._report_problem(
                self._engine.iteration, "persist", "timed out waiting until the newest window was written to storage"
            )
        self._report_problems(self._engine.iteration)

    def close(self) -> None:
        """Finish the slice in progress; release tensors, memory and the connection. The server keeps all windows."""
        self.settle()
        self._copier.close()
        self._engine.before_update, self._engine.window_report = None, WindowReport
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
            self._client.committed(self._buffers.committed)
            self._kept_generation = self._engine.groups.generation
            self._report_committed(iteration)
        # Given up by some rank: all leave it at the same vote, because the bits of later votes count the windows held.
        for start in before.held:
            if start > self._buffers.committed and start not in self._buffers.held:
                self._client.abandon(start)
                self._start = None if start == self._start else self._start
        self._report_problems(iteration)

    @property
    def _can_plan(self) -> bool:
        # Iterations are counted from when this object was made, so that all ranks plan after the same one.
        known = self._plan is not None or self._config.snapshot.iteration_seconds is not None
        return known or len(self._iteration_seconds) >= _MEASURED_ITERATIONS

    def _begin_window(self, iteration: int, opened: _Opened, *, has_buffer: bool) -> bool:
        if self._last_start is not None and iteration < self._last_start + opened.plan.interval_iterations:
            return False
        if self._buffers.free() is None or not has_buffer:
            self._report_delayed(iteration)
            return False
        self._opened = opened = self._plan_again(iteration, opened)
        self._is_delayed = False
        self._begin(iteration, opened.capture)
        self._start = iteration
        return True

    def _begin(self, iteration: int, capture: WindowCapture) -> None:
        self._buffers = self._buffers.begin(iteration, self._client.buffer_states().pinned)
        self._last_start = iteration
        self._lengths = {start: length for start, length in self._lengths.items() if start in self._buffers.held}
        self._lengths[iteration] = capture.plan.num_iterations
        self._num_windows += 1
        capture.begin_window(self._buffers.held[iteration], iteration)

    def _open(self, iteration: int, *, is_resumed: bool = False) -> _Opened:
        """Plan if there is no plan, allocate memory, lay out slices.

        Raises:
            ConfigError: windows need more than ``snapshot.host_memory_limit_bytes``; nothing was allocated.
        """
        view = OperatorView(
            self._engine.model_chunks,
            self._engine.optimizer,
            groups=self._engine.groups,
            num_layers=self._config.model.num_layers,
        )
        plan = self._plan
        if plan is None:
            plan = self._policy.plan(Demand(shards_by_rank=view.shards_by_rank), self._context())
        needed = self._checked_host_bytes(plan, view)
        self._memory = self._take_memory(iteration, plan, view, is_resumed=is_resumed)
        self._stats.watch(self._memory.arena)
        return self._lay_out(iteration, plan, view, self._memory, needed)

    def _checked_host_bytes(self, plan: WindowPlan, view: OperatorView) -> int:
        per_node, shards = self._config.launch.ranks_per_node, view.shards_by_rank
        nodes = host_bytes(plan, shards, per_node, self._assignment, plans_again=self._plans_again)
        needed = max(node.total_bytes for node in nodes)
        check_limit(needed, self._config.snapshot.host_memory_limit_bytes)
        return needed

    def _take_memory(self, iteration: int, plan: WindowPlan, view: OperatorView, *, is_resumed: bool) -> WindowMemory:
        """Allocate memory for windows of ``plan``, unless the present memory is large enough on every rank.

        Surviving memory holds the window from which the job has just continued, so then only the needed size is
        requested.
        """
        exact = window_bytes(plan, view.shards)
        needed = exact if is_resumed else buffer_bytes(plan, view.shards, plans_again=self._plans_again)
        is_outgrown = self._memory is not None
        if self._memory is not None:
            if not self._collectives.any(exact > self._memory.arena.window_bytes):
                return self._memory
            self._report_plan_problem(
                iteration,
                "windows no longer fit the allocated memory and get new memory; windows in the old memory are lost",
            )
            self._buffers = WindowBuffers(committed=self._buffers.committed)
            self._release_memory()
        # Also where it is still large enough: windows are on all ranks or on none.
        return WindowMemory(self._client.allocate(needed, new=is_outgrown), self._engine.device)

    def _release_memory(self) -> None:
        # Before more is allocated: a node need not have memory for both.
        if self._memory is not None:
            self._memory.release()
        self._memory = None

    def _lay_out(
        self, iteration: int, plan: WindowPlan, view: OperatorView, memory: WindowMemory, needed: int
    ) -> _Opened:
        # ``plan`` is in force from now on.
        self._plan = plan
        capture = self._capture(plan, view, memory)
        self._stats.end_captures(self.figures)
        opened = _Opened(view=view, capture=capture, host_bytes=needed)
        self._report(planned_record(iteration, plan, view.shards_by_rank, needed))
        return opened

    def _capture(self, plan: WindowPlan, view: OperatorView, memory: WindowMemory) -> WindowCapture:
        copier, buffers = self._copier, memory.buffers
        return WindowCapture(plan, view.shards, client=self._client, copier=copier, buffers=buffers, source=view.source)

    def _context(self) -> SnapshotContext:
        snapshot = self._config.snapshot
        bandwidth, seconds = snapshot.bandwidth_bytes_per_second, snapshot.iteration_seconds
        # The smallest of all ranks: there is one plan for the job, and no rank may exceed its budget.
        if bandwidth is None:
            bandwidth = min(self._collectives.gather(capture_bandwidth(self._engine.device, self._copier)))
        if seconds is None:
            seconds = min(self._collectives.gather(statistics.median(self._iteration_seconds)))
        return SnapshotContext(
            bandwidth_bytes_per_second=bandwidth,
            iteration_seconds=seconds,
            activations=Activations.of(self._config.model, self._loads),
        )

    def _plan_again(self, iteration: int, opened: _Opened) -> _Opened:
        # Where it is due, with the measurements since, and only if the order of operators does not fit any more.
        interval = self._config.snapshot.replan_interval_windows
        if interval == 0 or self._num_windows == 0 or self._num_windows % interval:
            return opened
        assert self._memory is not None, "opened"
        view = opened.view
        plan = replan(self._policy, Demand(shards_by_rank=view.shards_by_rank), self._context(), opened.plan)
        if plan == opened.plan:
            return opened
        if self._collectives.any(window_bytes(plan, view.shards) > self._memory.arena.window_bytes):
            self._report_plan_problem(
                iteration, f"a new snapshot plan is not used, because it does not fit the buffers: {plan.summary()}"
            )
            return opened
        return self._lay_out(iteration, plan, view, self._memory, opened.host_bytes)

    def _report_committed(self, iteration: int) -> None:
        start, figures = self._buffers.committed, self.figures
        length = self._lengths.get(start, 0)
        self._report(self._stats.record(iteration, start_iteration=start, num_iterations=length, figures=figures))

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
        # Once for the job.
        if self._collectives.rank == 0:
            self._report_problem(iteration, "plan", error)

    def _report_problem(self, iteration: int, what: str, error: str) -> None:
        self._report(SnapshotProblem(iteration=iteration, node=self._node, what=what, error=error))
