"""Tests which experts a recovery takes from memory, although the job continues from a file."""

import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.snapshot.expert_levels import ExpertState, RankLevels, newest_states, take_newer_experts
from megatron_ft.mcore.snapshot.local_window import AT_RISK, EXTRAS, LocalWindow
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.operators import OperatorId
from megatron_ft.planning.iteration import History
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.planning.snapshot.plan import Piece, Unit, WindowPlan
from megatron_ft.snapshot.window import Slice, Window

LAYER, NUM_EXPERTS, FILE = 2, 3, 20
OPERATORS = [OperatorId(layer=LAYER, kind="expert", expert=number) for number in range(NUM_EXPERTS)]
PLAN = WindowPlan(slices=(tuple(Unit(operator=operator) for operator in OPERATORS),), interval_iterations=1)
PARTS = {0: [(0, 0, 4), (1, 0, 8)], 1: [(0, 4, 8), (2, 0, 8)]}
"""Experts of which each rank has parts, and the elements [start, stop). Both ranks have a half of expert 0."""


def processed(expert: int, iteration: int) -> int:
    return 10 * (expert + 1) * iteration


def window(rank: int, iteration: int, experts: Mapping[int, int]) -> tuple[Window, memoryview]:
    """Make a rank's part of a window with the ``experts`` of these iterations. Bytes state expert and iteration."""
    pieces, content, captured_at, offset = [], bytearray(4096), [], 0
    for number, start, stop in PARTS[rank]:
        name = f"decoder.layers.{LAYER - 1}.mlp.experts.local_experts.{number}.linear_fc1.weight"
        for component in ("exp_avg", "step"):
            num_bytes = 4 * (stop - start) if component == "exp_avg" else 4
            at = experts[number] if component == "exp_avg" else iteration
            pieces.append(Piece(name, 0, component, "float32", start, stop, offset, num_bytes))
            content[offset : offset + num_bytes] = bytes([16 * number + at % 16]) * num_bytes
            captured_at.append(at)
            offset += 64
    none = [[0] * NUM_EXPERTS]
    ledger = TokenLedger.empty(none).after([[processed(expert, iteration) for expert in range(NUM_EXPERTS)]])
    state = TrainState(
        iteration=iteration, rng=None, buffers={}, grad_scalers=(), group_steps=(), history=History(tokens=ledger)
    )
    at_risk = [processed(expert, iteration) - processed(expert, at) for expert, at in sorted(experts.items())]
    part = Slice(
        iteration=iteration,
        offset=0,
        num_bytes=4096,
        header={EXTRAS: json.dumps(state.to_json(own=False)), AT_RISK: json.dumps([at_risk])},
        pieces=tuple(pieces),
        captured_at=tuple(captured_at),
    )
    part.hashes = part.hash_pieces(memoryview(content))
    made = Window(
        run_id="run",
        generation=0,
        topology={},
        rank=rank,
        world_size=2,
        start_iteration=iteration,
        num_slices=1,
        plan=PLAN.to_json(),
        slices=[part],
    )
    return made, memoryview(content)


class Ranks:
    """``Collectives`` of two threads."""

    def __init__(self) -> None:
        self.barrier, self.records = threading.Barrier(2, timeout=20), {}

    def of(self, rank: int) -> Any:
        shared = self

        class OfRank:
            def gather(self, record: Any) -> list[Any]:
                shared.records[rank] = json.loads(json.dumps(record))
                shared.barrier.wait()
                found = [shared.records[number] for number in range(2)]
                shared.barrier.wait()
                return found

            def errors(self, error: str | None) -> str | None:
                return next((text for text in self.gather(error) if text is not None), None)

        return OfRank()


def recover(stored: dict[int, int], in_memory: dict[int, list[tuple[int, dict[int, int]]]]) -> list[LocalWindow]:
    """Continue from the file with the experts ``stored``, on two ranks with these windows in memory."""
    ranks, results, errors = Ranks(), {}, []

    def run(rank: int) -> None:
        made, content = window(rank, FILE, stored)
        place = StoredWindow(start_iteration=FILE, generation=0, num_slices=1, num_held=1, where="persisted")
        local = LocalWindow(window=made, slices=(content,), stored=place)
        held = [window(rank, start, experts) for start, experts in in_memory.get(rank, [])]
        try:
            results[rank] = take_newer_experts(local, held, ranks.of(rank))
        except RecoveryError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        assert len(errors) == 2, "all ranks fail together"
        raise errors[0]
    return [results[rank] for rank in range(2)]


STORED = {0: 8, 1: 8, 2: 12}
CASES: dict[str, tuple[dict[int, list[tuple[int, dict[int, int]]]], dict[int, int], set[int]]] = {
    "rank 1 has lost its memory": ({0: [(24, {0: 16, 1: 16, 2: 16})]}, {0: 8, 1: 16, 2: 12}, {1}),
    "both have theirs": (
        {0: [(24, {0: 16, 1: 22, 2: 12})], 1: [(24, {0: 16, 1: 22, 2: 12})]},
        {0: 16, 1: 8, 2: 12},
        {0},
    ),
    "halves of an expert differ": (
        {0: [(24, {0: 16, 1: 20, 2: 12})], 1: [(23, {0: 14, 1: 20, 2: 18})]},
        {0: 8, 1: 20, 2: 18},
        {1, 2},
    ),
    "an earlier window has what the newest has no more": (
        {0: [(21, {0: 16, 1: 8, 2: 8}), (24, {0: 22, 1: 8, 2: 8})], 1: [(21, {0: 16, 1: 8, 2: 8})]},
        {0: 16, 1: 8, 2: 12},
        {0},
    ),
    "nothing is newer": ({0: [(24, {0: 8, 1: 23, 2: 8})], 1: [(24, {0: 8, 1: 23, 2: 24})]}, STORED, set()),
    "nothing is left": ({}, STORED, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_each_expert_is_of_its_newest_usable_state(case: str) -> None:
    in_memory, wanted, taken = CASES[case]
    for rank, found in enumerate(recover(STORED, in_memory)):
        expected, content = window(rank, FILE, wanted)
        assert bytes(found.slices[0]) == bytes(content)
        assert found.window.slices[0].captured_at == expected.slices[0].captured_at
        assert found.window.slices[0].hashes == expected.slices[0].hashes
        assert found.at_risk == (tuple(processed(one, FILE) - processed(one, at) for one, at in wanted.items()),)
        assert found.from_memory == {(0, expert) for expert in taken}


def test_windows_with_unreadable_state_fail_on_all_ranks_before_anything_changes() -> None:
    original = TrainState.from_json
    calls = []

    def fail(record: Any) -> TrainState:
        calls.append(record)
        if len(calls) == 3:
            raise ValueError("damaged")
        return original(record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainState, "from_json", fail)
        with pytest.raises(RecoveryError, match="cannot be read"):
            recover(STORED, {rank: [(24, {0: 16, 1: 16, 2: 16})] for rank in range(2)})


def test_a_state_that_is_newer_than_the_file_is_not_taken() -> None:
    states = tuple(ExpertState(iteration=at, processed=at) for at in (9, 20, 21))
    levels = RankLevels(stored={(0, 0): 8}, in_memory={(0, 0): states})
    assert RankLevels.from_json(json.loads(json.dumps(levels.to_json()))) == levels
    assert newest_states([levels], 20) == {(0, 0): states[1]}
    assert newest_states([levels], 19) == {(0, 0): states[0]}
    assert newest_states([levels, RankLevels(stored={(0, 0): 8}, in_memory={})], 20) == {}
