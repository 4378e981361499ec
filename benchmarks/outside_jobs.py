"""Draws the jobs of ``faults-from-outside`` and the faults of each from a seed, before any job runs."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Literal

from benchmarks import localized_jobs
from benchmarks.covering import Row
from benchmarks.elastic_jobs import ABOUT_NODES, MIGRATING, MOST_ITERATIONS
from benchmarks.localized_jobs import Layout

NUM_NODES = 4
HEARTBEAT_SECONDS = 4.0
"""Time without a heartbeat after which a rank or a node is lost."""
LONG_SECONDS, SHORT_SECONDS = 9.0, 1.0
"""Durations of a stop: so long that the process counts as lost, and so short that it does not."""
MOST_APART = 5
"""Largest number of iterations from the moment at which all nodes are members until the next fault."""
NUM_REPLICAS, NUM_KEPT = 16, 8
_COMMON = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    f"training.train_iterations={MOST_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "checkpoint.save_at_end=false",
    "checkpoint.save_interval_iterations=5",
    "telemetry.wandb=disabled",
    "snapshot=sparse_window",
    "snapshot.num_peer_copies=1",
    "snapshot.iteration_seconds=1",
    "launch.ranks_per_node=1",
    "nodes.restart_lost_nodes=true",
    "nodes.max_node_restarts=1000",
    "detector.heartbeat_interval_seconds=0.5",
    f"detector.heartbeat_timeout_seconds={HEARTBEAT_SECONDS:g}",
)
_REPLICAS = (
    f"launch.num_nodes={NUM_NODES}",
    "recovery.min_nodes=2",
    "nodes.join_window_seconds=0.2",
    "parallel.use_distributed_optimizer=false",
    "placement=overlap_search",
    "placement.min_replicas=2",
    "snapshot.bandwidth_bytes_per_second=3e5",
)
_REBALANCING = ("placement.rebalance_interval_iterations=4", "placement.rebalance_min_gain=0.0", *MIGRATING)
VARIANTS: tuple[Sequence[str], ...] = (
    ("placement.num_slots_per_rank=8", "training.global_batch_size=8"),
    ("placement.num_slots_per_rank=8", "training.global_batch_size=32"),
    ("placement.num_slots_per_rank=6", "training.global_batch_size=8", *_REBALANCING),
    ("training.global_batch_size=32",),
)
"""Variants with expert replicas: two nodes that have every expert; long iterations; placements that change; the default
number of slots, with which three nodes have only one copy of some experts."""
LARGE = (
    "model.hidden_size=512",
    "model.moe_ffn_hidden_size=512",
    "placement.num_slots_per_rank=8",
    "training.global_batch_size=8",
    "snapshot.bandwidth_bytes_per_second=3e8",
    "checkpoint.save_interval_iterations=0",
)
"""Overrides with which a rank reduces at least 64 MB of gradients in an iteration."""
LAYOUTS = (
    Layout(pp=2),
    Layout(pp=2, dp=2, ep=2, sharded=True),
    Layout(pp=2, vpp=2),
    Layout(pp=2, tp=2),
    Layout(pp=4),
    Layout(pp=1, dp=4, ep=2),
)
_ROTATING = (
    {"kind": "agent", "first": "agent:A"},
    {"kind": "controller", "first": "controller"},
    {"kind": "controller and node", "first": "controller+node:A"},
    {"kind": "snapshot server", "first": "keeper:A"},
    {"kind": "controller and rank", "first": "controller+rank:A"},
    {"kind": "rank stopped", "first": "rank:A", "seconds": LONG_SECONDS},
    {"kind": "agent stopped", "first": "agent:A", "seconds": LONG_SECONDS},
    {"kind": "controller stopped", "first": "controller", "seconds": 4.0},
    {"kind": "rank stopped briefly", "first": "rank:A", "seconds": SHORT_SECONDS},
)
"""List of faults, of which each job gets one or two in turn. A and B stand for two random nodes."""

JobKind = Literal["replicas", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideJob:
    """Job and its faults, in order."""

    number: int
    kind: JobKind
    name: str
    """Name of the job's layout or variant, for reports."""
    words: Sequence[str]
    """Overrides that determine the job's bits, and overrides about memberships."""
    num_nodes: int
    faults: Sequence[Row]
    kills_launcher: bool = False
    """Whether the launcher is killed by SIGKILL at the end. If not, it is requested to stop."""

    @property
    def reference_words(self) -> list[str]:
        """Return the overrides of the reference run, to which the history of memberships is added."""
        left_out = (*ABOUT_NODES, "detector.", "checkpoint.")
        mine = [f"launch.num_nodes={self.num_nodes}", "launch.ranks_per_node=1"]
        return [*(word for word in self.words if not word.startswith(left_out)), *mine]


def jobs_of(seed: int, *, quick: bool) -> list[OutsideJob]:
    """Return all jobs. The only job of the quick variant has most kinds of faults."""
    if quick:
        return [_quick_job(seed)]
    jobs = [_replicas(seed, number) for number in range(NUM_REPLICAS)]
    return jobs + [_kept(seed, number) for number in range(NUM_REPLICAS, NUM_REPLICAS + NUM_KEPT)]


def _replicas(seed: int, number: int) -> OutsideJob:
    rng = random.Random(f"{seed} replicas {number}")
    is_large = number == NUM_REPLICAS - 1
    variant = number % len(VARIANTS)
    groups: list[list[Row]] = [
        [{"kind": "whole node", "first": "node:A"}],
        [{"kind": "whole node", "first": "node:A"}, {"kind": "first iteration after a join", "first": "node:A"}],
        [{"kind": "rank", "first": "rank:A"}],
        [{"kind": "reporter's node", "first": "node:0"}],
        [{"kind": "whole node while saving", "first": "node:A", "moment": "save"}],
        [{"kind": "a second node soon after", "first": "node:A", "second": "node:B"}],
    ]
    if variant != 3:  # with the default slots, the job may not survive the loss of two nodes
        groups.append([{"kind": "two nodes at once", "first": "node:A+node:B"}])
    groups += [[_ROTATING[(2 * number + extra) % len(_ROTATING)]] for extra in range(2)]
    if is_large:
        groups = [[{"kind": "whole node, large payload", "first": "node:A"}] for _ in range(8)]
    words = [*_COMMON, *_REPLICAS, *(LARGE if is_large else VARIANTS[variant])]
    faults = _in_order(groups, NUM_NODES, rng)
    if number % 3 == 2 and not is_large:
        faults.append({"fault": len(faults), "kind": "state lost", "first": "lost", "moment": "any", "after": 3})
    return OutsideJob(
        number=number,
        kind="replicas",
        name="large payload" if is_large else f"replicas {variant}",
        words=words,
        num_nodes=NUM_NODES,
        faults=faults,
        kills_launcher=number % 3 == 1,
    )


def _kept(seed: int, number: int) -> OutsideJob:
    rng = random.Random(f"{seed} kept {number}")
    layout = LAYOUTS[number % len(LAYOUTS)]
    groups: list[list[Row]] = [
        [{"kind": "whole node", "first": "node:A"}],
        [{"kind": "whole node", "first": "node:A"}],
        [{"kind": "whole node", "first": "node:A"}, {"kind": "first iteration after a join", "first": "rank:A"}],
        [{"kind": "rank", "first": "rank:A"}],
        [{"kind": "whole node while saving", "first": "node:A", "moment": "save"}],
    ]
    if layout.num_ranks > 2:
        groups.append([{"kind": "a second rank soon after", "first": "rank:A", "second": "rank:B"}])
        groups.append([{"kind": "two ranks at once", "first": "rank:A+rank:B"}])
    groups += [[_ROTATING[(2 * number + extra) % len(_ROTATING)]] for extra in range(2)]
    # These jobs survive every loss: if windows are lost, all ranks start again from a checkpoint.
    faults = _in_order(groups, layout.num_ranks, rng)
    return OutsideJob(
        number=number,
        kind="kept",
        name=layout.name,
        words=[*_COMMON, *_kept_words(layout)],
        num_nodes=layout.num_ranks,
        faults=faults,
        kills_launcher=number % 4 == 1,
    )


def _kept_words(layout: Layout) -> list[str]:
    kept = [word for word in localized_jobs.BASE if word.startswith(("recovery.keep_layout", "recovery.max_restarts"))]
    return [*layout.overrides, *kept, "training.global_batch_size=8"]


def _quick_job(seed: int) -> OutsideJob:
    rng = random.Random(f"{seed} quick")
    groups: list[list[Row]] = [
        [{"kind": "whole node", "first": "node:A"}, {"kind": "first iteration after a join", "first": "node:A"}],
        [{"kind": "rank", "first": "rank:A"}],
        [{"kind": "agent", "first": "agent:A"}],
        [{"kind": "snapshot server", "first": "keeper:A"}],
        [{"kind": "controller and rank", "first": "controller+rank:A"}],
        [{"kind": "two nodes at once", "first": "node:A+node:B"}],
        [{"kind": "a second node soon after", "first": "node:A", "second": "node:B"}],
        [{"kind": "whole node while saving", "first": "node:A", "moment": "save"}],
        [{"kind": "rank stopped briefly", "first": "rank:A", "seconds": SHORT_SECONDS}],
    ]
    return OutsideJob(
        number=0,
        kind="replicas",
        name="replicas 0",
        words=[*_COMMON, *_REPLICAS, *VARIANTS[0]],
        num_nodes=NUM_NODES,
        faults=_in_order(groups, NUM_NODES, rng),
        kills_launcher=True,
    )


def _in_order(groups: Sequence[Sequence[Row]], num_nodes: int, rng: random.Random) -> list[Row]:
    """Put the groups in a random order, and give each fault its number, its nodes and its moment."""
    shuffled = rng.sample(list(groups), len(groups))
    faults: list[Row] = []
    for group in shuffled:
        for place, fault in enumerate(group):
            first, second = rng.sample(range(num_nodes), 2)
            moment = "joined" if place else fault.get("moment", "any")
            drawn: dict[str, object] = {"moment": moment, "after": rng.randint(1, MOST_APART)}
            if "second" in fault:
                drawn["delay"] = round(rng.uniform(0.02, 0.5), 3)
            named = {
                key: str(fault[key]).replace("A", str(first)).replace("B", str(second))
                for key in ("first", "second")
                if key in fault
            }
            faults.append({**fault, **named, **drawn, "fault": len(faults)})  # type: ignore[dict-item]
    return faults


def targets(text: str) -> list[tuple[str, int | None]]:
    """Parse the targets of a fault: ``"controller+node:2"`` is ``[("controller", None), ("node", 2)]``."""
    found: list[tuple[str, int | None]] = []
    for part in text.split("+"):
        what, _, number = part.partition(":")
        found.append((what, int(number) if number else None))
    return found


def loss_of(fault: Mapping[str, object]) -> tuple[tuple[int, ...], bool]:
    """Return (nodes that the job loses by a fault, in rising order; whether the memory of these nodes is lost too).

    A controller, and a process that is stopped for less than the heartbeat timeout, cause no loss.
    """
    seconds = fault.get("seconds")
    if seconds is not None and float(str(seconds)) < HEARTBEAT_SECONDS:
        return (), False
    hit = [each for key in ("first", "second") if key in fault for each in targets(str(fault[key]))]
    nodes = sorted({node for _, node in hit if node is not None})
    return tuple(nodes), any(what in ("node", "agent", "keeper") for what, _ in hit)


def on_other_nodes(fault: Row, num_nodes: int) -> Iterator[Row]:
    """Yield the fault. If it hits two nodes, yield also the same fault on every other pair of nodes."""
    texts = {key: str(fault[key]) for key in ("first", "second") if key in fault}
    drawn = list(dict.fromkeys(node for text in texts.values() for _, node in targets(text) if node is not None))
    yield fault
    for pair in permutations(range(num_nodes), 2) if len(drawn) == 2 else ():
        numbers = dict(zip(drawn, pair, strict=True))
        yield {**fault, **{key: _renumbered(text, numbers) for key, text in texts.items()}}


def _renumbered(text: str, numbers: Mapping[int, int]) -> str:
    return re.sub(r"\d+", lambda found: str(numbers[int(found[0])]), text)


def losses_of(num_nodes: int) -> list[tuple[int, ...]]:
    """Return every choice of two nodes, then every choice of three nodes."""
    return [nodes for size in (2, 3) for nodes in combinations(range(num_nodes), size)]
