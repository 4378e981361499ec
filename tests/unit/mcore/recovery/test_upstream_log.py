"""Tests a rank's upstream log with planned, committed and late windows: space, limits, and reports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError
from megatron_ft.events import Record, UpstreamLogFull, UpstreamLogPlanned
from megatron_ft.operators import OperatorId
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.snapshot.plan import Unit, WindowKey, WindowPlan

TENSOR_BYTES = 16 * 2 * 32 * 4
"""Bytes of a tensor: 16 tokens of 2 samples with hidden size 32, in FP32."""
NUM_MICROBATCHES = 3


def windows(num_iterations: int, interval_iterations: int | None = None) -> WindowPlan:
    units = [Unit(operator=OperatorId(layer=number, kind="non_expert")) for number in range(num_iterations)]
    return WindowPlan(
        slices=tuple((unit,) for unit in units), interval_iterations=interval_iterations or num_iterations
    )


class Run:
    """Replacement for the trainer of a rank of the first of two stages, on two nodes of two ranks."""

    def __init__(self, plan: WindowPlan | None, **upstream_log: int) -> None:
        from megatron_ft.mcore.pipeline.communicator import Boundaries

        self.config = from_dict(
            {
                "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16},
                "training": {"global_batch_size": 12, "micro_batch_size": 2},
                "parallel": {"pipeline_model_parallel_size": 2},
                "launch": {"num_nodes": 2, "ranks_per_node": 2},
                "recovery": {"keep_layout": True},
                "upstream_log": {"commit_lag_iterations": 1, **upstream_log},
            }
        )
        self.boundaries = Boundaries()
        pg = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 0))
        cpu = torch.device("cpu")
        self.engine = SimpleNamespace(boundaries=self.boundaries, pg=pg, device=cpu, iteration=0, config=self.config)
        self.snapshots: Any = SimpleNamespace(plan=plan, kept=None)
        self.output: list[Record] = []
        self.report = self.output.append

    def train(self, num_iterations: int) -> None:
        from megatron_ft.mcore.recovery.upstream_log import keep_log

        for iteration in range(self.engine.iteration + 1, self.engine.iteration + num_iterations + 1):
            with self.boundaries.logging(iteration, 0):
                for number in range(NUM_MICROBATCHES):
                    self.send(float(iteration * 10 + number))
            self.boundaries.commit(vote(iteration))
            self.engine.iteration = iteration
            keep_log(self.engine, self.snapshots, self.report)  # type: ignore[arg-type]

    def send(self, value: float) -> None:
        if self.boundaries.log is not None:
            self.boundaries.log.append("forward", torch.full((16, 2, 32), value))

    def commit_window(self, start_iteration: int) -> None:
        self.snapshots.kept = WindowKey(start_iteration=start_iteration, generation=0)

    @property
    def logged(self) -> tuple[int, ...]:
        log = self.boundaries.log
        return () if log is None else log.iterations


def vote(iteration: int) -> Vote:
    values = {"grad_norm": 1.0, "clip_coefficient": 1.0, "loss_scale": 1.0, "loss": 2.0, "aux_loss": 0.0, "z_loss": 0.0}
    return Vote(generation=0, iteration=iteration, found_inf=False, num_tokens=6, **values)  # type: ignore[arg-type]


def planned(iteration: int, iterations_kept: int) -> UpstreamLogPlanned:
    """Each node has the two ranks of one stage. Each rank sends every microbatch to the other stage."""
    log_bytes = iterations_kept * NUM_MICROBATCHES * TENSOR_BYTES
    return UpstreamLogPlanned(
        iteration=iteration, iterations_kept=iterations_kept, log_bytes=log_bytes, node_bytes=2 * log_bytes
    )


def test_memory_is_taken_with_the_first_plan_and_again_for_a_longer_one() -> None:
    run = Run(None)
    run.train(2)
    assert run.boundaries.log is None and not run.output
    run.snapshots.plan = windows(2)
    run.train(3)
    assert run.output == [planned(3, 6)] and run.logged == (4, 5)
    run.snapshots.plan = windows(1)
    run.train(1)
    assert run.output == [planned(3, 6)], "more than shorter windows need"
    run.snapshots.plan = windows(3)
    run.train(1)
    assert run.output[1:] == [planned(7, 8)] and run.logged == (4, 5, 6, 7)
    log = run.boundaries.log
    assert log is not None and log.num_bytes == 8 * NUM_MICROBATCHES * TENSOR_BYTES
    assert [float(kept.view(-1)[0]) for _, kept in log.entries(5, "forward")] == [50.0, 51.0, 52.0]


def test_dense_states_at_intervals_are_kept_for_the_interval() -> None:
    run = Run(windows(1, 4))
    run.train(1)
    assert run.output == [planned(1, 4 + 1 + 2)]


def test_an_evaluation_after_an_iteration_that_broke_is_not_logged() -> None:
    run = Run(windows(2))
    run.train(2)
    log = run.boundaries.log
    assert log is not None
    with pytest.raises(RuntimeError, match="gone"), run.boundaries.logging(3, 0):
        run.send(30.0)
        raise RuntimeError("a rank is gone")
    num_tensors = log.figures.num_tensors
    for _ in range(2 * NUM_MICROBATCHES):
        run.send(0.0)
    assert log.figures.num_tensors == num_tensors
    run.train(1)
    assert [float(kept.view(-1)[0]) for _, kept in log.entries(3, "forward")] == [30.0, 31.0, 32.0]


def test_what_lies_before_the_committed_window_is_let_go() -> None:
    run = Run(windows(2))
    run.train(4)
    run.commit_window(3)
    run.train(1)
    assert run.logged == (4, 5)


def test_an_overflow_is_said_once_until_there_is_room_again() -> None:
    run = Run(windows(2))
    run.train(1)
    run.commit_window(1)
    run.train(6)
    assert run.logged == (2, 3, 4, 5, 6, 7) and run.output[1:] == []
    run.train(3)
    assert run.output[1:] == [UpstreamLogFull(iteration=8, iterations_kept=6)]
    run.commit_window(10)
    run.train(7)
    assert run.logged == (12, 13, 14, 15, 16, 17)
    assert run.output[2:] == [], "iteration 11 had begun before the window was committed: the same row"
    run.train(1)
    assert run.output[2:] == [UpstreamLogFull(iteration=18, iterations_kept=6)]


def test_logs_over_the_limit_are_refused_before_memory_is_taken() -> None:
    node_bytes = planned(0, 6).node_bytes
    allowed = Run(windows(2), memory_limit_bytes=node_bytes)
    allowed.train(1)
    assert allowed.output == [planned(1, 6)]
    message = rf"^upstream_log\.memory_limit_bytes={node_bytes - 1}: must be at least {node_bytes} \("
    refused = Run(windows(2), memory_limit_bytes=node_bytes - 1)
    with pytest.raises(ConfigError, match=message):
        refused.train(1)
    assert refused.boundaries.log is None and not refused.output
    allowed.snapshots.plan = windows(3)
    with pytest.raises(ConfigError, match=rf"must be at least {planned(0, 8).node_bytes} \("):
        allowed.train(1)
    assert allowed.boundaries.log is not None and allowed.boundaries.log.num_iterations == 6


def test_nothing_is_logged_where_no_layout_is_kept() -> None:
    run = Run(windows(2))
    run.config.recovery.keep_layout = False
    run.train(2)
    assert run.boundaries.log is None and not run.output


def test_nothing_is_logged_where_all_ranks_start_again_after_a_loss() -> None:
    run = Run(windows(2))
    run.config.recovery.keep_processes = False
    run.train(2)
    assert run.boundaries.log is None and not run.output
