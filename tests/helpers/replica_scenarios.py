"""Scenarios that ranks run for ``tests/distributed/test_replicas.py``. Each function is one scenario and returns
JSON."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.config.identity import JobIdentity
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import derive_placement
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.checkpoint.state import DenseState
from megatron_ft.mcore.model.transformer_config import named_parameters
from megatron_ft.mcore.moe.placement_manager import Change, PlacementManager
from megatron_ft.mcore.moe.router import routers
from megatron_ft.mcore.optimizer.adamw import grad_scalers
from megatron_ft.mcore.state.tensors import take_state, tensor_digest, tensor_digests
from megatron_ft.testing import engines
from megatron_ft.topology import Topology
from tests.helpers.volatile import volatile_state

SPREAD = {"_target_": "megatron_ft.planning.placement.spread.Spread"}
OTHER_LOADS = (20.0, 9.0, 3.0, 1.0)
"""Loads for which another placement is planned than for even loads."""


def config_of(overrides: Mapping[str, Any], world_size: int, *, replicas: bool = True) -> JobConfig:
    """Return the derived configuration of a small job with one rank per node, by default with replica slots."""
    nodes = {"launch.num_nodes": world_size}
    slots = {
        "placement.algorithm": SPREAD,
        "placement.num_slots_per_rank": 3,
        "placement.min_replicas": 1,
    }
    return derive_placement(engines.micro_config({**nodes, **(slots if replicas else {}), **overrides}))


@dataclasses.dataclass(kw_only=True)
class Job:
    """Engine of one rank and the placement for which it is built. ``keeper`` is None without replicas."""

    engine: Any
    keeper: PlacementManager | None
    manager: CheckpointManager
    num_in_place: int = 0
    """Number of changes for which the model was not built again."""

    def save(self) -> None:
        """Save the current state."""
        extra = {} if self.keeper is None else {"placement": self.keeper.to_json()}
        self.manager.save(self._training_state(extra), self.engine.iteration)
        self.manager.finish()

    def load(self, source: Path) -> None:
        """Load a checkpoint."""
        state = self._training_state({})
        self.manager.load(state, source)
        self.engine.restore(state.host)

    def _training_state(self, extra: dict[str, Any]) -> DenseState:
        return DenseState(
            model_chunks=self.engine.model_chunks,
            optimizer=self.engine.optimizer,
            scheduler=self.engine.scheduler,
            host=self.engine.train_state(),
            consumed_samples=self.engine.iteration * 4,
            extra=extra,
        )

    def train(self, until: int) -> list[float]:
        """Train up to iteration ``until``, and return the losses."""
        losses = []
        while self.engine.iteration < until:
            losses.append(self.engine.run_iteration(self.engine.iteration + 1).vote.loss)
        return losses

    def move(self, loads: tuple[float, ...] = OTHER_LOADS) -> int:
        """Move to the placement for ``loads``. Return the transfers of this rank's stage."""
        assert self.keeper is not None, "only replicas move"
        self.keeper.loads = [[list(loads) for _ in plan.layer_numbers] for plan in self.keeper.plans]
        return self.carry_out(self.keeper.propose())

    def carry_out(self, change: Change, *, in_place: bool = True) -> int:
        """Carry out ``change``, in place if this is possible and wanted. Return the transfers of this rank's stage."""
        assert self.keeper is not None, "only replicas move"
        migration = self.keeper.part_of(change)
        steps = self.keeper.steps_to(change) if in_place else None
        replicas = self.keeper.replicas(migration.placement)
        if steps is None:
            self.engine.migrate(replicas, migration)
        else:
            self.engine.replace_experts(steps, replicas)
            self.num_in_place += 1
        self.keeper.adopt(change)
        return len(migration.transfers)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the main gradient of every parameter of this rank by global name."""
        return {
            name: parameter.main_grad
            for chunk in self.engine.model_chunks
            for name, parameter in named_parameters(chunk)
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Return the whole state of this rank by global name."""
        return take_state(self.engine.model_chunks, self.engine.optimizer)

    def of_experts(self) -> dict[str, str]:
        """Return the digests of all state of experts."""
        return {name: tensor_digest(value) for name, value in self.state().items() if ".local_experts." in name}


@contextlib.contextmanager
def job_of(
    config: JobConfig, *, rank: int, world_size: int, store: dist.Store, directory: str = "", source: Path | None = None
) -> Iterator[Job]:
    """Return a built engine, with replicas if the configuration has a placement algorithm. Load ``source`` if it is
    given."""
    keeper = None
    if config.placement.algorithm is not None:
        stage = Topology.of(config.parallel, world_size).coordinates(rank).pp
        keeper = PlacementManager(config, stage=stage)
    with engines.groups_of(config, store=store, rank=rank, world_size=world_size) as groups:
        manager = CheckpointManager(
            config.checkpoint,
            run_dir=Path(directory),
            identity=JobIdentity(run_id="test", run_name="test", settings={}),
            topology_record=dict.fromkeys(Topology.__dataclass_fields__, 1) | {"world_size": world_size},
            group=groups.vote,
            dp_cp_group=groups.pg_collection.dp_cp,
            report=lambda record: None,
        )
        if keeper is not None and source is not None:
            keeper.restore(manager.read_extra(source).get("placement"))
        engine = engines.new_engine(config)
        engine.build(groups, None if keeper is None else keeper.replicas())
        job = Job(engine=engine, keeper=keeper, manager=manager)
        del groups, manager
        if source is not None:
            job.load(source)
        try:
            yield job
        finally:
            engine.teardown()
            del job.manager


# -- scenarios --------------------------------------------------------------------------------------------


def order_of_exchanges(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], replicas: bool = False
) -> dict[str, Any]:
    """Train three iterations. Return the ranks of this rank's expert group, the fewest rows that an exchange brought to
    this rank, the all-to-alls of the backward pass in order (type and shape of their rows), and the losses."""
    exchange = dist.all_to_all_single
    of_backward: list[str] = []
    num_rows: list[int] = []

    def watched(received: torch.Tensor, sent: torch.Tensor, *others: Any, **named: Any) -> Any:
        if torch._C._current_graph_task_id() >= 0:  # during a backward pass; -1 otherwise
            of_backward.append(f"{sent.dtype} {list(sent.shape[1:])}")
        elif received.dim() > 1:  # neither probabilities nor gradients of expert copies
            num_rows.append(len(received))
        return exchange(received, sent, *others, **named)

    config = config_of(overrides, world_size, replicas=replicas)
    with job_of(config, rank=rank, world_size=world_size, store=store) as job:
        dist.all_to_all_single = watched
        losses = job.train(3)
        dist.all_to_all_single = exchange
        return {
            "group": dist.get_process_group_ranks(job.engine.groups.pg_collection.ep),
            "fewest_rows": min(num_rows),
            "of_backward": of_backward,
            "losses": losses,
        }


def train(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], replicas: bool
) -> dict[str, Any]:
    """Train four iterations. Experts move after the second one."""
    config = config_of(overrides, world_size, replicas=replicas)
    with job_of(config, rank=rank, world_size=world_size, store=store) as job:
        votes = [job.engine.run_iteration(iteration).vote for iteration in (1, 2)]
        load = job.engine.expert_load()
        moved = job.move() if replicas else 0
        votes += [job.engine.run_iteration(iteration).vote for iteration in (3, 4)]
        return {
            "losses": [vote.loss for vote in votes],
            "grad_norms": [vote.grad_norm for vote in votes],
            "aux_losses": [vote.aux_loss for vote in votes],
            "load": (load + job.engine.expert_load()).tolist(),
            "num_padding": job.engine.batch.num_padding_microbatches,
            "bias": [r.expert_bias.tolist() for r in routers(job.engine.model_chunks) if r.enable_expert_bias],
            "moved": moved,
            "experts": job.of_experts(),
            "evaluation": job.engine.evaluate(),
        }


def gradients(*, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients of all copies before and after they are summed, and the gradient norm in the vote."""
    with job_of(config_of(overrides, world_size), rank=rank, world_size=world_size, store=store) as job:
        engine, before = job.engine, {}
        summing = engine.replica_gradients.sum

        def sum_and_remember() -> None:
            before.update({name: grad.clone() for name, grad in job.gradients().items()})
            summing()

        engine.replica_gradients.sum = sum_and_remember
        norm = engine.vote(engine.prepare(1)).grad_norm
        after = job.gradients()
        return {
            "before": {name: grad.flatten().tolist()[:40] for name, grad in before.items() if ".local_exp" in name},
            "after": {name: grad.flatten().tolist()[:40] for name, grad in after.items() if ".local_exp" in name},
            "digests": {name: tensor_digest(grad) for name, grad in after.items()},
            "squares": {name: float(grad.double().square().sum()) for name, grad in after.items()},
            "grad_norm": norm,
        }


def moves(*, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of all state before a move, after it, and after the move back, with loss scale and random
    state."""
    with job_of(config_of(overrides, world_size), rank=rank, world_size=world_size, store=store) as job:
        job.train(3)
        digests, volatile, moved = [], [], []
        for loads in ((1.0, 1.0, 1.0, 1.0), OTHER_LOADS, (1.0, 3.0, 9.0, 20.0)):
            moved.append(job.move(loads))
            digests.append({name: tensor_digest(tensor) for name, tensor in job.state().items()})
            volatile.append(volatile_state(job.engine))
        scales = [float(scaler.scale) for scaler in grad_scalers(job.engine.optimizer)]
        return {
            "digests": digests,
            "volatile": volatile,
            "moved": moved,
            "scales": scales,
            "losses": job.train(5),
            "in_place": job.num_in_place,
            "slots": job.keeper.plans[job.engine.pg.pp.rank()].to_json()["slots"],
        }


def checkpoints(
    *,
    rank: int,
    world_size: int,
    store: dist.Store,
    overrides: dict[str, Any],
    replicas: bool,
    directory: str,
    save: bool,
) -> dict[str, Any]:
    """Save after the first iteration, move, and save after the next two. Or load the last of these checkpoints. Then
    train on."""
    config = config_of(overrides, world_size, replicas=replicas)
    source = None if save else Path(directory, "checkpoints", "iter_0000003")
    first = PlacementManager(config, stage=0).plans if replicas else None
    with job_of(config, rank=rank, world_size=world_size, store=store, directory=directory, source=source) as job:
        if save:
            job.train(1)
            job.save()
            if replicas:
                job.move()
            for iteration in (2, 3):
                job.train(iteration)
                job.save()
        weights = {
            name: tensor_digest(parameter.detach())
            for chunk in job.engine.model_chunks
            for name, parameter in named_parameters(chunk)
        }
        return {
            "placement_differs": job.keeper is not None and job.keeper.plans != first,
            "weights": weights,
            "in_place": job.num_in_place,
            "losses": job.train(5),
            "state": tensor_digests(job.engine.model_chunks, job.engine.optimizer),
        }


def history(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], directory: str
) -> dict[str, Any]:
    """Run six iterations with rebalancing in place, then the same iterations from the stored placements, for which the
    model is built again. Return the states of both."""
    folder, rebalancing = Path(directory), {"placement.rebalance_interval_iterations": 2}
    eager = {"placement.rebalance_min_gain": 0.0, "placement.rebalance_bytes_per_token": 1e12}
    own = _with_changes(config_of({**overrides, **rebalancing, **eager}, world_size), rank, world_size, store, folder)
    files = sorted(folder.glob("placement-*.json"))
    scripted = {"placement.schedule": [f"{int(path.stem.split('-')[1])}:{path}" for path in files]}
    given = _with_changes(config_of({**overrides, **scripted}, world_size), rank, world_size, store, None)
    return {"own": own[0], "scripted": given[0], "changes": len(files) - 1, "in_place": own[1]}


def _with_changes(
    config: JobConfig, rank: int, world_size: int, store: dist.Store, folder: Path | None
) -> tuple[list[dict[str, str]], int]:
    """Return the digests after each iteration, and the number of changes in place. Placements are written to ``folder``
    before the first iteration that uses them."""
    with job_of(config, rank=rank, world_size=world_size, store=store) as job:
        assert job.keeper is not None, "there is a placement to change"
        states = []
        for iteration in range(1, 7):
            change = None if iteration == 1 else job.keeper.change_before(iteration)
            if change is not None:
                job.carry_out(change, in_place=folder is not None)
            if folder is not None and rank == 0 and (change is not None or iteration == 1):
                job.keeper.write(folder / f"placement-{iteration}.json")
            job.engine.run_iteration(iteration)
            job.keeper.observe(job.engine.expert_load())
            states.append(tensor_digests(job.engine.model_chunks, job.engine.optimizer))
        dist.barrier(group=job.engine.groups.vote)
        return states, job.num_in_place
