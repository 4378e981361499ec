"""Claim ``replication-bandwidth``: captured slices reach the snapshot servers of peers as fast as gloo sends the same
bytes.

A window of slices is reported to a real snapshot server. The measured time ends when the server's status page shows the
window as replicated: the server has hashed every piece and sent it over the loopback interface, and each peer has
compared it with its hash. Plain gloo sends tensors of the same sizes to as many processes, which check nothing and
answer once. Server and gloo alternate, in an order that changes from pair to pair, with one and with two copies.
"""

import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processor import process_cpu_seconds
from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.planning.snapshot.memory import NUM_BUFFERS
from megatron_ft.planning.snapshot.plan import Piece
from megatron_ft.snapshot.server.client import REPLICATED_START, KeeperClient
from megatron_ft.snapshot.window import Slice
from megatron_ft.testing.ranks import Rank, compose, run_ranks
from megatron_ft.testing.snapshot_servers import Cluster, cluster

ID = "replication-bandwidth"
MIN_RATIO, QUICK_MIN_RATIO = 0.8, 0.4
MIB = 1 << 20
SLICE_BYTES = tuple(size * MIB for size in (1, 4, 16, 64))
NUM_SLICES = 4
PAIRS_BYTES, MAX_PAIRS, QUICK_PAIRS, WARM_UP = 8 << 30, 201, 7, 6
"""Bytes of all pairs of a case together, largest number of pairs, number of pairs of the quick variant, and number of
warm-up pairs. Small trials vary more and take less time, so there are more of them."""
PIECE_BYTES = MIB
WAIT_SECONDS, POLL_SECONDS = 60.0, 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Slices of one size that are sent to a number of peers."""

    slice_bytes: int
    num_copies: int
    is_quick: bool = False

    @property
    def pairs(self) -> int:
        """Return the number of measured pairs."""
        return QUICK_PAIRS if self.is_quick else min(MAX_PAIRS, PAIRS_BYTES // self.num_bytes - 1)

    @property
    def name(self) -> str:
        """Return the name that tables show."""
        return f"r={self.num_copies}, {self.slice_bytes // MIB} MiB"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one trial, each copy counted once."""
        return self.slice_bytes * NUM_SLICES


class KeeperSide:
    """Rank of node 0. A snapshot server replicates its memory to the next nodes."""

    def __init__(self, keepers: Cluster, num_copies: int) -> None:
        peers = list(range(1, num_copies + 1))
        self.client: KeeperClient = keepers.client(0, node=0, peer_nodes=peers)
        self.nodes = [keepers.nodes[node].process.pid for node in (0, *peers)]
        self._start = 0
        self._last_seconds = 0.0

    def prepare(self, case: Case) -> None:
        """Allocate and fill memory for windows of ``case``."""
        self.case = case
        self.arena = self.client.allocate(case.num_bytes)
        for number in range(NUM_BUFFERS):
            self.arena.buffer(number)[:] = bytes(range(256)) * (self.arena.window_bytes // 256)

    def replicate(self) -> float:
        """Replicate a window. Return the seconds from the report of the first slice until all peers have the whole
        window."""
        self._start += 1
        buffer = self._start % NUM_BUFFERS
        self.client.begin(buffer, start_iteration=self._start, num_slices=NUM_SLICES, plan={})
        began = time.perf_counter()
        for index in range(NUM_SLICES):
            self._captured(buffer, index)
        time.sleep(self._last_seconds / 2)  # polling takes processor time from what is measured
        while self.arena.status(REPLICATED_START) != self._start:
            if time.perf_counter() - began > WAIT_SECONDS:
                raise RuntimeError(f"not replicated within {WAIT_SECONDS} s: {self.client.problems()}")
            time.sleep(POLL_SECONDS)
        self._last_seconds = time.perf_counter() - began
        self.client.committed(self._start)
        return self._last_seconds

    def cpu_seconds(self) -> float:
        """Return the CPU time that all participating snapshot servers have used."""
        return sum(process_cpu_seconds(pid) for pid in self.nodes)

    def _captured(self, buffer: int, index: int) -> None:
        size = self.case.slice_bytes
        pieces = tuple(_piece(offset) for offset in range(0, size, PIECE_BYTES))
        part = Slice(iteration=self._start + index, offset=index * size, num_bytes=size, header={}, pieces=pieces)
        self.client.captured(buffer, index, part)


class GlooSide:
    """Process that sends over gloo, or one that receives. It uses as many tensors as the snapshot server has slices."""

    def __init__(self, case: Case, rank: int) -> None:
        import torch

        self.case, self.rank = case, rank
        shape = (NUM_BUFFERS, NUM_SLICES, case.slice_bytes)
        self._tensors = torch.ones(shape, dtype=torch.uint8)
        self._answer = torch.ones(1, dtype=torch.uint8)
        self._number = 0

    def exchange(self) -> float:
        """Send the tensors. Return the seconds until all receivers have confirmed that everything has arrived."""
        import torch.distributed as dist

        tensors = self._tensors[self._number % NUM_BUFFERS]
        self._number += 1
        began = time.perf_counter()
        if self.rank > 0:
            for tensor in tensors:
                dist.recv(tensor, src=0)
            dist.send(self._answer, dst=0)
            return time.perf_counter() - began
        peers = range(1, self.case.num_copies + 1)
        for work in [dist.isend(tensor, dst=peer) for tensor in tensors for peer in peers]:
            assert work is not None, "this rank belongs to the group"
            work.wait()
        for peer in peers:
            dist.recv(self._answer, src=peer)
        return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge every case."""
    arguments = parse_arguments(__doc__, argv)
    limit = QUICK_MIN_RATIO if arguments.quick else MIN_RATIO
    measured = {}
    config = compose()
    for num_copies in (1, 2):
        cases = [Case(slice_bytes=size, num_copies=num_copies, is_quick=arguments.quick) for size in SLICE_BYTES]
        with cluster(num_copies + 1) as keepers, tempfile.TemporaryDirectory(prefix="replication-") as folder:
            be = partial(_be, keepers, cases)
            ranks = run_ranks(be, config, world_size=num_copies + 1, run_dir=Path(folder))
        for number, case in enumerate(cases):
            measured[case] = summary(case, [rank[number] for rank in ranks])
            print(f"{case.name:12} {_in_words(measured[case])}", flush=True)
    return _judge(arguments.out, measured, limit)


def summary(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median ratio of the pairs, and for both sides bytes per second and CPU seconds per GiB.

    Bytes are counted once, even if there are several copies.
    """
    ours, theirs = ranks[0]["keeper_seconds"], ranks[0]["gloo_seconds"]
    sent_gib = case.num_bytes * len(ours) / (1 << 30)
    return {
        "ratio": statistics.median(gloo / keeper for keeper, gloo in zip(ours, theirs, strict=True)),
        "lowest_ratio": min(gloo / keeper for keeper, gloo in zip(ours, theirs, strict=True)),
        "keeper_bytes_per_second": case.num_bytes / statistics.median(ours),
        "gloo_bytes_per_second": case.num_bytes / statistics.median(theirs),
        "keeper_cpu_seconds_per_gib": ranks[0]["keeper_cpu_seconds"] / sent_gib,
        "gloo_cpu_seconds_per_gib": sum(rank["gloo_cpu_seconds"] for rank in ranks) / sent_gib,
        "first_keeper_seconds": ranks[0]["first_keeper_seconds"],
        "first_gloo_seconds": ranks[0]["first_gloo_seconds"],
        "pairs": len(ours),
    }


def _be(keepers: Cluster, cases: list[Case], _: JobConfig, rank: Rank) -> list[dict[str, Any]]:
    """Run one process of the gloo side. The first process also drives the snapshot server."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", rank.master_port, rank.world_size, is_master=rank.rank == 0)
    timeout = datetime.timedelta(seconds=WAIT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    if rank.rank > 0:
        return [_follow(GlooSide(case, rank.rank)) for case in cases]
    keeper = KeeperSide(keepers, rank.world_size - 1)
    return [_drive(keeper, case) for case in cases]


def _follow(gloo: GlooSide) -> dict[str, Any]:
    spent = [cpu for _, cpu in _trials(gloo.exchange, time.process_time, WARM_UP + gloo.case.pairs)]
    return {"gloo_cpu_seconds": sum(spent[WARM_UP:])}


def _drive(keeper: KeeperSide, case: Case) -> dict[str, Any]:
    keeper.prepare(case)
    gloo = GlooSide(case, 0)
    sides = (
        _trials(keeper.replicate, keeper.cpu_seconds, WARM_UP + case.pairs),
        _trials(gloo.exchange, time.process_time, WARM_UP + case.pairs),
    )
    rows = []
    for number in range(WARM_UP + case.pairs):
        order = (0, 1) if number % 2 else (1, 0)
        row = {side: next(sides[side]) for side in order}
        rows.append((row[0], row[1]))
    warm = rows[WARM_UP:]
    return {
        "keeper_seconds": [ours[0] for ours, _ in warm],
        "gloo_seconds": [theirs[0] for _, theirs in warm],
        "keeper_cpu_seconds": sum(ours[1] for ours, _ in warm),
        "gloo_cpu_seconds": sum(theirs[1] for _, theirs in warm),
        "first_keeper_seconds": rows[0][0][0],
        "first_gloo_seconds": rows[0][1][0],
    }


def _trials(run: Callable[[], float], cpu_seconds: Callable[[], float], number: int) -> Iterator[tuple[float, float]]:
    """Yield (wall seconds, CPU seconds) of ``number`` calls of ``run``. Each call is made when its result is
    requested."""
    for _ in range(number):
        before = cpu_seconds()
        seconds = run()
        yield seconds, cpu_seconds() - before


def _piece(offset: int) -> Piece:
    start, stop = offset // 4, (offset + PIECE_BYTES) // 4
    return Piece("decoder.weight", 0, "master", "float32", start, stop, offset, PIECE_BYTES)


def _judge(out: Path | None, measured: dict[Case, dict[str, Any]], limit: float) -> int:
    worst = min(measured, key=lambda case: measured[case]["ratio"])
    largest = [case for case in measured if case.slice_bytes == SLICE_BYTES[-1]]
    cpu = "; ".join(
        f"r={case.num_copies} {measured[case]['keeper_cpu_seconds_per_gib']:.2f} CPU s/GiB, hashed twice or more "
        f"(gloo {measured[case]['gloo_cpu_seconds_per_gib']:.2f}, unchecked)"
        for case in largest
    )
    ratios = "; ".join(
        f"r={copies} " + "/".join(f"{row['ratio']:.2f}" for case, row in measured.items() if case.num_copies == copies)
        for copies in (1, 2)
    )
    return finish(
        out,
        ID,
        passed=measured[worst]["ratio"] >= limit,
        figure=f"of gloo at 1/4/16/64 MiB: {ratios}; worst {worst.name}; {cpu}",
        threshold=f">= {limit:g} of gloo's bytes per second at every size, r=1 and r=2",
        counts={"cases": len(measured), "least_pairs": min(case.pairs for case in measured), "slices_each": NUM_SLICES},
        details={case.name: row for case, row in measured.items()},
    )


def _in_words(row: dict[str, Any]) -> str:
    gib = 1 << 30
    return (
        f"{row['ratio']:.2f} of gloo (lowest {row['lowest_ratio']:.2f}): "
        f"{row['keeper_bytes_per_second'] / gib:.2f} against {row['gloo_bytes_per_second'] / gib:.2f} GiB/s, "
        f"{row['keeper_cpu_seconds_per_gib']:.2f} against {row['gloo_cpu_seconds_per_gib']:.2f} CPU s/GiB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
