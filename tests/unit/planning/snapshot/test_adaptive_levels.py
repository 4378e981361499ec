"""Tests what follows from the timeline of MoC-System: its buffers (figure 9), its two levels (figure 8), and the
numbers of experts that hide captures and files (section 5.3)."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config.job import JobConfig
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.expert_choice import LoadAware, Sequential
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.planning.snapshot.memory import NUM_BUFFERS, WindowBuffers
from megatron_ft.planning.snapshot.partial_experts import (
    ExpertBytes,
    PartialExperts,
    SelectiveExperts,
    stores_fewer_experts,
)
from megatron_ft.planning.snapshot.partial_windows import PartialWindows
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext, why_outdated
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.testing import engines
from megatron_ft.testing.demands import expert, rest, shard
from tests.unit.planning.snapshot.test_partial_experts import EXPERTS, LAYERS, RANKS, demand, pieces


@dataclass(kw_only=True)
class Timeline:
    """Times of a job that captures a window after every iteration, if a buffer is free, and writes every window to
    storage, one after the other. All times are in seconds."""

    captured: list[tuple[int, float, float]] = field(default_factory=list)
    """Buffer, start and end of each capture (snapshot status)."""
    written: list[tuple[int, float, float]] = field(default_factory=list)
    """Buffer, start and end of each file (persist status)."""
    kept: list[int] = field(default_factory=list)
    """Buffer with the newest written window, after each file (recovery status)."""
    updates: list[float] = field(default_factory=list)
    """Start of the update of each iteration."""


def timeline(passes: int, update: int, capture: int, write: int, num_iterations: int) -> Timeline:
    """Let the job's buffers run through the three states of figure 9. An update waits for the capture in progress."""
    found, buffers, now, storage_free = Timeline(), WindowBuffers(), 0.0, 0.0
    ends: list[tuple[float, int]] = []
    for start in range(num_iterations):
        for end, done in [each for each in ends if each[0] <= now]:
            buffers = buffers.after_commit(done)
            found.kept.append(buffers.held[done])
            ends.remove((end, done))
        captured_at = now
        if buffers.free() is not None:
            buffers = buffers.begin(start)
            captured_at = now + capture
            found.captured.append((buffers.held[start], now, captured_at))
            began = max(captured_at, storage_free)
            storage_free = began + write
            found.written.append((buffers.held[start], began, storage_free))
            ends.append((storage_free, start))
        found.updates.append(max(now + passes, captured_at))
        now = found.updates[-1] + update
    return found


def test_the_buffers_of_figure_9() -> None:
    """A capture is shorter than the forward and backward passes, and a file is written before the next capture ends."""
    found = timeline(passes=4, update=1, capture=2, write=4, num_iterations=8)
    first = [buffer for buffer, _, _ in found.captured]
    assert first[:3] == [0, 1, 2] and first[3] == 0, "b1, b2, b3, b1"
    assert [buffer for buffer, _, _ in found.written] == first
    assert found.kept[:3] == [0, 1, 2]
    assert [began for _, began, _ in found.written] == [end for _, _, end in found.captured], "no file waits"
    assert found.updates == [5.0 * iteration + 4 for iteration in range(8)], "no update waits"


times = st.integers(1, 40)


@given(passes=times, update=times, capture=times, write=times)
def test_the_formulas_of_the_timeline(passes: int, update: int, capture: int, write: int) -> None:
    """O_save is the part of a capture that the next passes do not hide. The time of a file bounds the interval from
    below (sections 5.1 to 5.3). No buffer is in two states at once."""
    found = timeline(passes, update, capture, write, 120)
    starts = {start for _, start, _ in found.captured}
    now = 0.0
    for until in found.updates:
        assert until - now == (max(passes, capture) if now in starts else passes)
        now = until + update
    iteration = max(passes, capture) + update
    intervals = np.diff([start for _, start, _ in found.captured])
    if capture + write <= 2 * iteration and write <= iteration:
        assert (intervals == iteration).all(), "storage keeps up, so each iteration has a window"
    assert np.mean(np.diff([end for _, _, end in found.written])) >= write
    for (_, began, ended), (_, later, _) in zip(found.written, found.written[1:], strict=False):
        assert ended <= later and began < ended, "one file at a time"
    for buffer in range(NUM_BUFFERS):
        captures = [each for each in found.captured if each[0] == buffer]
        files = [each for each in found.written if each[0] == buffer]
        for number, (_, start, _) in enumerate(captures[1:]):
            assert start >= files[number][2], "a buffer is captured again only when its file is written"


def peaks(policy: Any) -> list[int]:
    """Count the most bytes of any rank with 1, 2, ... experts of each layer. Experts in turn are known in advance."""
    state = ExpertBytes.of(demand(), ("master", "exp_avg", "exp_avg_sq"))
    if not isinstance(policy.choice, Sequential):
        return [state.most_captured(number) for number in range(1, EXPERTS + 1)]
    nothing = np.zeros((len(LAYERS), EXPERTS), dtype=np.int64)
    return [
        max(int(state.captured(Sequential().choose(turn, number, nothing, RANKS)).max()) for turn in range(EXPERTS))
        for number in range(1, EXPERTS + 1)
    ]


@pytest.mark.parametrize("policy", [PartialExperts(), PartialExperts(choice=LoadAware()), SelectiveExperts()], ids=str)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.9, 0.999999, 1.0])
@pytest.mark.parametrize(("interval", "per_file"), [(1, 1), (1, 3), (4, 1)])
def test_files_have_as_many_experts_as_storage_can_take(
    policy: Any, share: float, interval: int, per_file: int
) -> None:
    """A file with one more expert would not be written when the next one is due."""
    policy, sizes, seconds = replace(policy, interval_iterations=interval), peaks(policy), 2.0
    budget = share * sizes[-1]
    given = SnapshotContext(
        bandwidth_bytes_per_second=1e9,
        iteration_seconds=seconds,
        storage_bytes_per_second=budget / (seconds * interval * per_file) * (1 + 1e-12),
        windows_per_file=per_file,
    )
    plan = policy.plan(demand(), given)
    wanted = max((number for number, size in enumerate(sizes, 1) if size <= budget), default=1)
    assert plan.partial is not None and plan.partial.num_experts == EXPERTS
    assert plan.partial.num_persisted_experts == wanted
    assert f"a file has {wanted} of them, {sizes[wanted - 1]:,} bytes" in plan.reason
    assert WindowPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_file_never_has_more_experts_than_its_window_and_a_given_number_stays() -> None:
    given = SnapshotContext(bandwidth_bytes_per_second=1e9, iteration_seconds=1.0, storage_bytes_per_second=1e9)
    plan = PartialExperts(num_experts=3).plan(demand(), given)
    assert plan.partial is not None and plan.partial.num_persisted_experts == 3
    fixed = PartialExperts(num_experts=3, num_persisted_experts=2).plan(demand(), given)
    assert fixed.partial is not None and fixed.partial.num_persisted_experts == 2
    plain = replace(given, storage_bytes_per_second=None)
    unset = PartialExperts(num_experts=3).plan(demand(), plain)
    assert unset.partial is not None and unset.partial.num_persisted_experts is None
    assert why_outdated(PartialExperts(num_experts=3), demand(), plain, unset) is None
    faster = replace(plain, bandwidth_bytes_per_second=1e12)
    assert why_outdated(PartialExperts(num_experts=3), demand(), faster, unset) is None, "no number depends on it"
    chosen = PartialExperts().plan(demand(), plain)
    assert "the budget of an iteration changed" in (why_outdated(PartialExperts(), demand(), faster, chosen) or "")
    reason = why_outdated(PartialExperts(num_experts=3), demand(), given, unset)
    assert reason == "the number of experts of a file has not been chosen yet"


def test_the_chosen_numbers_hide_captures_and_files() -> None:
    """Both numbers are the largest ones whose copies do not delay the timeline of figure 9."""
    policy, update = PartialExperts(max_lost_share=None), 1
    sizes = peaks(policy)
    # A second copies this number of bytes. Six experts are captured in the passes, and three are written.
    rate, passes = 100, sizes[5] // 100
    storage_rate = sizes[2] / passes
    given = SnapshotContext(
        bandwidth_bytes_per_second=rate, iteration_seconds=float(passes), storage_bytes_per_second=storage_rate
    )
    plan = policy.plan(demand(), given)
    assert plan.partial is not None and plan.partial.num_persisted_experts is not None
    captured, stored = plan.partial.num_experts, plan.partial.num_persisted_experts
    assert 1 < stored < captured < EXPERTS

    def run(captured: int, stored: int) -> tuple[float, float]:
        capture, write = -(-sizes[captured - 1] // rate), int(-(-sizes[stored - 1] // storage_rate))
        found = timeline(passes, update, capture, write, 60)
        delay = found.updates[0] - passes
        return delay, float(np.mean(np.diff([start for _, start, _ in found.captured])))

    assert run(captured, stored) == (0.0, passes + update)
    assert run(captured + 1, stored)[0] > 0.0, "an update waits for the capture"
    assert run(captured, stored + 1)[1] > passes + update, "a window waits for the file of an earlier one"


def test_what_figure_8_shows() -> None:
    """Two of four experts are in the newest window, and one of these is in the newest file. A node that lives has a
    newer state of its experts in memory than storage has."""
    by_rank = [
        (*(shard(expert(1, number), 10) for number in (2 * rank, 2 * rank + 1)), shard(rest(1), 10)) for rank in (0, 1)
    ]
    job = Demand(shards_by_rank=tuple(by_rank))
    policy = PartialExperts(num_experts=2, num_persisted_experts=1, choice=Sequential(), max_lost_share=None)
    given = SnapshotContext(bandwidth_bytes_per_second=1e9, iteration_seconds=1.0)
    plan = policy.plan(job, given)
    windows, ledger, held = PartialWindows(policy, plan, job, 10**6), TokenLedger.empty([[0] * 4]), list[int]()
    parts = pieces((1,), 4)
    memory, storage, lost = {}, {}, np.zeros(3)
    for start in range(1, 9):
        ledger = ledger.after([[5, 6, 7, 8]])
        windows.begin(start, held, ledger, [((5, 6, 7, 8),)])
        held = [*held[-1:], start]
        windows.store(start, ledger, -1)
        found = windows.captured_at(start, parts, 1) or (start,) * len(parts)
        memory[start] = np.array(found[:-1]).reshape(4, 3)[:, 0]
        storage[start] = np.array(windows.stored(start, parts, 1)[0][:-1]).reshape(4, 3)[:, 0]
        if start > 1:
            assert (memory[start] == start).sum() == 2, "snapshot-PEC saves two experts"
            is_new = storage[start] != storage[start - 1]
            assert is_new.sum() == 1 and (memory[start][is_new] == start).all(), "persist-PEC saves one of them"
            assert (storage[start] <= memory[start]).all()
        in_memory, in_files = windows.at_risk(start), windows.stored(start, parts, 1)[1]
        assert in_memory is not None
        # The second node lives, and has experts 2 and 3 in memory.
        lost += [sum(in_memory[0]), sum(in_files[0][:2]) + sum(in_memory[0][2:]), sum(in_files[0])]
    assert lost[0] < lost[1] < lost[2], "memory of the living node saves tokens"


BUDGETED = {
    "snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.partial_experts.PartialExperts"},
    "snapshot.num_peer_copies": 0,
    "snapshot.persist_interval_windows": 2,
    "snapshot.storage_bandwidth_bytes_per_second": 1e5,
}


def job(changes: dict[str, Any]) -> JobConfig:
    return engines.micro_config({**BUDGETED, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"snapshot.storage_bandwidth_bytes_per_second": 0.0}, "greater than 0"),
        (
            {"snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.sparse_window.SparseWindow"}},
            "because each file contains all experts",
        ),
        ({"snapshot.policy": None}, "because each file contains all experts"),
        ({"snapshot.persist_interval_windows": 0}, "only before a stop"),
        (
            {"snapshot.policy": {**BUDGETED["snapshot.policy"], "num_persisted_experts": 1}},  # type: ignore[dict-item]
            "num_persisted_experts=1",
        ),
    ],
)
def test_a_bandwidth_that_decides_nothing_is_refused(changes: dict[str, Any], reason: str) -> None:
    validate(job({}))
    with pytest.raises(ConfigError, match="snapshot.storage_bandwidth_bytes_per_second") as caught:
        job(changes)
    assert reason in str(caught.value)


def test_a_dry_run_states_the_number_of_a_file_and_its_bound() -> None:
    assert stores_fewer_experts(job({}))
    assert not stores_fewer_experts(job({"snapshot.storage_bandwidth_bytes_per_second": None}))
    policy = {**BUDGETED["snapshot.policy"], "num_experts": 4, "max_lost_share": None}  # type: ignore[dict-item]
    known = {"snapshot.policy": policy, "snapshot.bandwidth_bytes_per_second": 1e9, "snapshot.iteration_seconds": 0.1}
    slow, fast = (
        SnapshotReport.of(job({**known, "snapshot.storage_bandwidth_bytes_per_second": rate}), engines.VOCAB_SIZE)
        for rate in (1.0, 1e12)
    )
    assert slow is not None and fast is not None
    assert (slow.stored_experts, fast.stored_experts) == (1, 4)
    assert slow.stored_bytes is not None and fast.stored_bytes is not None and slow.stored_bytes < fast.stored_bytes
    unknown = SnapshotReport.of(job({"snapshot.policy": policy}), engines.VOCAB_SIZE)
    assert unknown is not None and unknown.stored_experts is None
    assert "if it is read from storage" in unknown.update_loss and unknown.update_loss == slow.update_loss
