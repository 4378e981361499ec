"""Scenarios that ranks run for ``tests/distributed/test_state_copies.py``. Each function is one scenario and returns
JSON."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_ft import failpoints
from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.optimizer import state_copies
from megatron_ft.mcore.optimizer.adamw import masters
from megatron_ft.mcore.state.optimizer_shards import ShardMove, Shards
from megatron_ft.mcore.state.rank_status import position_of, resolve_iteration
from megatron_ft.mcore.state.tensors import is_non_expert, put_state, take_state, tensor_digest
from megatron_ft.mcore.training import engine as engine_module
from megatron_ft.operators import operators_of
from megatron_ft.planning.cost.memory import RankMemory, RankParameters
from megatron_ft.planning.recovery.membership import choose_target
from megatron_ft.topology import Topology
from tests.helpers.replica_scenarios import Job, config_of, job_of

BROKEN = 3
SHARDED = {"parallel.use_distributed_optimizer": True, "placement.state_copies": 2}


def _start(job: Job) -> Any:
    assert job.keeper is not None, "the job has replicas"
    plan = job.keeper.copy_plan()
    assert plan is not None, "the job has copies"
    return job.engine.keep_copies(plan, job.keeper.replicas().plan)


def _digests(job: Job) -> dict[str, Any]:
    """Return the digests of the copies on this rank by owner, and of this rank's own master weights and moments."""
    own: dict[str, str] = {}
    for master in masters(job.engine.model_chunks, job.engine.optimizer):
        own |= {f"{master.name}/{kind}": tensor_digest(tensor) for kind, tensor in master.parts.items()}
    kept = {
        str(copy.owner): {name: tensor_digest(tensor.view(-1)) for name, tensor in copy.tensors().items()}
        for copy in job.engine.state_copies.kept
    }
    return {"own": own, "kept": kept}


def _sizes(job: Job) -> dict[str, int]:
    """Return the bytes of the copies on this rank with their gradients, and the bytes that the plan of a job states."""
    # The slots of this job are enough for two replicas of every expert, so no state of experts is copied.
    config = replace(job.engine.config, placement=replace(job.engine.config.placement, min_replicas=2))
    copied = [parameter for copy in job.engine.state_copies.kept for parameter in copy.parameters]
    topology = Topology.of(config.parallel, config.launch.num_nodes * config.launch.ranks_per_node)
    operators = operators_of(config.model, job.engine.vocab_size)
    slots = config.placement.num_slots_per_rank
    parameters = RankParameters.of_stage(config.model, operators, topology, 0, slots)
    memory = RankMemory.of_stage(config, parameters, topology, 0, job.engine.vocab_size)
    return {"kept_bytes": sum(16 * parameter.numel() for parameter in copied), "planned_bytes": memory.copies_bytes}


def broken(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], phase: str | None
) -> dict[str, Any]:
    """Fail in ``phase`` of iteration 3 on all ranks, and finish or roll back this iteration on each rank alone."""
    config = config_of({**SHARDED, **overrides}, world_size)
    with job_of(config, rank=rank, world_size=world_size, store=store) as job:
        engine = job.engine
        _start(job)
        job.train(2)
        specs = [] if phase is None else [f'raise(at_iteration={BROKEN}, phase="{phase}")']
        failpoints.arm(specs, rank=rank, node=rank, record=lambda _: None)
        try:
            engine.run_iteration(BROKEN)
        except failpoints.InjectedFault:
            assert phase is not None, "no fault was armed"
            resolve_iteration(engine, choose_target([position_of(engine, rank)]))
        return {"iteration": engine.iteration, **_digests(job), **_sizes(job)}


def broken_update(*, rank: int, world_size: int, store: dist.Store) -> str:
    """Fail in the middle of the update of the copies. Return the error of this rank's position."""
    config = config_of(SHARDED, world_size)
    with job_of(config, rank=rank, world_size=world_size, store=store) as job:
        copies = _start(job)
        job.train(2)

        original = state_copies.repeat_adamw

        def update(states: Any, gradients: Any, **options: Any) -> None:
            if any(state is last for state in states for last in copies.kept[-1].states):
                raise RuntimeError("out of memory")
            original(states, gradients, **options)

        with mock.patch.object(state_copies, "repeat_adamw", update):
            try:
                job.engine.run_iteration(BROKEN)
            except RuntimeError as error:
                assert str(error) == "out of memory", error
        try:
            position_of(job.engine, rank)
        except RecoveryError as error:
            return str(error)
        return ""


def skipped(*, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Skip iteration 3 because its loss is not finite. Return the digests after iterations 2, 3 and 4."""
    original = engine_module.forward_step

    def forward_step(microbatches: Any, model: torch.nn.Module, *, iteration: int) -> Any:
        output, loss = original(microbatches, model, iteration=iteration)
        return (output * float("nan") if iteration == BROKEN else output), loss

    engine_module.forward_step = forward_step
    skips = {"training.non_finite_policy": "skip", "training.max_consecutive_skips": 3}
    config = config_of({**SHARDED, **skips, **overrides}, world_size)
    with job_of(config, rank=rank, world_size=world_size, store=store) as job:
        _start(job)
        found = []
        for iteration in (2, 3, 4):
            job.train(iteration)
            found.append({"skips": job.engine.history.num_consecutive_skips, **_digests(job)})
        return found


def restored(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], without: list[int], limit_bytes: int
) -> dict[str, Any]:
    """Build the engine again, and restore the shards from the ranks that are not in ``without``. Return the digests of
    the whole state before and after, or what is missing."""
    config = config_of({**SHARDED, **overrides}, world_size)
    with job_of(config, rank=rank, world_size=world_size, store=store) as job:
        engine = job.engine
        copies = _start(job)
        job.train(2)
        state = take_state(engine.model_chunks, engine.optimizer)
        before = {name: tensor_digest(tensor) for name, tensor in state.items()}
        mine = None if rank in without else Shards.split_off(state, copies, [0] * world_size)
        statements: list[Any] = [None] * world_size
        dist.all_gather_object(statements, None if mine is None else mine.statement(), group=engine.groups.vote)
        move = ShardMove.of(mine, statements, parts=[0] * world_size, iteration=2, num_layers=config.model.num_layers)
        missing = move.missing()
        if missing is not None:
            return {"missing": missing.summary()}
        state = {name: tensor for name, tensor in state.items() if not is_non_expert(name)}
        engine.rebuild(job.keeper.replicas())  # type: ignore[union-attr]
        put_state(engine.model_chunks, engine.optimizer, state, has_shards=True)
        move.restore(engine.model_chunks, engine.optimizer, engine.groups, limit_bytes=limit_bytes)
        after = {name: tensor_digest(tensor) for name, tensor in job.state().items()}
        return {"missing": None, "before": before, "after": after}
