"""Claim ``dense-save``: a dense save blocks training for about the time of copying the bytes that a rank writes.

Two data-parallel ranks with the distributed optimizer save their state. Every round measures, in turn, saves of
Megatron-Core's own asynchronous writer in both of its formats, a warm copy of the bytes that the rank writes, and a
save of this project, with iterations between them. Training is blocked by the call that begins a save, by the wait for
the copies before an update, and by the calls between iterations that complete the save. Each round counts for its
slowest rank. Figures are medians over all rounds except the first.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.samples import check_data
from megatron_ft.planning.job import JobPlan
from megatron_ft.testing.ranks import Rank, compose, resident_growth, run_ranks

ID = "dense-save"
WORLD_SIZE = 2
ROUNDS, QUICK_ROUNDS = 9, 3
ITERATIONS_AFTER = 3
JOB_SECONDS, QUICK_JOB_SECONDS = 1500.0, 500.0
MAX_MEMCPY, QUICK_MAX_MEMCPY = 1.2, 4.0
MAX_MEMORY = 1.1
THRESHOLD = (
    f"blocked <= {MAX_MEMCPY}x a copy of the bytes that the slowest rank writes, host memory <= {MAX_MEMORY}x these "
    "bytes, all tensors those of one iteration"
)
OURS, FULL, BY_RANK = "this project", "fully_reshardable", "dp_reshardable"
"""Megatron-Core's formats have their names; the second can be loaded only with the same TP, PP and EP."""
_JOB = (
    "model=moe_micro",
    "model.num_layers=2",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1024",
    "model.moe_ffn_hidden_size=1024",
    "precision.params_dtype=bf16",
    "parallel.use_distributed_optimizer=true",
    f"launch.ranks_per_node={WORLD_SIZE}",
    "training.train_iterations=100000",
    "training.micro_batch_size=1",
    "training.global_batch_size=2",
    "training.eval_interval_iterations=0",
    "checkpoint.keep_last=1",
    "telemetry.wandb=disabled",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all saves, and judge those of this project."""
    arguments = parse_arguments(__doc__, argv)
    config = compose(*_JOB)
    planned = JobPlan.of(config, check_data(config), device="cpu").stages[0].saving_bytes
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="dense-save-") as folder:
        seconds = QUICK_JOB_SECONDS if arguments.quick else JOB_SECONDS
        measure = partial(_measure, rounds)
        ranks = run_ranks(measure, config, world_size=WORLD_SIZE, run_dir=Path(folder), timeout_seconds=seconds)
        wrong = _wrong_tensors(Path(folder), [rank["boundary"] for rank in ranks])
    table = {name: _summary([rank["rows"][name] for rank in ranks]) for name in (OURS, FULL, BY_RANK)}
    memory = max(rank["grown_bytes"] / rank["written_bytes"] for rank in ranks)
    for name, row in table.items():
        milliseconds = f"{row['seconds'] * 1e3:8.1f} ms, {row['first'] * 1e3:8.1f} ms first"
        print(f"{name:18} blocked {milliseconds}, {row['of_memcpy']:6.2f}x a copy")
    ours = table[OURS]
    limit = QUICK_MAX_MEMCPY if arguments.quick else MAX_MEMCPY
    written = max(rank["written_bytes"] for rank in ranks)
    theirs = ", ".join(f"{table[name]['of_memcpy']:.1f}x ({name})" for name in (FULL, BY_RANK))
    figure = (
        f"blocked {ours['of_memcpy']:.2f}x a copy of {written / 1e6:.0f} MB, of which {ours['begin_of_memcpy']:.2f}x "
        f"at the start ({ours['seconds'] * 1e3:.0f} ms; first save {ours['first'] * 1e3:.0f} ms); host memory "
        f"{memory:.2f}x, planned {planned / written:.2f}x; {len(wrong)} tensors of another iteration; Megatron-Core's "
        f"asynchronous save {theirs}"
    )
    return finish(
        arguments.out,
        ID,
        passed=ours["of_memcpy"] <= limit and memory <= MAX_MEMORY and not wrong,
        figure=figure,
        threshold=THRESHOLD.replace(str(MAX_MEMCPY), str(limit)),
        counts={"rounds": rounds, "ranks": WORLD_SIZE, "systems": len(table), "tensors_wrong": len(wrong)},
        details={"table": table, "written_bytes": written, "planned_bytes": planned, "memory": memory, "wrong": wrong},
    )


def _summary(by_rank: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    rounds = list(zip(*by_rank, strict=True))
    warm = rounds[1:]
    return {
        "seconds": statistics.median(max(row["seconds"] for row in rows) for rows in warm),
        "of_memcpy": statistics.median(max(row["seconds"] / row["memcpy"] for row in rows) for rows in warm),
        "begin_of_memcpy": statistics.median(max(row["begin"] / row["memcpy"] for row in rows) for rows in warm),
        "first": max(row["seconds"] for row in rounds[0]),
    }


def _wrong_tensors(folder: Path, boundaries: Sequence[dict[str, str]]) -> list[str]:
    """Return the ranges of master weights whose values in the checkpoint of the last round are wrong. ``boundaries``
    has, for each rank, the checksum at the save of each range (name, first element, element after the last)."""
    from megatron_ft.mcore.convert.dense_files import DenseReader

    (saved,) = (folder / "checkpoints").glob("iter_*")
    reader, wrong = DenseReader.open(saved), []
    for boundary in boundaries:
        for place, checksum in boundary.items():
            name, start, stop = place.rsplit(" ", 2)
            stored = reader.read(name).view(-1)[int(start) : int(stop)]
            if _checksum(stored) != checksum:
                wrong.append(place)
    return wrong


def _checksum(tensor: Any) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes())


def _measure(rounds: int, config: JobConfig, rank: Rank) -> dict[str, Any]:
    return _Bench(config, rank).measure(rounds)


class _Bench:
    """Rank with a trainer and all systems that save its state."""

    def __init__(self, config: JobConfig, rank: Rank) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        from megatron_ft.testing.ranks import join

        self.trainer, self.groups = join(config, rank)
        self.rank = rank
        self.manager = self.trainer.checkpoints
        self.queue = AsyncCallsQueue()
        self.number = 0
        self.strategies: dict[str, Any] = {}
        self.iterate()

    def iterate(self) -> None:
        """Run one iteration."""
        self.trainer.engine.run_iteration(self.trainer.engine.iteration + 1)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return the times of all systems, the memory of the first save, and ``_boundary`` at the last save."""
        grown = resident_growth(lambda: self._save_ours(waits=True))
        rows: dict[str, list[dict[str, float]]] = {OURS: [], FULL: [], BY_RANK: []}
        boundary: dict[str, str] = {}
        for _ in range(rounds):
            for name in (FULL, BY_RANK, OURS):
                self.iterate()
                memcpy = self._memcpy()
                if name == OURS:
                    boundary = self._boundary()
                    seconds = self._blocked(self._save_ours, self.manager.poll, self.manager.finish)
                else:
                    seconds = self._blocked(partial(self._save_theirs, name), self._poll_theirs, self._drain_theirs)
                rows[name].append({"begin": seconds[0], "seconds": sum(seconds), "memcpy": memcpy})
        self._end_theirs()
        return {
            "rows": rows,
            "grown_bytes": grown,
            "written_bytes": sum(copy.numel() * copy.element_size() for copy, _ in self._pairs()),
            "boundary": boundary,
        }

    def _blocked(self, save: Callable[[], None], poll: Callable[[], None], drain: Callable[[], None]) -> list[float]:
        """Return the seconds for which each call blocks training: first the call that begins a save, then the calls
        before updates and between iterations. The rest of the save is not counted. All ranks begin each call together,
        so that no rank counts time in which it waits for another rank's iteration."""
        self._barrier()
        blocked = [_seconds(save)]
        for _ in range(ITERATIONS_AFTER):
            blocked.append(self._waited())
            self._barrier()
            blocked.append(_seconds(poll))
        drain()
        return blocked

    def _waited(self) -> float:
        """Run one iteration. Return the seconds for which its update waits until the state is copied."""
        waits, times = self.trainer.engine.before_update, []

        def note() -> None:
            times.append(time.perf_counter())

        waits.insert(0, note)
        waits.append(note)
        self.iterate()
        waits[:] = [wait for wait in waits if wait is not note]
        return times[-1] - times[0]

    def _save_ours(self, *, waits: bool = False) -> None:
        engine = self.trainer.engine
        self.manager.save(self.trainer.state({}), engine.iteration)
        if waits:
            self.manager.finish()

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return (copy, source) of every tensor range that this rank writes."""
        import torch

        planner = self.manager._planner
        assert planner._planned is not None, "the plan of the first save was not kept"
        items = [item for _, items in planner._planned.files for item in items]
        return [
            (copy, planner._sources[item.index.fqn, tuple(item.index.offset)])
            for item, copy in items
            if isinstance(copy, torch.Tensor)
        ]

    def _memcpy(self) -> float:
        """Return the seconds of a warm copy of the bytes that this rank writes, while the other rank copies, too."""
        import torch

        pairs = self._pairs()
        if not hasattr(self, "targets"):
            self.targets = [torch.empty_like(copy).zero_() for copy, _ in pairs]
        self._barrier()

        def copy() -> None:
            with torch.no_grad():
                for target, (_, source) in zip(self.targets, pairs, strict=True):
                    target.copy_(source)

        return min(_seconds(copy) for _ in range(2))

    def _boundary(self) -> dict[str, str]:
        """Return checksums of this rank's master weights."""
        found = {}
        for (name, offset), source in self.manager._planner._sources.items():
            if name.startswith("optimizer.state.param."):
                whole = self._shapes()[name]
                start = sum(at * _stride(whole, axis) for axis, at in enumerate(offset))
                found[f"{name} {start} {start + source.numel()}"] = _checksum(source.detach().reshape(-1))
        return found

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

        if not hasattr(self, "shapes"):
            tree = self.trainer.state({}).build_shards(self.manager._metadata(), is_loading=False)
            apply_factories(tree)
            leaves = [leaf for leaf in nested_values(tree) if isinstance(leaf, ShardedTensor)]
            self.shapes = {leaf.key: tuple(leaf.global_shape) for leaf in leaves}
        return self.shapes

    def _save_theirs(self, form: str) -> None:
        """Save as Megatron-LM does with ``--async-save``: Megatron-Core plans, forks, and writes in the child."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        from megatron_ft.mcore.model.transformer_config import unwrap

        engine = self.trainer.engine
        if form not in self.strategies:
            self.strategies[form] = FullyParallelSaveStrategyWrapper(
                get_default_save_sharded_strategy("torch_dist", 1), self.groups.pg_collection.dp_cp, True
            )
        metadata = {
            "distrib_optim_sharding_type": form,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
            "dp_cp_group": self.groups.pg_collection.dp_cp,
        }
        model = {"model": unwrap(engine.model_chunks[0]).sharded_state_dict(metadata=metadata)}
        optimizer = engine.optimizer.sharded_state_dict(model, False, metadata=metadata)
        self.number += 1
        folder = self.rank.run_dir / f"theirs-{self.number}"
        folder.mkdir(exist_ok=True)
        self._barrier()
        request = dist_checkpointing.save(
            {**model, "optimizer": optimizer, "iteration": engine.iteration},
            str(folder),
            sharded_strategy=self.strategies[form],
            async_sharded_save=True,
            validate_access_integrity=False,
            content_metadata={},
        )
        self.queue.schedule_async_request(request)

    def _poll_theirs(self) -> None:
        self.queue.maybe_finalize_async_calls()

    def _drain_theirs(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)
        self._barrier()
        if self.rank.rank == 0:
            shutil.rmtree(self.rank.run_dir / f"theirs-{self.number}")
        self._barrier()

    def _end_theirs(self) -> None:
        """End the process with which Megatron-Core's writer collects results. It would outlive the rank."""
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        self.queue.close()
        filesystem_async._results_queue._manager.shutdown()

    def _barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.groups.vote)


def _stride(shape: Sequence[int], axis: int) -> int:
    size = 1
    for length in shape[axis + 1 :]:
        size *= length
    return size


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
