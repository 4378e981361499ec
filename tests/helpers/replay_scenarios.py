"""What ranks do in ``tests/distributed/test_replay.py``: capture a window, lose everything, replay it."""

import itertools
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.mcore.loop.engine import TrainingEngine
from megatron_ft.mcore.loop.extras import capture_extras
from megatron_ft.mcore.loop.replaying import CapturedSlice, Replayer
from megatron_ft.mcore.optimizer.masters import masters
from megatron_ft.mcore.optimizer.operator_view import OperatorView
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.replay import ReplayPlan, plan_replay
from megatron_ft.planning.snapshot.pieces import slice_bytes
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.runtime.execute.replay import carry_out
from tests.helpers import engines
from tests.helpers.replica_scenarios import config_of, job_of

START = 2
"""The window starts at the state after this iteration."""


def view_of(engine: TrainingEngine) -> OperatorView:
    """The view of a built engine."""
    return OperatorView(
        engine.model_chunks, engine.optimizer, groups=engine.groups, num_layers=engine.config.model.num_layers
    )


def random_window(view: OperatorView, num_slices: int, num_parts: Mapping[str, int], seed: int = 7) -> WindowPlan:
    """All operators of the job in random order, cut into slices; ``num_parts`` of an operator, 1 where not named."""
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


def capture(engine: TrainingEngine, view: OperatorView, plan: WindowPlan, index: int) -> CapturedSlice:
    """Copy slice ``index`` out of the present state."""
    pieces = view.pieces(plan, index)
    payload = bytearray(slice_bytes(pieces))
    for piece in pieces:
        content = view.source(piece).contiguous().view(torch.uint8).numpy().tobytes()
        assert len(content) == piece.num_bytes, piece
        payload[piece.offset : piece.offset + piece.num_bytes] = content
    extras = json.loads(json.dumps(capture_extras(engine))) if index == 0 else None
    return CapturedSlice(payload=bytes(payload), extras=extras)


def scramble(engine: TrainingEngine) -> None:
    """Make every weight, master, moment, step count, buffer and random state something else."""
    from megatron_ft.mcore.checkpoint.digest import named_state

    generator = torch.Generator().manual_seed(99)
    list(masters(engine.model_chunks, engine.optimizer))
    with torch.no_grad():
        for _, tensor in named_state(engine.model_chunks, engine.optimizer):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    torch.manual_seed(4711)


def replay(
    *,
    rank: int,
    world_size: int,
    store: dist.Store,
    directory: str,
    overrides: dict[str, Any],
    num_slices: int = 3,
    num_parts: dict[str, int] | None = None,
    replicas: bool = False,
    skip_frozen: bool = True,
    poisoned: int = 0,
) -> dict[str, Any]:
    """Names of tensors that differ after a replay and after each iteration that follows; losses of both runs."""
    config = config_of(overrides, world_size, replicas=replicas)
    if not replicas:
        config = engines.micro_config(overrides, world_size=world_size)
    if poisoned:
        poison(poisoned)
    last = START + num_slices + 1
    place = {"rank": rank, "world_size": world_size, "store": store, "directory": directory}
    slices, votes, digests, losses = [], {}, {}, {}
    with job_of(config, **place) as job:
        engine = job.engine
        view = plan = None
        while engine.iteration < last:
            vote = engine.run_iteration(engine.iteration + 1).vote
            votes[vote.iteration] = Vote.from_record(json.loads(json.dumps(vote.to_record())))
            losses[vote.iteration] = repr(vote.loss)
            digests[vote.iteration] = engines.digests(engine) | engines.volatile_state(engine)
            if vote.iteration == START:
                view = view_of(engine)
                plan = random_window(view, num_slices, num_parts or {})
            index = vote.iteration - START
            if 0 <= index < num_slices:
                slices.append(capture(engine, view, plan, index))
        actions = engine.history.num_consecutive_skips
        del engine, view
    with job_of(config, **place) as job:
        engine = job.engine
        scramble(engine)
        engine.history = type(engine.history)(losses=(123.0,))
        view = view_of(engine)
        recovery = ReplayPlan.from_json(json.loads(json.dumps(plan_replay(plan, START, votes).to_json())))
        replayer = Replayer(engine, view, window=plan, slices=slices, skip_frozen=skip_frozen)
        started = time.process_time()
        result = carry_out(recovery, replayer)
        cpu_seconds = time.process_time() - started
        assert engine.iteration == result.final_iteration == START + num_slices - 1
        differences = {str(engine.iteration): compare(engine, digests[engine.iteration])}
        again = {}
        while engine.iteration < last:
            vote = engine.run_iteration(engine.iteration + 1).vote
            again[vote.iteration] = repr(vote.loss)
            differences[str(vote.iteration)] = compare(engine, digests[vote.iteration])
        frozen = [len(step.frozen) for step in recovery.steps]
        parts = sorted({shard.tensor_part for shards in view.shards_by_rank for shard in shards})
        del engine, view, replayer
    return {
        "differences": differences,
        "num_tensors": len(digests[last]),
        "losses": {str(number): losses[number] for number in again},
        "losses_again": {str(number): loss for number, loss in again.items()},
        "all_losses": losses,
        "frozen": frozen,
        "tensor_parts": parts,
        "cpu_seconds": cpu_seconds,
        "num_consecutive_skips": actions,
        "found_inf": [number for number, vote in votes.items() if vote.found_inf],
    }


def compare(engine: TrainingEngine, expected: Mapping[str, str]) -> list[str]:
    """Names of what is not as expected."""
    now = engines.digests(engine) | engines.volatile_state(engine)
    return sorted(name for name in set(now) | set(expected) if now.get(name) != expected.get(name))


def poison(iteration: int) -> None:
    """Make the loss of ``iteration`` NaN."""
    from megatron_ft.mcore.loop import engine, forward

    original = forward.forward_step

    def forward_step(microbatches: Any, model: torch.nn.Module, *, iteration: int, _bad: int = iteration) -> Any:
        output, loss = original(microbatches, model, iteration=iteration)
        return (output * float("nan") if iteration == _bad else output), loss

    engine.forward_step = forward_step
