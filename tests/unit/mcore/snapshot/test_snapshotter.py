"""Tests the capture of windows on one rank, with a snapshot server in this process."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.events import Record, SnapshotPlanned, SnapshotProblem, WindowCommitted, WindowDelayed
from megatron_ft.planning.iteration import WindowReport
from megatron_ft.snapshot.server.store import PAGE_BYTES
from megatron_ft.snapshot.window import Slice
from megatron_ft.testing import engines
from megatron_ft.testing.snapshot_servers import wait_until
from tests.unit.snapshot.server.served import Served
from transformer_engine_ext.formats import E4M3
from transformer_engine_ext.quantized import quantize_blocks

pytestmark = pytest.mark.slow  # trains

SNAPSHOTS = {
    "snapshot.num_peer_copies": 0,
    "snapshot.bandwidth_bytes_per_second": 1e9,
    "snapshot.iteration_seconds": 0.1,
}


class Run:
    """Engine that trains and captures."""

    def __init__(self, engine: Any, served: Served, **changes: object) -> None:
        from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
        from megatron_ft.planning.snapshot.memory import PeerAssignment

        self.engine = engine
        self.client = served.client(**changes)
        self.output: list[Record] = []
        self.snapshots = Snapshotter(
            engine.config,
            engine,
            client=self.client,
            assignment=PeerAssignment.of(["node0"], 0),
            node=0,
            header=lambda index: dict,
            report=self.output.append,
        )

    def train(self, num_iterations: int, *, window_iterations: int = 1) -> None:
        """Run iterations, and let everything except storage work. A window has ``window_iterations`` slices."""
        for number in range(num_iterations):
            result = self.engine.run_iteration(self.engine.iteration + 1)
            self.snapshots.after_iteration(self.engine.iteration, result.vote, 0.1)
            self.snapshots.settle()
            if (number + 1) % window_iterations == 0:
                self.wait_hashed()

    def wait_hashed(self) -> None:
        """Wait until the newest window is hashed."""
        wait_until(lambda: self.held[-1] in self.client.buffer_states().replicated.values(), "it is hashed")

    @property
    def held(self) -> list[int]:
        """Return the start iterations of the windows in this rank's memory."""
        return [entry.start_iteration for entry in self.client.inventory(0)]

    def of_kind(self, kind: type) -> list[Any]:
        """Return the reported events of one kind."""
        return [record for record in self.output if isinstance(record, kind)]


@contextlib.contextmanager
def run_of(folder: Path, *, interval_iterations: int) -> Iterator[tuple[Run, Served]]:
    """Capture snapshots at an interval. Each is to be written to storage, which is blocked."""
    target = "megatron_ft.planning.snapshot.dense.DenseInterval"
    policy = {"_target_": target, "interval_iterations": interval_iterations}
    with run_with(folder, {"snapshot.policy": policy}) as found:
        yield found


@contextlib.contextmanager
def run_with(folder: Path, overrides: dict[str, Any]) -> Iterator[tuple[Run, Served]]:
    """Capture snapshots of a job with ``overrides``. Each is to be written to storage, which is blocked."""
    served = Served(folder)
    with engines.engine_of(engines.micro_config({**SNAPSHOTS, **overrides})) as engine:
        run = Run(engine, served)
        yield run, served
        run.snapshots.close()
    served.close()


def test_a_storage_that_never_answers_delays_windows_and_not_training(tmp_path: Path) -> None:
    with run_of(tmp_path, interval_iterations=1) as (run, served):
        run.train(8)
        assert run.engine.iteration == 8
        committed = [record.start_iteration for record in run.of_kind(WindowCommitted)]
        assert len(committed) >= 2 and run.held[-1] < 8, "every buffer is pinned sooner or later"
        assert [record.iteration for record in run.of_kind(WindowDelayed)] == [run.held[-1] + 1]
        served.persister.start()
        wait_until(lambda: not run.client.buffer_states().pinned, "storage has caught up")
        run.train(3)
        assert run.held[-1] == 11, "windows continue"
        run.snapshots.finish()
        assert not run.of_kind(SnapshotProblem)
        assert [path.parent.name for path in sorted(Path(served.url).rglob("*.window"))][-1] == "window_0000010.1"


def test_each_slice_contains_the_present_codes_of_fp8_weights(tmp_path: Path) -> None:
    """Codes are no tensors of training: they are computed for each slice, although tensors are found only once."""
    target = "megatron_ft.planning.snapshot.sparse_window.SparseWindow"
    overrides = {
        "precision.params_dtype": "bf16",
        "precision.fp8": "hybrid",
        "precision.fp8_recipe": "blockwise",
        "precision.regime": "fp8_fp32_fp32_fp32",
        "snapshot.policy": {"_target_": target, "min_window_iterations": 4},
    }
    with run_with(tmp_path, overrides) as (run, served):
        served.persister.start()
        captured, compared = run.client.captured, []

        def spy(buffer: int, index: int, part: Slice) -> None:
            view, memory = run.snapshots._opened.view, run.snapshots._memory.buffers[buffer]
            for piece in part.pieces:
                name = (piece.parameter, piece.tensor_part)
                if piece.component == "weight" and view._held[name].is_encoded:
                    weight = view.live(name, "weight", piece.start, piece.stop).float()
                    codes = quantize_blocks(weight, E4M3, start=piece.start).codes.view(torch.uint8)
                    found = memory.narrow(0, part.offset + piece.offset, piece.num_bytes)
                    compared.append((run.engine.iteration, index, bool(found.equal(codes))))
            captured(buffer, index, part)

        run.client.captured = spy
        run.train(8, window_iterations=4)
        assert {(iteration, index) for iteration, index, _ in compared} == {
            (first + index, index) for first in (1, 5) for index in range(3)
        }, "the last slice has only full state"
        assert all(is_equal for *_, is_equal in compared)


def test_a_window_that_another_rank_gave_up_is_never_committed_and_the_next_one_is(tmp_path: Path) -> None:
    with run_of(tmp_path, interval_iterations=2) as (run, served):
        served.persister.start()
        run.train(5)
        assert run.held == [3, 5]
        mine = run.engine.window_report
        run.engine.window_report = lambda: WindowReport(replicated_windows=0b01, given_up_windows=0b10)
        run.train(1)
        assert run.held == [3], "its buffers, here and with peers, are free for the next one"
        run.engine.window_report = mine
        run.train(2)
        assert [record.start_iteration for record in run.of_kind(WindowCommitted)] == [1, 3, 7]
        run.snapshots.finish()
        assert not run.of_kind(SnapshotProblem)


def test_a_window_that_only_peers_have_is_kept_until_the_next_commit(tmp_path: Path) -> None:
    with run_of(tmp_path, interval_iterations=1) as (run, served):
        served.persister.start()
        run.train(3)
        kept, plan = run.snapshots.kept, run.snapshots.plan
        assert kept is not None and plan is not None
        (window,) = [entry for entry in run.client.inventory(0) if entry.key == kept]
        run.snapshots.close()
        (tmp_path / "new").mkdir()
        new = Served(tmp_path / "new")
        new.persister.start()
        again = Run(run.engine, new, generation=2)
        # A peer has the window in larger buffers than the present plan needs.
        copy = replace(window, where="copy", buffer_bytes=window.buffer_bytes + PAGE_BYTES)
        again.snapshots.resume(copy, plan)
        windows = new.store.ranks[0].windows
        assert windows is not None and windows.window_bytes == copy.buffer_bytes
        confirmed = windows.confirmed
        assert confirmed is not None and confirmed.key == kept and confirmed not in windows
        again.train(2)
        assert windows.confirmed is windows.committed is not None and windows.committed.generation == 2
        again.snapshots.close()
        new.close()


@pytest.mark.parametrize("growth", [2, 1], ids=["outgrown here", "outgrown on another rank"])
def test_memory_that_is_too_small_is_unmapped_before_more_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, growth: int
) -> None:
    with run_of(tmp_path, interval_iterations=1) as (run, served):
        served.persister.start()
        allocate, arenas = run.client.allocate, []

        def spy(window_bytes: int, *, new: bool) -> Any:
            for arena in arenas:
                with pytest.raises(ValueError, match="released"):
                    arena.status(0)
            arenas.append(allocate(window_bytes * growth ** len(arenas), new=new))
            return arenas[-1]

        monkeypatch.setattr(run.client, "allocate", spy)
        run.train(3)
        run.snapshots.pause()
        arenas[0].window_bytes = 1  # as if windows had grown
        run.train(3)
        assert len(arenas) == 2 and run.held[-1] == 6
        assert [record.what for record in run.of_kind(SnapshotProblem)] == ["plan"]
        assert run.of_kind(WindowCommitted)[-1].start_iteration == 5
        run.snapshots.finish()
    with pytest.raises(ValueError, match="released"):
        arenas[1].status(0)


@pytest.mark.parametrize("interval_iterations", [1, 2], ids=["same policy", "other policy"])
@pytest.mark.parametrize("seconds", [0.1, None], ids=["measured before", "to be measured"])
def test_a_job_with_another_policy_plans_again_and_keeps_the_window_until_the_next_commit(
    tmp_path: Path, interval_iterations: int, seconds: float | None
) -> None:
    with run_of(tmp_path, interval_iterations=1) as (run, served):
        served.persister.start()
        run.train(3)
        kept, plan = run.snapshots.kept, run.snapshots.plan
        assert kept is not None and plan is not None and kept.start_iteration == 2
        run.snapshots.close()
        before, engine = run.engine.config.snapshot, run.engine
        policy = {**before.policy, "interval_iterations": interval_iterations}
        snapshot = replace(before, policy=policy, iteration_seconds=seconds)
        engine.use(replace(engine.config, snapshot=snapshot))
        after = Run(engine, served, generation=2)
        (window,) = [entry for entry in after.client.inventory(0) if entry.key == kept]
        # The header of a window contains the plan as JSON.
        after.snapshots.resume(window, type(plan).from_json(json.loads(json.dumps(plan.to_json()))))
        if interval_iterations == 2 and seconds is None:
            for _ in range(2):
                result = engine.run_iteration(engine.iteration + 1)
                after.snapshots.after_iteration(engine.iteration, result.vote, 0.1)
            assert after.snapshots.kept == kept and kept.start_iteration in after.held
        after.train(4, window_iterations=interval_iterations)
        causes = [record.cause for record in after.of_kind(SnapshotPlanned)]
        moved = "the state was moved or built again"
        assert causes == ([moved] if interval_iterations == 1 else [moved, "snapshot.policy has changed"])
        starts = [record.start_iteration for record in after.of_kind(WindowCommitted)]
        assert starts and all(next_ - start == interval_iterations for start, next_ in itertools.pairwise(starts))
        assert not after.of_kind(SnapshotProblem)
        after.snapshots.close()


def test_the_whole_state_is_not_captured_if_it_does_not_fit_the_buffers(tmp_path: Path) -> None:
    with run_of(tmp_path, interval_iterations=1) as (run, _):
        run.train(1)
        run.snapshots._memory.arena.window_bytes //= 2  # type: ignore[union-attr]
        run.snapshots.capture_whole(run.engine.newest_vote)
        (problem,) = run.of_kind(SnapshotProblem)
        assert "does not fit the window buffers" in problem.error
