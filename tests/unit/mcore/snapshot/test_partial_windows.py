"""Tests windows that leave out experts of a training engine, with a snapshot server in this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.events import SnapshotPlanned, SnapshotProblem, WindowCommitted
from megatron_ft.planning.iteration import WindowReport
from megatron_ft.snapshot.capture.capture import Header
from megatron_ft.testing import engines
from tests.helpers.sharing import chosen
from tests.unit.mcore.snapshot.test_snapshotter import SNAPSHOTS, Run
from tests.unit.snapshot.server.served import Served

pytestmark = pytest.mark.slow  # trains

POLICY = {
    "_target_": "megatron_ft.planning.snapshot.partial_experts.PartialExperts",
    "num_experts": 1,
    "max_lost_share": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "masters and moments": {},
    "moments": {"leave_out": ["moments"]},
    "masters": {"leave_out": ["masters"]},
    "every second iteration": {"interval_iterations": 2},
    "by load": {"choice": {"_target_": "megatron_ft.planning.snapshot.expert_choice.LoadAware"}},
    "selective": {
        "_target_": "megatron_ft.planning.snapshot.partial_experts.SelectiveExperts",
        "num_experts": 2,
        "max_lost_share": ...,
    },
}


class Recorder:
    """Trains, and records the bytes of every piece after every iteration."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.states: dict[int, dict[Any, bytes]] = {}
        self.loads: dict[int, list[list[int]]] = {}

    def train(self, num_iterations: int, seconds: float = 0.1) -> None:
        for _ in range(num_iterations):
            engine = self.run.engine
            result = engine.run_iteration(engine.iteration + 1)
            self.loads[engine.iteration] = result.expert_load.tolist()
            self.states[engine.iteration] = self.pieces()
            self.run.snapshots.observe(result.expert_load)
            self.run.snapshots.after_iteration(engine.iteration, result.vote, seconds)
            self.run.snapshots.settle()
            if self.run.held:
                self.run.wait_hashed()

    def pieces(self) -> dict[Any, bytes]:
        """Return the bytes of every piece of the present state."""
        from tests.helpers.replay_scenarios import view_of

        view, plan = view_of(self.run.engine), self.run.snapshots.plan
        if plan is None:
            from megatron_ft.planning.snapshot.plan import WindowPlan

            plan = WindowPlan.dense(shard for shards in view.shards_by_rank for shard in shards)
        return {
            piece[:6]: view.source(piece).detach().contiguous().reshape(-1).view(_bytes()).numpy().tobytes()
            for piece in view.pieces(plan, 0)
        }

    def newest(self) -> tuple[Any, memoryview]:
        """Fetch the newest committed window."""
        entries = [entry for entry in self.run.client.inventory(0) if entry.committed]
        window, payload = self.run.client.fetch(0, entries[-1].key, node=0)
        return window, payload


def _bytes() -> Any:
    import torch

    return torch.uint8


EXTENDED = ("masters", "moments", "every second iteration")
"""Variants whose features another one also has, or ``test_partial_experts.py``."""


@pytest.fixture(params=chosen(VARIANTS, EXTENDED))
def recorder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorder]:
    policy = {key: value for key, value in {**POLICY, **VARIANTS[request.param]}.items() if value is not ...}
    served = Served(tmp_path)
    served.persister.start()
    config = engines.micro_config({**SNAPSHOTS, "snapshot.policy": policy, "precision.params_dtype": "bf16"})
    with engines.engine_of(config) as engine:
        run = Run(engine, served)
        yield Recorder(run)
        run.snapshots.close()
    served.close()


def test_every_piece_is_of_the_iteration_that_the_window_states(recorder: Recorder) -> None:
    """Compares every byte of every committed window with the state after the iteration from which it was captured."""
    seen, num_carried = set(), 0
    for _ in range(14):
        recorder.train(1)
        if not recorder.run.of_kind(WindowCommitted):
            continue
        window, payload = recorder.newest()
        if window.start_iteration in seen:
            continue
        seen.add(window.start_iteration)
        (part,) = window.slices
        captured_at = part.captured_at or (part.iteration,) * len(part.pieces)
        for piece, iteration in zip(part.pieces, captured_at, strict=True):
            assert bytes(payload[piece.offset : piece.end]) == recorder.states[iteration][piece[:6]], (piece, iteration)
            num_carried += iteration != part.iteration
        at_risk = json.loads(part.header.get("tokens_at_risk", "null"))
        if part.captured_at is None:
            assert at_risk is None
            continue
        for layer, row in enumerate(at_risk):
            for number, tokens in enumerate(row):
                name = f"decoder.layers.{layer}.mlp.experts.local_experts.{number}."
                pairs = zip(part.pieces, captured_at, strict=True)
                oldest = min(iteration for piece, iteration in pairs if piece.parameter.startswith(name))
                log = [recorder.loads[number_of][layer][number] for number_of in range(oldest + 1, part.iteration + 1)]
                assert tokens == sum(log)
    assert len(seen) >= 5 and num_carried and not recorder.run.of_kind(SnapshotProblem)


def test_a_restored_window_gives_exactly_the_state_that_it_contains(recorder: Recorder) -> None:
    from megatron_ft.mcore.groups import Collectives
    from megatron_ft.mcore.snapshot.local_window import EXTRAS, LocalWindow, Replayer, carry_out
    from tests.helpers.replay_scenarios import scramble

    engine = recorder.run.engine

    def header(index: int) -> Header:
        state = engine.train_state()
        return lambda: {EXTRAS: json.dumps(state.to_json())}

    recorder.run.snapshots._header = header
    recorder.train(11)
    window, payload = recorder.newest()
    (part,) = window.slices
    assert part.captured_at is not None
    (entry,) = [entry for entry in recorder.run.client.inventory(0) if entry.key == window.key]
    local = LocalWindow(window=window, slices=(payload[part.offset : part.end],), stored=entry)
    ledger = engine.history.tokens
    scramble(engine)
    result = carry_out(local.replay_plan(), Replayer.open(engine, local, Collectives(engine.groups.vote)))
    assert (result.num_iterations, engine.iteration) == (0, part.iteration)
    found = recorder.pieces()
    for piece, iteration in zip(part.pieces, part.captured_at, strict=True):
        assert found[piece[:6]] == recorder.states[iteration][piece[:6]], (piece, iteration)
    at_risk = local.at_risk
    assert at_risk is not None and engine.history.tokens is not None and ledger is not None
    assert engine.history.tokens.lost == at_risk and not any(map(any, ledger.lost))
    log = [recorder.loads[number] for number in range(1, part.iteration + 1)]
    assert engine.history.tokens.processed == tuple(
        tuple(sum(loads[layer][expert] for loads in log) for expert in range(4)) for layer in range(len(at_risk))
    )


def test_a_window_that_was_given_up_is_no_source_of_later_windows(recorder: Recorder) -> None:
    recorder.train(5)
    mine = recorder.run.engine.window_report
    recorder.run.engine.window_report = lambda: WindowReport(replicated_windows=0b01, given_up_windows=0b10)
    recorder.train(1)
    recorder.run.engine.window_report = mine
    recorder.train(6)
    window, payload = recorder.newest()
    (part,) = window.slices
    for piece, iteration in zip(part.pieces, part.captured_at or (), strict=False):
        assert bytes(payload[piece.offset : piece.end]) == recorder.states[iteration][piece[:6]], (piece, iteration)
    assert window.start_iteration >= 9 and not recorder.run.of_kind(SnapshotProblem)


@pytest.mark.parametrize("num_experts", [None, 1])
def test_a_new_plan_keeps_the_records_of_earlier_windows(tmp_path: Path, num_experts: int | None) -> None:
    """Iterations become ten times longer, so the budget of a capture grows. A plan that depends on it is made again."""
    served = Served(tmp_path)
    served.persister.start()
    changes = {
        "snapshot.policy": POLICY | {"num_experts": num_experts},
        "snapshot.bandwidth_bytes_per_second": 1e4,
        "snapshot.iteration_seconds": None,
        "snapshot.replan_interval_windows": 1,
    }
    with engines.engine_of(engines.micro_config({**SNAPSHOTS, **changes})) as engine:
        recorder = Recorder(Run(engine, served))
        recorder.train(8)
        num_before = len(recorder.run.of_kind(WindowCommitted))
        recorder.train(10, seconds=1.0)
        causes = [event.cause for event in recorder.run.of_kind(SnapshotPlanned)]
        assert len(causes) == 1 if num_experts else len(causes) > 1
        assert all("the budget of an iteration changed" in cause for cause in causes[1:])
        committed = recorder.run.of_kind(WindowCommitted)[num_before:]
        assert len(committed) >= 8 and all(event.at_risk_share > 0 for event in committed)
        window, payload = recorder.newest()
        (part,) = window.slices
        for piece, iteration in zip(part.pieces, part.captured_at or (), strict=True):
            assert bytes(payload[piece.offset : piece.end]) == recorder.states[iteration][piece[:6]], (piece, iteration)
        recorder.run.snapshots.close()
    served.close()
