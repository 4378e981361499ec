"""Claim ``snapshot-stall``: capturing a slice of the state in every iteration hardly delays training.

Two ranks of one real job have a sharded optimizer. In every round each system is measured in turn, in an order that
changes. A turn consists of some iterations with a save after each; before and after the turn, the rate of a warm memory
copy is measured. This project's windows are sent to real snapshot servers, with copies at two other nodes' servers. The
time of a save is the time between the end of an iteration and the start of the next one, plus the time that the next
update waits. Each round counts for its slowest rank. Times are medians over rounds, except the first round, which is
reported separately. CPU time and page counts come from the kernel.
"""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processor import process_cpu_seconds, thread_cpu_seconds, thread_minor_faults, thread_named
from benchmarks.report import finish, parse_arguments
from benchmarks.stall_figures import DCP, DCP_SHARED, MEGATRON, OURS, Row, judge, summary, table
from megatron_ft.config.job import JobConfig, SnapshotConfig
from megatron_ft.corpus.samples import check_data
from megatron_ft.testing.ranks import Rank, compose, run_ranks
from megatron_ft.testing.snapshot_servers import Cluster, cluster

if TYPE_CHECKING:
    from benchmarks.savers import Saver

ID = "snapshot-stall"
WORLD_SIZE, NUM_NODES = 2, 3
ROUNDS, QUICK_ROUNDS = 13, 2
NUM_SAVES = 4
"""Number of consecutive saves, which is also the number of slices of a window."""
MEMCPY_REPEATS = 3
JOB_SECONDS, QUICK_JOB_SECONDS = 900.0, 300.0
JOB = (
    "model=moe_tiny",
    "model.hidden_size=256",
    "model.moe_ffn_hidden_size=512",
    "training.eval_interval_iterations=0",
    f"launch.num_nodes={WORLD_SIZE}",
    "training.train_iterations=100000",
    "checkpoint.save_at_end=false",
    "checkpoint.keep_last=1",
)
_BF16 = ("precision.params_dtype=bf16",)
_SNAPSHOT = ("snapshot=sparse_window", "snapshot.num_peer_copies=2", "snapshot.iteration_seconds=1.0")
Call = tuple[float, float, int]
"""Wall seconds, CPU seconds and minor page faults of a thread in one call."""
BUDGET_BYTES = 29e6
"""Bytes of one slice: a quarter of the state, and the weights of the operators that are captured later."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    config = compose(*JOB, *_BF16, f"training.global_batch_size={8 if arguments.quick else 16}")
    snapshot = compose(*JOB, *_BF16, *_SNAPSHOT, f"snapshot.bandwidth_bytes_per_second={BUDGET_BYTES}").snapshot
    check_data(config)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    systems = (OURS, DCP, DCP_SHARED, MEGATRON)
    with cluster(NUM_NODES) as keepers, tempfile.TemporaryDirectory(prefix="stall-") as folder:
        run = partial(measure, keepers, snapshot, systems, rounds)
        seconds = QUICK_JOB_SECONDS if arguments.quick else JOB_SECONDS
        ranks = run_ranks(run, config, world_size=WORLD_SIZE, run_dir=Path(folder), timeout_seconds=seconds)
    figures = summary(ranks)
    print(table(figures), flush=True)
    passed, figure, threshold = judge(figures, num_saves=NUM_SAVES, quick=arguments.quick)
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=figure,
        threshold=threshold,
        counts={"rounds": rounds, "saves_each": NUM_SAVES, "systems": len(systems), "ranks": WORLD_SIZE},
        details={"summary": figures, "ranks": ranks},
    )


def measure(
    keepers: Cluster, snapshot: SnapshotConfig, systems: tuple[str, ...], rounds: int, config: JobConfig, rank: Rank
) -> dict[str, Any]:
    """Measure ``systems`` on one rank, in turns. All ranks of the job must call this.

    Args:
        keepers: snapshot servers of ``NUM_NODES`` nodes.
        snapshot: configuration of the windows.

    Returns:
        rows, times and counts for ``stall_figures.summary``.
    """
    return _Bench(keepers, snapshot, systems, config, rank).measure(systems, rounds)


class _Bench:
    """Rank with a trainer and all systems that save its state."""

    def __init__(
        self, keepers: Cluster, snapshot: SnapshotConfig, systems: Sequence[str], config: JobConfig, rank: Rank
    ) -> None:
        from megatron_ft.testing.ranks import join

        self.trainer, self.groups = join(config, rank)
        self.engine = self.trainer.engine
        self.keepers = [node.process.pid for node in keepers.nodes.values()]
        self.rank = rank
        self._savers(keepers, snapshot, systems)
        self.iterate()
        self._memory()

    def _savers(self, keepers: Cluster, snapshot: SnapshotConfig, systems: Sequence[str]) -> None:
        from benchmarks.savers import MegatronFormat, TorchAsync, Windows, shared_memory_stager

        node = self.rank.rank
        others = [(node + step) % NUM_NODES for step in range(1, NUM_NODES)]
        client = keepers.client(node, node=node, peer_nodes=others, world_size=self.rank.world_size)
        self.windows = Windows(self.trainer, snapshot, client, node=node)
        state = self._dense_state()
        self.dense_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        folder = self.rank.run_dir / "dcp"
        ways: dict[str, Callable[[], Saver]] = {
            OURS: lambda: self.windows,
            DCP: lambda: TorchAsync(state, folder, None),
            DCP_SHARED: lambda: TorchAsync(state, folder, shared_memory_stager()),
            MEGATRON: lambda: MegatronFormat(self.trainer),
        }
        self.savers = {name: ways[name]() for name in systems}

    def _dense_state(self) -> dict[str, Any]:
        """Return the live tensors, by name, of everything that this rank captures in a window of one slice."""
        from megatron_ft.mcore.state.operator_view import OperatorView
        from megatron_ft.planning.snapshot.plan import WindowPlan

        view = OperatorView(
            self.engine.model_chunks,
            self.engine.optimizer,
            groups=self.groups,
            num_layers=self.trainer.config.model.num_layers,
        )
        pieces = view.pieces(WindowPlan.dense(view.shards), 0)
        return {
            f"rank{view.rank}/{piece.parameter}/{piece.tensor_part}/{piece.start}/{piece.component}": view.source(piece)
            for piece in pieces
        }

    def _memory(self) -> None:
        """Allocate two warm buffers, for the memory copy with which the systems are compared."""
        import torch

        self.source = torch.ones(2 * self.dense_bytes, dtype=torch.uint8)
        self.target = torch.ones(2 * self.dense_bytes, dtype=torch.uint8)

    # -- rounds -------------------------------------------------------------------------------------------

    def measure(self, systems: tuple[str, ...], rounds: int) -> dict[str, Any]:
        """Return the rows of all saves of all rounds."""
        rows: list[Row] = []
        plain, plain_cpu = [], []
        for number in range(rounds):
            began = time.process_time()
            plain.append(self.iterate())
            plain_cpu.append(time.process_time() - began)
            turned = systems[number % len(systems) :] + systems[: number % len(systems)]
            for name in turned:
                rows.append(self._block(name))
        operations = self._operations()
        for saver in self.savers.values():
            saver.close()
        return {
            "rows": rows,
            "plain_seconds": plain,
            "plain_cpu_seconds": plain_cpu,
            "dense_bytes": self.dense_bytes,
            "operations": operations,
            "window_iterations": self.windows.planned[-1].window_iterations if self.windows.planned else NUM_SAVES,
            "num_delayed": self.windows.num_delayed,
        }

    def _block(self, name: str) -> Row:
        """Run some iterations with a save after each. Then run one more, because the last save may delay its update."""
        saver = self.savers[name]
        num_bytes = self.windows.num_bytes
        before = self.memcpy_bytes_per_second()
        used = self._used()
        if name == OURS:
            self.windows.expect(self.engine.iteration + 1)
        saves, settles, seconds = [], [], []
        for index in range(NUM_SAVES + 1):
            seconds.append(self.iterate(saver.settle))
            if index > 0:
                settles.append(self.settled)
            if index < NUM_SAVES:
                saves.append(_timed(partial(saver.save, self.result, seconds[-1])))
        began = time.perf_counter()
        saver.drain()
        drained = time.perf_counter() - began
        self._barrier()
        spent = {key: value - used[key] for key, value in self._used().items()}
        after = self.memcpy_bytes_per_second()
        saved = self.windows.num_bytes - num_bytes if name == OURS else NUM_SAVES * self.dense_bytes
        return {
            "system": name,
            "blocked_seconds": [save[0] + settle[0] for save, settle in zip(saves, settles, strict=True)],
            "settle_seconds": [settle[0] for settle in settles],
            "blocked_cpu_seconds": sum(call[1] for call in saves + settles),
            "main_faults": sum(call[2] for call in saves + settles),
            "iteration_seconds": seconds,
            "drain_seconds": drained,
            "num_bytes": saved,
            "memcpy_seconds": saved * (1 / before + 1 / after) / 2,
            **spent,
        }

    def iterate(self, settle: Callable[[], None] = lambda: None) -> float:
        """Run one iteration. Return its seconds, without the time of ``settle`` before the update."""
        self.settled = (0.0, 0.0, 0)
        calls = []

        def before_update() -> None:
            calls.append(_timed(settle))
            self.settled = (sum(c[0] for c in calls), sum(c[1] for c in calls), sum(c[2] for c in calls))

        self.engine.before_update = [before_update]
        began = time.perf_counter()
        self.result = self.engine.run_iteration(self.engine.iteration + 1)
        return time.perf_counter() - began - self.settled[0]

    def memcpy_bytes_per_second(self) -> float:
        """Measure one thread's copies between warm buffers. Both ranks copy at the same time, as they save."""
        self._barrier()
        seconds: list[float] = []
        for _ in range(MEMCPY_REPEATS):
            began = time.perf_counter()
            self.target[: self.dense_bytes].copy_(self.source[: self.dense_bytes])
            seconds.append(time.perf_counter() - began)
        self._barrier()
        return float(self.dense_bytes / statistics.median(seconds))

    def _used(self) -> dict[str, float]:
        """Return CPU seconds and pages of all processes that save. Only one rank includes the snapshot servers of the
        job."""
        thread = thread_named("capture")
        keepers = sum(process_cpu_seconds(pid) for pid in self.keepers) if self.rank.rank == 0 else 0.0
        return {
            "process_cpu_seconds": time.process_time(),
            "capture_cpu_seconds": thread_cpu_seconds(thread),
            "capture_faults": thread_minor_faults(thread),
            "keeper_cpu_seconds": keepers,
        }

    def _operations(self) -> list[int]:
        """Return the number of torch operations of the training thread for each slice of one more window."""
        from benchmarks.operations import counted

        found: list[int] = []
        self.windows.expect(self.engine.iteration + 1)
        for index in range(NUM_SAVES + 1):
            with counted() as settling:
                self.windows.settle()
            self.iterate()
            if index > 0:
                found[index - 1] += settling[0]
            if index < NUM_SAVES:
                with counted() as saving:
                    self.windows.save(self.result, 1.0)
                found.append(saving[0])
        self.windows.drain()
        return found

    def _barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.groups.vote)


def _timed(call: Callable[[], None]) -> Call:
    """Measure a call on this thread."""
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    cpu, began = time.thread_time(), time.perf_counter()
    call()
    seconds, spent = time.perf_counter() - began, time.thread_time() - cpu
    return seconds, spent, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults


if __name__ == "__main__":
    raise SystemExit(main())
