"""Scenarios that ranks run for ``tests/distributed/test_replay.py``: capture a window, lose all state, replay the
window."""

import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.optimizer.adamw import masters
from megatron_ft.mcore.snapshot.local_window import Replayer, ReplayPlan, _CapturedSlice, carry_out
from megatron_ft.mcore.state.operator_view import OperatorView
from megatron_ft.mcore.state.train_state import _encode
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.iteration import History, Vote
from megatron_ft.planning.snapshot.plan import Piece, Unit, WindowPlan, slice_bytes
from megatron_ft.testing import engines
from tests.helpers.replica_scenarios import config_of, job_of
from tests.helpers.volatile import volatile_state

START = 2
"""Iteration after which the window starts."""


def view_of(engine: TrainingEngine) -> OperatorView:
    """Return the operator view of a built engine."""
    return OperatorView(
        engine.model_chunks, engine.optimizer, groups=engine.groups, num_layers=engine.config.model.num_layers
    )


def random_window(view: OperatorView, num_slices: int, num_parts: Mapping[str, int], seed: int = 7) -> WindowPlan:
    """Return a window with all operators of the job in random order. ``num_parts`` is the number of parts of an
    operator, by default 1."""
    operators = {shard.operator for shards in view.shards_by_rank for shard in shards}
    units = []
    for operator in sorted(operators, key=str):
        parts = num_parts.get(str(operator), 1)
        units += [Unit(operator=operator, part=part, num_parts=parts) for part in range(parts)]
    random.Random(seed).shuffle(units)
    cuts = [len(units) * place // num_slices for place in range(num_slices + 1)]
    slices = tuple(tuple(units[first:last]) for first, last in itertools.pairwise(cuts))
    plan = WindowPlan(slices=slices, interval_iterations=num_slices, reason="random order")
    plan.validate(operators)
    return plan


Sources = list[tuple[Piece, torch.Tensor]]
"""Pieces of a slice with the tensors that contain them while the job trains."""


def sources_of(view: OperatorView, plan: WindowPlan) -> list[Sources]:
    """Return the sources of each slice. As in a real job, they are found once, before the first slice."""
    return [[(p, view.source(p)) for p in view.pieces(plan, index)] for index in range(plan.num_iterations)]


def capture(engine: TrainingEngine, view: OperatorView, sources: Sources, index: int) -> _CapturedSlice:
    """Copy slice ``index`` of the present state from its ``sources``."""
    pieces = tuple(piece for piece, _ in sources)
    payload = bytearray(slice_bytes(pieces))
    view.encode(pieces)
    for piece, source in sources:
        content = source.contiguous().view(torch.uint8).numpy().tobytes()
        assert len(content) == piece.num_bytes, piece
        payload[piece.offset : piece.offset + piece.num_bytes] = content
    record = json.loads(json.dumps(engine.train_state().to_json())) if index == 0 else None
    return _CapturedSlice(payload=bytes(payload), train_state=record)


def scramble(engine: TrainingEngine) -> None:
    """Change every weight, master weight, moment, step count, buffer and random state."""
    from megatron_ft.mcore.state.tensors import named_state

    generator = torch.Generator().manual_seed(99)
    list(masters(engine.model_chunks, engine.optimizer))
    with torch.no_grad():
        for name, tensor in named_state(engine.model_chunks, engine.optimizer):
            values = torch.randn(tensor.shape, generator=generator)
            # Counts of updates and scales are never negative.
            tensor.copy_(values.abs() if name.endswith(("/step", "_scales")) else values)
    torch.manual_seed(4711)
    engine.history = History(losses=(123.0,))


@dataclasses.dataclass(kw_only=True)
class Recorded:
    """Undisturbed run: votes, losses and digests by iteration, and the captured window."""

    plan: WindowPlan | None = None
    slices: list[_CapturedSlice] = dataclasses.field(default_factory=list)
    votes: dict[int, Vote] = dataclasses.field(default_factory=dict)
    digests: dict[int, dict[str, str]] = dataclasses.field(default_factory=dict)


def record(engine: TrainingEngine, num_slices: int, num_parts: Mapping[str, int], last: int) -> Recorded:
    """Train to iteration ``last``, and capture a window meanwhile."""
    found = Recorded()
    view, sources = None, []
    while engine.iteration < last:
        vote = engine.run_iteration(engine.iteration + 1).vote
        found.votes[vote.iteration] = Vote.from_record(json.loads(json.dumps(vote.to_record())))
        found.digests[vote.iteration] = state_of(engine)
        index = vote.iteration - START
        if index == 0:
            view = view_of(engine)
            found.plan = random_window(view, num_slices, num_parts)
            sources = sources_of(view, found.plan)
        if 0 <= index < num_slices:
            assert view is not None, "made with slice 0"
            found.slices.append(capture(engine, view, sources[index], index))
    return found


def replay(
    *,
    rank: int,
    world_size: int,
    store: dist.Store,
    overrides: dict[str, Any],
    num_slices: int = 3,
    num_parts: dict[str, int] | None = None,
    replicas: bool = False,
    skip_frozen: bool = True,
    poisoned: int = 0,
    damage: str = "",
) -> dict[str, Any]:
    """Return the differences after the replay and after each later iteration, by iteration, and facts about the run.

    Args:
        poisoned: an iteration whose loss is NaN.
        damage: what is wrong with the captured state; then the error is returned.
    """
    config = config_of(overrides, world_size, replicas=replicas)
    if poisoned:
        poison(poisoned)
    last = START + num_slices + 1
    place = {"rank": rank, "world_size": world_size, "store": store}
    with job_of(config, **place) as job:
        found = record(job.engine, num_slices, num_parts or {}, last)
    assert found.plan is not None, "trained past the window's start"
    if damage:
        spoil(found, damage, rank)
    with job_of(config, **place) as job:
        scramble(job.engine)
        view = view_of(job.engine)
        recovery = ReplayPlan.of(found.plan, START, found.votes)
        replayer = Replayer(job.engine, view, window=found.plan, slices=found.slices, skip_frozen=skip_frozen)
        began = time.process_time()
        try:
            result = carry_out(recovery, replayer)
        except RecoveryError as error:
            return {"refused": str(error)}
        cpu_seconds = time.process_time() - began
        assert job.engine.iteration == result.final_iteration, "a replay ends where its plan says"
        differences = {str(job.engine.iteration): compare(job.engine, found.digests[job.engine.iteration])}
        while job.engine.iteration < last:
            iteration = job.engine.run_iteration(job.engine.iteration + 1).vote.iteration
            differences[str(iteration)] = compare(job.engine, found.digests[iteration])
        parts = sorted({shard.tensor_part for shards in view.shards_by_rank for shard in shards})
        del view, replayer
    return {
        "differences": differences,
        "num_tensors": len(found.digests[last]),
        "num_frozen": [len(step.frozen) for step in recovery.steps],
        "num_iterations": result.num_iterations,
        "tensor_parts": parts,
        "cpu_seconds": cpu_seconds,
        "losses": {str(number): repr(vote.loss) for number, vote in found.votes.items()},
        "overflows": [number for number, vote in found.votes.items() if vote.found_inf],
        "clipped": [number for number, vote in found.votes.items() if vote.clip_coefficient < 1.0],
    }


def spoil(found: Recorded, damage: str, rank: int) -> None:
    """Damage one thing; on rank 0 only if it belongs to one rank."""
    first = found.slices[0]
    if damage == "weight" and rank == 0:
        content = bytearray(first.payload)
        content[1] ^= 0x01
        found.slices[0] = _CapturedSlice(payload=bytes(content), train_state=first.train_state)
    elif damage == "short":
        found.slices[0] = _CapturedSlice(payload=first.payload[:-4096], train_state=first.train_state)
    elif damage == "no_train_state":
        found.slices[0] = _CapturedSlice(payload=first.payload)
    elif damage == "random_numbers" and rank == 0:
        assert first.train_state is not None, "captured with slice 0"
        rng = {**first.train_state["rng"], "torch": _encode(torch.Generator().manual_seed(5).get_state())}
        found.slices[0] = _CapturedSlice(payload=first.payload, train_state={**first.train_state, "rng": rng})
    elif damage == "vote":
        vote = found.votes[START + 1]
        found.votes[START + 1] = dataclasses.replace(vote, loss=math.nextafter(vote.loss, 9.0))


def state_of(engine: TrainingEngine) -> dict[str, str]:
    """Return the digests of all state, the volatile state, and values of earlier votes."""
    return {**engines.digests(engine), **volatile_state(engine), "history": repr(engine.history)}


def compare(engine: TrainingEngine, expected: Mapping[str, str]) -> list[str]:
    """Return the names of the values that differ from the expected ones."""
    now = state_of(engine)
    return sorted(name for name in set(now) | set(expected) if now.get(name) != expected.get(name))


def poison(iteration: int) -> None:
    """Make the loss of ``iteration`` NaN."""
    from megatron_ft.mcore.training import engine

    original = engine.forward_step

    def forward_step(microbatches: Any, model: torch.nn.Module, *, iteration: int, _bad: int = iteration) -> Any:
        output, loss = original(microbatches, model, iteration=iteration)
        return (output * float("nan") if iteration == _bad else output), loss

    engine.forward_step = forward_step
