"""Scenarios that ranks run for ``tests/distributed/test_engine.py``. Each function is one scenario and returns JSON."""

import contextlib
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megatron_ft.events import Record
from megatron_ft.mcore.groups import Collectives, Groups, dissolve_groups
from megatron_ft.mcore.model.transformer_config import named_parameters, unwrap
from megatron_ft.mcore.optimizer.adamw import grad_scalers
from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
from megatron_ft.mcore.training.reporting import Throughput, iteration_records
from megatron_ft.planning.snapshot.memory import PeerAssignment
from megatron_ft.runtime.transport import abort
from megatron_ft.runtime.transport.handles import handles
from megatron_ft.testing import engines
from megatron_ft.testing.snapshot_servers import wait_until
from tests.helpers.volatile import volatile_state
from tests.unit.snapshot.server.served import Served

SLOW_SECONDS = 0.02
"""Additional time of a slow rank's attention: many times its usual time, even on a busy machine."""
SHARDED_BY_ROWS_IN_TWO = "linear_fc1."


def train(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], iterations: int = 3, multiple: int = 0
) -> dict[str, Any]:
    """Return losses, auxiliary losses and gradient norms of the first iterations, and the expert load."""
    config = engines.micro_config(overrides, world_size=world_size)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        if multiple:
            engines.add_padding(engine, multiple)
        votes = [engine.run_iteration(number).vote for number in range(1, iterations + 1)]
        load = engine.expert_load().tolist()
        evaluation = engine.evaluate()
        return {
            "losses": [vote.loss for vote in votes],
            "aux_losses": [vote.aux_loss for vote in votes],
            "z_losses": [vote.z_loss for vote in votes],
            "grad_norms": [vote.grad_norm for vote in votes],
            "tokens": [vote.num_tokens for vote in votes],
            "num_padding": engine.batch.num_padding_microbatches,
            "load": load,
            "evaluation": evaluation,
        }


def pace(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], slow_rank: int, iterations: int
) -> list[dict[str, float]]:
    """Return the slowest-rank metrics that this rank would report after each iteration, while one rank's attention is
    slow."""
    config = engines.micro_config(overrides, world_size=world_size)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        attention = unwrap(engine.model_chunks[0]).decoder.layers[0].self_attention.core_attention  # type: ignore[union-attr, operator]
        if rank == slow_rank:
            attention.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
        results = [engine.run_iteration(number) for number in range(1, iterations + 1)]
        throughput = Throughput.of(config, engine.vocab_size, None)
        values = [
            next(iteration_records(config, result, engine.batch, 1.0, range(10, 10 + world_size), throughput)).values
            for result in results
        ]
        return [{name: value for name, value in figures.items() if name.startswith("slowest_")} for figures in values]


def weights(*, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return every initial tensor by global name. Parts of tensor-parallel ranks are concatenated first."""
    config = engines.micro_config(overrides, world_size=world_size)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        tp = engine.pg.tp
        whole: dict[str, str] = {}
        num_sharded = 0
        for chunk in engine.model_chunks:
            for name, parameter in named_parameters(chunk):
                full, dim = parameter.detach(), getattr(parameter, "partition_dim", -1)
                if tp.size() > 1 and getattr(parameter, "tensor_model_parallel", False) and ".experts." not in name:
                    num_sharded += 1
                    parts = [torch.empty_like(full) for _ in range(tp.size())]
                    dist.all_gather(parts, full.contiguous(), group=tp)
                    gated = SHARDED_BY_ROWS_IN_TWO in name
                    halves = [part.chunk(2, dim) for part in parts] if gated else [(part,) for part in parts]
                    full = torch.cat([half[side] for side in range(1 + gated) for half in halves], dim)
                digest = xxhash.xxh3_128(full.contiguous().numpy().tobytes()).hexdigest()
                assert whole.setdefault(name, digest) == digest, name
    return {"tensors": whole, "num_sharded": num_sharded}


def _open_sockets() -> int:
    """Return the sockets of this process. A process group that is still referenced keeps its connections."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(target.startswith("socket:") for target in targets)


def build_again(*, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train, tear down, build a new generation in the same process and train again; then build another engine."""
    config = engines.micro_config(overrides, world_size=world_size)

    def on_new_groups(engine: Any, generation: int) -> dict[str, Any]:
        sockets_before = _open_sockets()
        engine.build(
            Groups.form(
                config.parallel,
                store=store,
                rank=rank,
                world_size=world_size,
                generation=generation,
                device="cpu",
                timeout_seconds=60,
            )
        )
        losses = [engine.run_iteration(number).vote.loss for number in (1, 2, 3)]
        state = {**engines.digests(engine), **volatile_state(engine)}
        sockets_between = _open_sockets()
        began = time.monotonic()
        engine.teardown()
        dissolve_groups()
        return {
            "losses": losses,
            "state": state,
            "seconds_to_leave": time.monotonic() - began,
            "sockets_opened": sockets_between - sockets_before,
            "sockets_left": _open_sockets() - sockets_before,
            "initialized": dist.is_initialized(),
        }

    engine = engines.new_engine(config)
    first, second = on_new_groups(engine, 0), on_new_groups(engine, 7)
    return {"first": first, "second": second, "fresh": on_new_groups(engines.new_engine(config), 8)}


def overflow_of_experts(*, rank: int, world_size: int, store: dist.Store) -> dict[str, Any]:
    """Let an expert's gradient overflow on the last rank. Return the resulting loss scales and weights."""
    overrides = {
        "precision.params_dtype": "fp16",
        "precision.initial_loss_scale": 64.0,
        "precision.hysteresis": 1,
        "parallel.expert_model_parallel_size": world_size,
    }
    config = engines.micro_config(overrides, world_size=world_size)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        finalize = engine.transformer_config.finalize_model_grads_func

        def overflow(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            if rank == world_size - 1:
                expert = next(p for name, p in named_parameters(engine.model_chunks[0]) if ".experts." in name)
                expert.main_grad.fill_(float("inf"))

        engine.transformer_config.finalize_model_grads_func = overflow
        before = engines.digests(engine)
        result = engine.run_iteration(1)
        unchanged = engines.digests(engine) == before
        engine.transformer_config.finalize_model_grads_func = finalize
        return {
            "action": result.decision.action,
            "unchanged": unchanged,
            "scales": [float(scaler.scale) for scaler in grad_scalers(engine.optimizer)],
            "next_scale": engine.run_iteration(2).vote.loss_scale,
        }


def gradients(*, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the norm of each router's gradient in the first iteration, on which auxiliary losses act."""
    config = engines.micro_config(overrides, world_size=world_size)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        vote = engine.vote(engine.prepare(1))
        named = dict(named_parameters(engine.model_chunks[0]))
        norms = {name: float(p.main_grad.norm()) for name, p in named.items() if name.endswith("router.weight")}
    return {"norms": norms, "aux_loss": vote.aux_loss, "z_loss": vote.z_loss}


def disagree(*, rank: int, world_size: int, store: dist.Store) -> dict[str, Any]:
    """Let one rank compute another gradient norm."""
    import dataclasses

    config = engines.micro_config(world_size=world_size)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        ballot = engine.prepare(1)
        if rank == 1:
            wrong = torch.nextafter(torch.tensor(ballot.grad_norm, dtype=torch.float64), torch.tensor(9.0))
            ballot = dataclasses.replace(ballot, grad_norm=float(wrong))
        before = engines.digests(engine)
        try:
            engine.vote(ballot)
        except Exception as error:  # noqa: BLE001 - its kind is the outcome
            return {
                "error_type": type(error).__name__,
                "output": str(error),
                "unchanged": engines.digests(engine) == before,
            }
    return {}


def stop_after_resuming(*, rank: int, world_size: int, store: dist.Store) -> dict[str, Any]:
    """Continue from a window whose part is only in the memory of rank 0's node, and persist it; then persist a window
    captured later.

    Returns:
        Names of the files after each of the two, and what was reported.
    """
    policy = {"_target_": "megatron_ft.planning.snapshot.dense.DenseInterval", "interval_iterations": 1}
    overrides = {
        "snapshot.policy": policy,
        "snapshot.num_peer_copies": 0,
        "snapshot.bandwidth_bytes_per_second": 1e9,
        "snapshot.iteration_seconds": 0.1,
    }
    config, output = engines.micro_config(overrides, world_size=world_size), list[Record]()
    with (
        tempfile.TemporaryDirectory() as folder,
        engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine,
    ):
        collectives, served = Collectives(engine.groups.vote), Served(Path(folder))
        url = Path(collectives.from_first(folder), "windows")
        about = {"world_size": world_size, "persist_every": 0, "persist_url": str(url)}
        served.persister.start()

        def begin(generation: int) -> tuple[Any, Snapshotter]:
            client = served.client(rank, generation=generation, **about)
            assignment = PeerAssignment.of(["node0"], 0)
            header = {"client": client, "assignment": assignment, "node": rank, "header": lambda index: dict}
            return client, Snapshotter(config, engine, report=output.append, **header)

        def train(client: Any, snapshots: Snapshotter) -> None:
            for _ in range(3):
                result = engine.run_iteration(engine.iteration + 1)
                snapshots.after_iteration(engine.iteration, result.vote, 0.1)
                snapshots.settle()
                newest = engine.iteration
                wait_until(lambda newest=newest: newest in client.buffer_states().replicated.values(), "hashes")  # type: ignore[misc]

        def persisted(snapshots: Snapshotter) -> list[str]:
            snapshots.persist_newest()
            snapshots.finish()
            collectives.any(False)
            return sorted(str(path.relative_to(url)) for path in url.rglob("*.window"))

        generation = engine.groups.generation
        client, before = begin(generation)
        train(client, before)
        kept, plan = before.kept, before.plan
        assert kept is not None and plan is not None, "a window is committed"
        before.close()
        client, after = begin(generation + 1)
        (window,) = [entry for entry in client.inventory(rank) if entry.key == kept]
        # As on a rank that was replaced: its part has come from a peer.
        after.resume(window if rank == 0 else replace(window, where="copy"), plan)
        of_the_resumed = persisted(after)
        train(client, after)
        of_a_new_one = persisted(after)
        after.close()
        served.close()
        problems = [record.to_record() for record in output if record.kind == "snapshot_problem"]
        return {"resumed": of_the_resumed, "new": of_a_new_one, "problems": problems}


def form_again(*, rank: int, world_size: int, store: dist.Store, generations: int) -> dict[str, Any]:
    """Form and dissolve the groups of several generations, of which every second one is broken. Return the number of
    open files after the first and after the last broken generation, and the number of connected groups. Fail if threads
    are left."""
    abort.install()
    parallel = engines.micro_config({"parallel.pipeline_model_parallel_size": 2}, world_size=world_size).parallel

    most_threads = 1_000

    def form(generation: int, *, is_broken: bool) -> tuple[int, int]:
        groups = Groups.form(
            parallel,
            store=store,
            rank=rank,
            world_size=world_size,
            generation=generation,
            device="cpu",
            timeout_seconds=60,
        )
        added = groups.add(range(world_size), timeout_seconds=60)
        sums = []
        for group in (groups.pg_collection.pp, groups.pg_collection.dp, groups.vote, added):
            value = torch.full((1000,), float(rank + 1))
            dist.all_reduce(value, group=group)
            sums.append(float(value[0]))
        num_connected = len({id(handle.inner) for handle in handles()})
        if is_broken:
            groups.transports.hang_up("the test has broken the generation")
        assert sums[-2:] == [3.0, 3.0], sums
        kept = groups.pg_collection.pp
        del groups, group, added
        dissolve_groups()
        # ``kept`` is still referenced: the connections must close all the same.
        assert kept.inner is None, "the handle is still connected"
        wait_until(lambda: abort.num_held() == 0, "all groups are destroyed")
        # The kernel may list a thread for a moment after it has ended.
        wait_until(lambda: len(os.listdir("/proc/self/task")) <= most_threads, "all threads have ended")
        return len(os.listdir("/proc/self/fd")), num_connected

    form(0, is_broken=False)
    form(1, is_broken=True)
    most_threads = len(os.listdir("/proc/self/task"))
    counts = [form(generation, is_broken=generation % 2 == 1) for generation in range(2, generations)]
    return {"first": counts[1], "last": counts[-1]}
