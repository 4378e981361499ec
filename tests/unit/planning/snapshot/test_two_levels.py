"""Tests windows whose files have an earlier state of some experts than memory (MoC-System, section 5.1)."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.planning.snapshot.expert_choice import LoadAware, RoundRobin, Sequential
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.planning.snapshot.partial_experts import ExpertPolicy, PartialExperts, SelectiveExperts, StorageBasis
from megatron_ft.planning.snapshot.partial_windows import PartialWindows
from tests.unit.planning.snapshot.test_partial_experts import EXPERTS, LAYERS, demand, given, pieces

MODEL_LAYERS = 4
SHAPE = (len(LAYERS), EXPERTS)
PIECES = pieces(LAYERS, EXPERTS)


class Job:
    """Simulated job: windows are committed one iteration after they begin, and every ``per_file``-th one is stored. The
    log of tokens and the states of files serve the recount."""

    def __init__(self, policy: ExpertPolicy, *, per_file: int = 1, planned: int = 10**9) -> None:
        self.policy, self.per_file, self.planned = policy, per_file, planned
        self.ledger = TokenLedger.empty([[0] * EXPERTS] * len(LAYERS))
        self.log: list[np.ndarray] = []
        self.held: list[int] = []
        self.memory: dict[int, np.ndarray] = {}
        """Iteration from which each window has each expert, by its start."""
        self.files: dict[int, np.ndarray] = {}
        self.whole: list[int] = []
        """Windows whose files contain all pieces although earlier files have some of them."""
        self.saved: dict[tuple[str, int], tuple[TokenLedger, Any]] = {}
        self.unwritten = -1
        self.new_windows()

    def new_windows(self) -> None:
        plan = self.policy.plan(demand(), given(10**6))
        self.windows = PartialWindows(self.policy, plan, demand(), self.planned)
        self.num_commits, self.held = 0, []

    def step(self, tokens: np.ndarray) -> None:
        """Run one iteration, capture a window and commit it."""
        self.log.append(tokens)
        self.ledger = self.ledger.after(tokens.tolist())
        now = len(self.log)
        if now % self.policy.interval_iterations:  # type: ignore[attr-defined]
            return
        rows = [[0] * EXPERTS for _ in range(MODEL_LAYERS)]
        for layer, row in zip(LAYERS, tokens.tolist(), strict=True):
            rows[layer - 1] = row
        self.windows.begin(now, self.held, self.ledger, [tuple(map(tuple, rows))])
        self.memory[now] = self._experts(self.windows.captured_at(now, PIECES, MODEL_LAYERS), now)
        self.saved["memory", now] = (self.ledger, self.windows.at_risk(now))
        self.held = [*self.held[-1:], now]
        self.num_commits += 1
        if self.policy.num_persisted_experts is not None and self.num_commits % self.per_file == 0:
            is_other = self.windows.store(now, self.ledger, self.unwritten)
            found, at_risk = self.windows.stored(now, PIECES, MODEL_LAYERS)
            self.files[now] = self._experts(found, now)
            self.whole += [now] if self.windows.writes_all_pieces else []
            assert is_other == (bool((self.files[now] != self.memory[now]).any()) or self.windows.writes_all_pieces)
            self.saved["file", now] = (self.ledger, at_risk)

    def lost_from(self, level: str, start: int) -> np.ndarray:
        """Recount from the log what a recovery from a level of window ``start`` loses."""
        at = (self.memory if level == "memory" else self.files)[start]
        ages = np.arange(1, start + 1)[:, None, None] > at
        return (np.array(self.log[:start]) * ages).sum(axis=0)

    def fail(self, level: str) -> np.ndarray:
        """Go back to the newest window of a level. Return the recount of what is lost."""
        start = self.held[-1] if level == "memory" else max(self.files)
        lost = self.lost_from(level, start)
        ledger, at_risk = self.saved[level, start]
        assert np.array_equal(np.array(at_risk), lost)
        self.ledger = ledger.after_loss(at_risk)
        self.log = self.log[:start]
        self.files = {at: rows for at, rows in self.files.items() if at <= start}
        self.new_windows()
        return lost

    def _experts(self, at: tuple[int, ...] | None, now: int) -> np.ndarray:
        if at is None:
            return np.full(SHAPE, now)
        by_expert = np.array(at[:-1]).reshape(*SHAPE, 3)
        assert (by_expert[..., 2] == now).all() and at[-1] == now, "step counts and other operators are new"
        assert (by_expert[..., 0] == by_expert[..., 1]).all(), "both components of an expert are of one iteration"
        return by_expert[..., 0]


@pytest.mark.parametrize("seed", range(60))
def test_what_each_level_loses_equals_a_recount(seed: int) -> None:
    generator, draw = random.Random(seed), np.random.default_rng(seed)
    policy = generator.choice(
        [
            PartialExperts(num_experts=4, num_persisted_experts=1, max_lost_share=None),
            PartialExperts(num_experts=3, num_persisted_experts=2, interval_iterations=2, choice=RoundRobin()),
            PartialExperts(num_experts=2, num_persisted_experts=1, choice=LoadAware(), max_lost_share=0.2),
            SelectiveExperts(num_experts=4, num_persisted_experts=2),
        ]
    )
    job = Job(policy, per_file=generator.randint(1, 3), planned=70 * 800)
    lost = np.zeros(SHAPE, dtype=np.int64)
    before: dict[int, np.ndarray] = {}
    for _ in range(70):
        job.step(draw.integers(0, 200, size=SHAPE))
        before[len(job.log)] = lost
        if job.held and generator.random() < 0.1:
            level = generator.choice(["memory", "file"] if job.files else ["memory"])
            found = job.fail(level)
            lost = before[len(job.log)] + found
            assert np.array_equal(np.array(job.ledger.lost), lost)


@pytest.mark.parametrize("per_file", [1, 2, 3])
@pytest.mark.parametrize("choice", [Sequential(), LoadAware()])
def test_a_file_has_new_states_of_experts_that_were_captured_since_the_last_file(choice: Any, per_file: int) -> None:
    policy = PartialExperts(num_experts=4, num_persisted_experts=1, choice=choice, max_lost_share=None)
    job, draw = Job(policy, per_file=per_file), np.random.default_rng(0)
    for _ in range(40):
        job.step(draw.integers(1, 100, size=SHAPE))
    starts = sorted(job.files)
    assert (job.files[starts[0]] == job.memory[starts[0]]).all(), "the first file has what memory has"
    for last, start in itertools.pairwise(starts):
        is_new = job.files[start] != job.files[last]
        assert (is_new.sum(axis=1) == 1).all(), "one expert of each layer"
        assert (job.files[start][is_new] == job.memory[start][is_new]).all()
        assert (job.memory[start][is_new] > last).all(), "captured since the last file"
        assert (job.files[start] <= job.memory[start]).all()


@pytest.mark.parametrize("per_file", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("captured", "stored"), [(1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (4, 3), (8, 1), (8, 8), (5, 2)]
)
def test_the_stated_bound_of_files_holds(captured: int, stored: int, per_file: int) -> None:
    policy = PartialExperts(num_experts=captured, num_persisted_experts=stored, max_lost_share=None)
    job, oldest = Job(policy, per_file=per_file), 0
    for _ in range(400):
        job.step(np.ones(SHAPE, dtype=np.int64))
    oldest = max(int((start - at).max()) for start, at in job.files.items())
    text = policy.update_loss(EXPERTS, per_file)
    stated = int(text.split("(")[1].split(" iteration")[0])
    assert oldest <= stated and (per_file > 1 or EXPERTS % captured or oldest == stated)


def test_the_bound_of_lost_tokens_holds_on_both_levels() -> None:
    """Fails again and again from the worse level; PLT must stay within the bound, and a constant number exceeds it."""
    shares = {}
    for bound in (0.02, None):
        policy = PartialExperts(num_experts=2, num_persisted_experts=1, max_lost_share=bound)
        job = Job(policy, planned=400 * 100 * EXPERTS)
        for number in range(400):
            job.step(np.full(SHAPE, 100))
            if number % 50 == 49:
                job.fail("file")
        shares[bound] = job.ledger.lost_share(job.planned)
    assert shares[0.02] <= 0.02 < shares[None]


def test_after_a_failed_write_the_next_file_has_everything() -> None:
    job = Job(PartialExperts(num_experts=2, num_persisted_experts=1, max_lost_share=None))
    tokens = np.ones(SHAPE, dtype=np.int64)
    for _ in range(6):
        job.step(tokens)
    assert (job.files[6] != job.memory[6]).any()
    job.unwritten = 6
    job.step(tokens)
    assert (job.files[7] == job.memory[7]).all()
    job.step(tokens)
    assert (job.files[8] != job.memory[8]).any(), "the failure is repaired"
    job.unwritten = 7
    job.step(tokens)
    assert (job.files[9] == job.memory[9]).all(), "the file that should repair it failed"


@pytest.mark.parametrize(("stored", "most"), [(1, 16), (2, 8)])
def test_no_file_needs_a_file_that_is_much_older(stored: int, most: int) -> None:
    """Some experts get almost no tokens, so a policy that depends on loads never chooses them."""
    policy = PartialExperts(num_experts=4, num_persisted_experts=stored, choice=LoadAware(), max_lost_share=None)
    job, written_in, oldest = Job(policy), np.zeros(SHAPE, dtype=np.int64), 0
    tokens = np.broadcast_to([1000] * 4 + [0] * 4, SHAPE)
    for _ in range(100):
        job.step(tokens)
        now = len(job.log)
        is_new = now in job.whole or job.files[now] != job.files.get(now - 1)
        written_in = np.where(is_new, now, written_in)
        oldest = max(oldest, now - int(written_in.min()))
        assert now not in job.whole or (job.files[now] == job.memory[now]).all()
    assert oldest == most and np.diff(job.whole).tolist() == [most + 1] * (len(job.whole) - 1)


def test_all_ranks_write_equally_much() -> None:
    """Each of four groups of experts is on other ranks. A file has one new expert of each of eight layers."""
    basis = StorageBasis(
        captured_at=np.full((8, 8), 5),
        stored_at=np.ones((8, 8), dtype=np.int64),
        since=1,
        at_risk=np.zeros((8, 8), dtype=np.int64),
        stored_at_risk=np.ones((8, 8), dtype=np.int64),
        lost_share=0.0,
        planned_tokens=1000,
        num_groups=4,
    )
    for number in (1, 2):
        chosen = replace(basis, num_experts=number).choose(oldest_first=True, max_lost_share=None)
        assert chosen.reshape(8, 4, 2).sum(axis=(0, 2)).tolist() == [2 * number] * 4


def test_a_window_that_is_not_known_is_stored_whole() -> None:
    job = Job(PartialExperts(num_experts=2, num_persisted_experts=1, max_lost_share=None))
    job.step(np.ones(SHAPE, dtype=np.int64))
    assert not job.windows.store(77, job.ledger, -1) and job.windows.stored_share is None
    job.step(np.ones(SHAPE, dtype=np.int64))
    assert (job.files[2] == job.memory[2]).all()


def test_more_experts_are_stored_before_the_bound_is_exceeded() -> None:
    basis = StorageBasis(
        captured_at=np.full((1, 8), 10),
        stored_at=np.arange(8).reshape(1, 8),
        since=9,
        at_risk=np.zeros((1, 8), dtype=np.int64),
        stored_at_risk=10 * (10 - np.arange(8)).reshape(1, 8),
        lost_share=0.0,
        planned_tokens=1000,
        num_experts=1,
    )

    def chosen(bound: float | None) -> list[int]:
        return np.flatnonzero(basis.choose(oldest_first=True, max_lost_share=bound)[0]).tolist()

    # All experts have 520 tokens at risk on storage: 420 without the oldest, 330 without the two oldest, and so on.
    assert chosen(None) == chosen(0.42) == [0]
    assert chosen(0.41) == chosen(0.33) == [0, 1]
    assert chosen(0.32) == chosen(0.18) == [0, 1, 2, 3]
    assert chosen(0.17) == chosen(1e-9) == list(range(8))


@pytest.mark.parametrize("kind", [PartialExperts, SelectiveExperts])
@pytest.mark.parametrize(("captured", "stored"), [(2, 3), (None, 0), (4, -1)])
def test_numbers_out_of_range_are_refused(kind: Any, captured: int | None, stored: int) -> None:
    with pytest.raises(ConfigError, match=f"num_persisted_experts={stored}"):
        kind(num_experts=captured, num_persisted_experts=stored).plan(demand(), given(10**6))
