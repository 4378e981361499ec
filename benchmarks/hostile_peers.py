"""Claim ``hostile-peers``: peers that connect to a job and do not follow the protocol change nothing in the job.

Two jobs are attacked while they train, on every listener of this project: the controller's port, the sockets of node
agents and of the fork server, and in the second job the listeners of snapshot servers. The attackers have no token, a
wrong token, or the right token with malformed messages. They send random bytes, frames that are cut, too long or nested
too deep, and calls without the announced body. They also open many connections on which they send nothing. No process
may die. The same jobs without attacks are the reference: losses and digests of every rank's state must be equal in
every bit, events and decisions must be the same, and an attacked job may take at most ``MAX_DELAY`` times as long. A
trial is an attack on a running job; its outcome must be one that is allowed. PyTorch's store and gloo have no token and
are not attacked (SECURITY.md).
"""

import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import finish, parse_arguments
from megatron_ft.control.admin import ControllerAddress
from megatron_ft.control.rpc import RpcClient, RpcError
from megatron_ft.testing.attacks import (
    ANSWERED,
    REFUSED,
    Attack,
    Caller,
    connect,
    controller_attacks,
    crowd,
    greetings,
    headers_without_body,
    keeper_words,
    port_attacks,
    requests,
    stream_attacks,
)
from megatron_ft.testing.jobs import JobResult, forkserver, start, wait

ID = "hostile-peers"
NUM_NODES = 3
NUM_ITERATIONS, QUICK_ITERATIONS = 1200, 90
"""Iterations of a job. If the job ends before the attacks do, both jobs run again with twice as many."""
MOST_DOUBLINGS = 4
NUM_ROUNDS, QUICK_ROUNDS = 3, 1
IDLE_CONNECTIONS, QUICK_CONNECTIONS = 1000, 100
SLOW_CALLS = 64
MIN_TRIALS = 900
MAX_DELAY = 3.0
"""Largest allowed ratio of the wall time of the attacked job to that of the undisturbed job."""
SEED = 20261121
TIMEOUT_SECONDS = 600.0
WARM = "megatron_ft.mcore.rank_main:warm"
_BASE = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=3",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=10",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    f"launch.num_nodes={NUM_NODES}",
    "launch.ranks_per_node=1",
    "parallel.use_distributed_optimizer=false",
)
_LOSES_NODES = ("placement=spread", "placement.num_slots_per_rank=6", f"recovery.min_nodes={NUM_NODES - 1}")
_SNAPSHOTS = ("snapshot=dense", "snapshot.policy.interval_iterations=5", "snapshot.num_peer_copies=1")
JOBS: Mapping[str, Sequence[str]] = {"may lose nodes": (*_BASE, *_LOSES_NODES), "snapshots": (*_BASE, *_SNAPSHOTS)}
QUICK_JOBS: Mapping[str, Sequence[str]] = {"may lose nodes, snapshots": (*_BASE, *_LOSES_NODES, *_SNAPSHOTS)}
"""Job that has every kind of listener."""
_OF_TIME = (
    "time_unix_seconds",
    "seconds",
    "stalled_seconds",
    "run_name",
    "config_digest",
    "reason",
    "process_ids",
)
_UNSTEADY = ("window_committed", "window_delayed", "snapshot_planned", "alert_raised", "alert_cleared")
"""Kinds of events that are not compared: their number depends on the speed of peers or on other work on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Addresses of a running job's listeners."""

    controller: str
    agents: Sequence[str]
    keepers: Sequence[str]
    """Unix sockets and TCP addresses of snapshot servers."""
    forkserver: str
    token: str
    processes: Sequence[psutil.Process]


class EndedEarly(Exception):
    """Raised if the job reached its last iteration before the attacks were over."""


@dataclass(slots=True)
class Attacked:
    """Results of the attacks on all jobs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_trials: int = 0
    num_connections: int = 0
    seconds: list[float] = field(default_factory=list)
    """Duration of the attacks on each job."""

    def add(self, other: "Attacked") -> None:
        """Add the results of the attacks on another job."""
        self.outcomes += other.outcomes
        self.problems += other.problems
        self.num_trials += other.num_trials
        self.num_connections += other.num_connections
        self.seconds += other.seconds

    def note(self, attack: Attack, outcome: str) -> None:
        """Count the outcome of an attack."""
        self.num_trials += 1
        self.outcomes[outcome] += 1
        if outcome not in attack.allowed:
            self.problems.append(f"{attack.name}: {outcome}, allowed {sorted(attack.allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Records of a job that attacks must not change."""

    exit_code: int
    losses: Sequence[Any]
    digests: Sequence[Any]
    events: Sequence[Any]
    decisions: Sequence[Any]
    seconds: float

    def differences(self, reference: "Trace") -> list[str]:
        """Return the differences from ``reference``."""
        names = ("exit_code", "losses", "digests", "events", "decisions")
        found = [name for name in names if getattr(self, name) != getattr(reference, name)]
        late = self.seconds > MAX_DELAY * reference.seconds
        return found + (
            [f"the attacked job took {self.seconds:.0f} s, the other one {reference.seconds:.0f} s"] if late else []
        )


@dataclass(slots=True)
class Bench:
    """Runs jobs with ranks from one fork server, which has already imported all modules."""

    folder: Path
    socket: str
    quick: bool
    num_jobs: int = 0

    def pair(self, overrides: Sequence[str], seed: int) -> tuple[Trace, Trace, Attacked, str]:
        """Run one job with attacks and without. Return the records of both, the results of the attacks, and the output
        of the attacked job.

        Raises:
            AssertionError: the job ended before the attacks even with the largest number of iterations.
        """
        iterations = QUICK_ITERATIONS if self.quick else NUM_ITERATIONS
        for _ in range(MOST_DOUBLINGS):
            attacked = Attacked()
            try:
                under, output = self.run(overrides, iterations, attacked, seed)
            except EndedEarly:
                iterations *= 2
                continue
            alone, _ = self.run(overrides, iterations)
            return alone, under, attacked, output
        raise AssertionError(f"the job ends before the attacks, even with {iterations // 2} iterations")

    def run(
        self, overrides: Sequence[str], iterations: int, attacked: Attacked | None = None, seed: int = 0
    ) -> tuple[Trace, str]:
        """Run one job until it ends, with attacks if ``attacked`` is given. Return its records and its output.

        Raises:
            EndedEarly: the job completed all iterations before the attacks were over.
        """
        self.num_jobs += 1
        name = f"job-{self.num_jobs:03d}"
        words = [*overrides, f"run.name={name}", f"run.dir={self.folder}", f"training.train_iterations={iterations}"]
        words += [f"data.cache_dir={self.folder / 'cache'}", f"launch.forkserver_socket={self.socket}"]
        began = time.monotonic()
        console = start([sys.executable, "pretrain_moe.py", *words])
        outlasted = True
        try:
            if attacked is not None:
                outlasted = self._attack(psutil.Process(console.pid), self.folder / name, attacked, random.Random(seed))
        finally:
            output = wait(console, TIMEOUT_SECONDS)
        result = JobResult(console.returncode, self.folder / name, output)
        trace = trace_of(result, time.monotonic() - began)
        shutil.rmtree(result.run_dir, ignore_errors=True)
        if not outlasted and result.exit_code == 0 and trace.losses[-1][0] == iterations:
            raise EndedEarly
        return trace, output

    def _attack(self, console: psutil.Process, run_dir: Path, attacked: Attacked, rng: random.Random) -> bool:
        """Make all attacks on a running job. Return whether all processes of the job survived."""
        found = find_listeners(console, run_dir, self.socket)
        if self.quick:
            found = replace(found, agents=found.agents[:1], keepers=found.keepers[:2])
        began = time.monotonic()
        for _ in range(QUICK_ROUNDS if self.quick else NUM_ROUNDS):
            caller = Caller(found.controller)
            attacks = list(all_attacks(found, caller, rng))
            rng.shuffle(attacks)
            for attack in attacks:
                if not self._is_alive(found, attack.name, attacked):
                    return False
                attacked.note(attack, outcome_of(attack))
            caller.close()
        outlived = self._crowds(found, attacked)
        attacked.seconds.append(time.monotonic() - began)
        return outlived

    def _crowds(self, found: Listeners, attacked: Attacked) -> bool:
        """Open many connections that stay silent or send incomplete messages. The job's own messages must still
        arrive."""
        count = QUICK_CONNECTIONS if self.quick else IDLE_CONNECTIONS
        silent: list[tuple[str, str, int, bytes]] = [
            ("idle connections", address, count, b"")
            for address in (found.controller, *found.agents, found.forkserver, *found.keepers)
        ]
        for token in (None, "0" * 64):
            data = headers_without_body("/Controller/poll", token)
            silent.append(("calls without a body", found.controller, SLOW_CALLS, data))
        for name, address, number, data in silent:
            with crowd(address, number, data) as taken:
                attacked.num_connections += taken
                attack = Attack(f"{name}: {address}", lambda: still_answers(found), frozenset((ANSWERED,)))
                attacked.note(attack, outcome_of(attack))
            if not self._is_alive(found, name, attacked):
                return False
        return True

    def _is_alive(self, found: Listeners, after: str, attacked: Attacked) -> bool:
        dead = [process for process in found.processes if not process.is_running()]
        if dead:
            attacked.problems.append(f"{len(dead)} processes ended before or at: {after}")
        return not dead


def outcome_of(attack: Attack) -> str:
    """Return the outcome of an attack. An error on the attacker's side is never an allowed outcome."""
    try:
        return attack.send()
    except (OSError, RpcError) as error:
        return f"{type(error).__name__}"


def still_answers(found: Listeners) -> str:
    """Make a valid call, which must be answered. Return the outcome ``answered``."""
    client = RpcClient(found.controller, "Controller", token=found.token)
    try:
        client.call("status", {}, timeout_seconds=10, wait_for_peer=True)
    finally:
        client.close()
    return ANSWERED


def all_attacks(found: Listeners, caller: Caller, rng: random.Random) -> Iterator[Attack]:
    """Yield all attacks that are made once, each over its own connection."""
    yield from controller_attacks(caller, found.token, rng, num_nodes=NUM_NODES)
    yield from port_attacks("controller's port", found.controller, found.token, rng)
    for node, address in enumerate(found.agents):
        yield from stream_attacks(f"agent {node}", address, greetings(node), rng)
    yield from stream_attacks("fork server", found.forkserver, requests(), rng)
    for address in found.keepers:
        kind = "unix" if address.startswith("/") else "TCP"
        yield from stream_attacks(f"keeper, {kind}", address, keeper_words(found.token), rng)


def find_listeners(console: psutil.Process, run_dir: Path, forkserver: str) -> Listeners:
    """Find the addresses from ``/proc`` when all ranks train, and read the token from the run's folder.

    Raises:
        AssertionError: the job did not begin to train.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS / 2
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
        assert console.is_running() and time.monotonic() < deadline, "the job did not begin to train"
        time.sleep(0.02)
    agents: list[str] = []
    keepers: list[str] = []
    processes = [console]
    for process in console.children(recursive=True):
        words = " ".join(process.cmdline())
        processes.append(process)
        if "megatron_ft.control.node.agent" in words:
            agents += unix_listeners(process)
        elif "megatron_ft.snapshot.server" in words:
            keepers += [*unix_listeners(process), *tcp_listeners(process)]
    assert len(agents) == NUM_NODES, f"{len(agents)} sockets of agents were found, not {NUM_NODES}"
    access = ControllerAddress.read(run_dir)
    assert access.address in [address for process in processes for address in tcp_listeners(process)], "it listens"
    return Listeners(
        controller=access.address,
        agents=sorted(agents),
        keepers=sorted(keepers, key=lambda address: address.rpartition("/")[2]),
        forkserver=forkserver,
        token=access.token,
        processes=processes,
    )


def tcp_listeners(process: psutil.Process) -> list[str]:
    """Return ``host:port`` of every TCP socket on which a process listens."""
    found = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [f"{address.ip.removeprefix('::ffff:')}:{address.port}" for address in found]


def unix_listeners(process: psutil.Process) -> list[str]:
    """Return the paths of the unix sockets on which a process accepts connections."""
    found = []
    for path in dict.fromkeys(str(c.laddr) for c in process.net_connections("unix") if c.laddr):
        with contextlib.suppress(OSError):
            connect(path).close()
            found.append(path)
    return found


def trace_of(run: JobResult, seconds: float) -> Trace:
    """Read the records of a run that has ended."""
    events = [record for record in run.records() if record["kind"] not in (*_UNSTEADY, "state_digest")]
    metrics = run.records("metrics.jsonl")
    return Trace(
        exit_code=run.exit_code,
        losses=[(record["iteration"], record["loss"], record["grad_norm"]) for record in metrics],
        digests=[(e["iteration"], e["digests"]) for e in run.records() if e["kind"] == "state_digest"],
        events=[without_time(event) for event in events],
        decisions=[without_time(decision) for decision in run.records("decisions.jsonl")],
        seconds=seconds,
    )


def without_time(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the fields in which two equal runs differ."""
    return {name: value for name, value in record.items() if name not in _OF_TIME}


def main(argv: Sequence[str] | None = None) -> int:
    """Run each job with and without attacks, and compare the two."""
    arguments = parse_arguments(__doc__, argv)
    attacked, failures, delays = Attacked(), [], []
    jobs = QUICK_JOBS if arguments.quick else JOBS
    with tempfile.TemporaryDirectory(prefix="hostile-peers-") as folder, forkserver(WARM) as socket:
        bench = Bench(Path(folder), socket, arguments.quick)
        for number, (name, overrides) in enumerate(jobs.items()):
            alone, under, of_this, output = bench.pair(overrides, SEED + number)
            attacked.add(of_this)
            differences = under.differences(alone)
            delays.append(under.seconds / alone.seconds)
            if alone.exit_code or differences:
                failures.append({"job": name, "differs": differences, "output": output[-2000:]})
    refused = attacked.outcomes[REFUSED]
    passed = not failures and not attacked.problems
    figure = (
        f"{attacked.num_trials} attacks on {len(jobs)} living jobs, {refused} refused, {attacked.num_connections} "
        f"connections held open: no process ended, losses, states, events and decisions equal; "
        f"{max(delays):.2f}x the time of the job left alone"
    )
    return finish(
        arguments.out,
        ID,
        passed=passed and (arguments.quick or attacked.num_trials >= MIN_TRIALS),
        figure=figure
        if passed
        else f"{len(attacked.problems)} attacks and {len(failures)} jobs did not end as allowed",
        threshold=f"all of at least {MIN_TRIALS} attacks: no process ends; equal to the job left alone, atol=0; "
        f"at most {MAX_DELAY:g}x its time",
        counts={
            "trials": attacked.num_trials,
            "refused": refused,
            "connections": attacked.num_connections,
            "jobs": len(jobs),
        },
        details={
            "outcomes": dict(attacked.outcomes),
            "problems": attacked.problems[:200],
            "failures": json.loads(json.dumps(failures, default=str)),
            "delays": delays,
            "attack_seconds": attacked.seconds,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
