"""Defines the jobs of ``sparse-bitwise`` as rows of a covering array, and draws the faults of each job."""

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.covering import Row, covering_array
from megatron_ft.failpoints import ITERATION_PHASES

NUM_ITERATIONS, QUICK_ITERATIONS = 40, 20
SEED = 20260413
MEMORY, NOTHING, PERSISTED = "memory", "start_over", "persisted"
REPLAY = -1
"""Value for the iteration of a fault that happens during the replay of its generation, in the first replayed iteration
that reaches the phase."""
MIN_WINDOW_ITERATIONS = 3

_ORDERS = "megatron_ft.planning.snapshot.orders"
_POLICY = "megatron_ft.planning.snapshot.sparse_window.SparseWindow"
ORDERS = {
    "hard_count": f"{{_target_:{_ORDERS}.HardCount}}",
    "time_decayed": f"{{_target_:{_ORDERS}.TimeDecayed}}",
    "capacity_aware": f"{{_target_:{_ORDERS}.CapacityAware,capacities:[1.0,2.0,1.0,4.0,1.0,2.0,1.0,4.0]}}",
    "back_to_front": f"{{_target_:{_ORDERS}.BackToFront}}",
    "layer_order": f"{{_target_:{_ORDERS}.LayerOrder}}",
}
FACTORS: dict[str, Sequence[Any]] = {
    "pp": [1, 2],
    "ep": [1, 2],
    "tp": [1, 2],
    "replicas": [False, True],
    "router_bias": [True, False],
    "clip_grad": [1.0, 0.0],
    "precision": ["bf16", "fp32"],
    "distributed_optimizer": [True, False],
    "order": list(ORDERS),
    "copies": [1, 2, 0],
}
PHASES = tuple(phase for phase in ITERATION_PHASES if phase != "replicate")
_PHASES_OF_REPLAY = ("replay", "forward", "dispatch", "backward", "grad_sync", "update")
_GAPS = (1, 2, 3, 7, 8)
"""Numbers of iterations from one kill to the next: with small ones, no other window is committed between the kills."""
_BASE = (
    "model=moe_micro",
    "optimizer.lr_warmup_iterations=3",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "checkpoint.save_at_end=false",
    "telemetry.wandb=disabled",
    "launch.ranks_per_node=1",
)
_QUICK_ROW: Row = {
    "pp": 1,
    "ep": 2,
    "tp": 1,
    "replicas": False,
    "router_bias": True,
    "clip_grad": 1.0,
    "precision": "bf16",
    "distributed_optimizer": True,
    "order": "hard_count",
    "copies": 1,
}
QUICK_ROWS: tuple[Row, ...] = (
    _QUICK_ROW,
    {**_QUICK_ROW, "ep": 1, "pp": 2, "precision": "fp32", "order": "back_to_front", "copies": 0},
)


def rows() -> list[Row]:
    """Return configurations that contain every allowed pair of values."""
    return covering_array(FACTORS, allowed=allowed)


def allowed(row: Row) -> bool:
    """Return whether a row is possible. With replicas, the expert-parallel group contains all three ranks of a
    stage."""
    return not row["replicas"] or (row["pp"], row["ep"], row["tp"]) == (1, 1, 1)


def num_ranks(row: Row) -> int:
    """Return the number of ranks of a row's job, each on its own node. Two copies of a window need three nodes."""
    if row["replicas"]:
        return 3
    pp, ep, tp = (int(str(row[name])) for name in ("pp", "ep", "tp"))
    return 4 if row["copies"] == 2 else max(2, pp * max(ep, tp))


def configuration(row: Row, num_iterations: int) -> list[str]:
    """Return the overrides that determine the bits of a run."""
    words = [
        *_BASE,
        f"training.train_iterations={num_iterations}",
        f"launch.num_nodes={num_ranks(row)}",
        f"parallel.pipeline_model_parallel_size={row['pp']}",
        f"parallel.tensor_model_parallel_size={row['tp']}",
        f"parallel.expert_model_parallel_size={row['ep']}",
        f"parallel.use_distributed_optimizer={_word(row['distributed_optimizer'])}",
        f"precision.params_dtype={row['precision']}",
        f"optimizer.clip_grad={row['clip_grad']}",
    ]
    if row["replicas"]:
        words += ["placement=overlap_search"]
    if row["router_bias"]:
        words += ["model.moe_router_score_function=sigmoid", "model.moe_router_enable_expert_bias=true"]
    return words


def sparse_snapshots(row: Row, dense_bytes: int) -> list[str]:
    """Return overrides with which windows have several iterations: half of the whole state can be captured during an
    iteration."""
    share = 0.5 if row["precision"] == "fp32" else 0.4
    return [
        "snapshot=sparse_window",
        f"snapshot.policy={{_target_:{_POLICY},order:{ORDERS[str(row['order'])]}}}",
        f"snapshot.num_peer_copies={row['copies']}",
        f"snapshot.bandwidth_bytes_per_second={share * dense_bytes:.0f}",
        "snapshot.iteration_seconds=1.0",
        "snapshot.replan_interval_windows=2",
    ]


def faults_of(row: Row, number: int, num_faults: int) -> list[Row]:
    """Return the faults of a row, one for each generation of its job, with the keys ``fault``, ``phase``, ``iteration``
    and ``source``.

    Args:
        number: Number of the row. Every fourth job is also killed before a window is committed. ``source`` is the state
            from which the generation after the fault must continue.
    """
    generator = random.Random(f"{SEED} {number}")
    early = number % 4 == 0
    replayed = generator.randrange(1 + early, num_faults)
    iteration = 0
    faults: list[Row] = []
    for index in range(num_faults):
        source = NOTHING if early and index == 0 else MEMORY
        phase = PHASES[(number * 7 + index * 3) % len(PHASES)]
        at = REPLAY
        if index == replayed:
            phase = generator.choice(_PHASES_OF_REPLAY)
        elif source == NOTHING:
            at = generator.randint(2, 3)
        else:
            iteration = generator.randint(12, 14) if iteration == 0 else iteration + generator.choice(_GAPS)
            at = iteration
        faults.append({"fault": index, "phase": phase, "iteration": at, "source": source})
    assert iteration < NUM_ITERATIONS, f"row {number}: the fault's iteration {iteration} is after the end of the run"
    return faults


def failpoints(faults: Sequence[Row]) -> str:
    """Return faults as an override. Each kills every rank that reaches it, in the generation with the fault's
    number."""
    texts = []
    for fault in faults:
        where = "" if fault["iteration"] == REPLAY else f"at_iteration={fault['iteration']},"
        texts.append(f"'kill({where}phase=\"{fault['phase']}\",generation={fault['fault']})'")
    return f"testing.failpoints=[{','.join(texts)}]"


def _word(value: object) -> str:
    return str(value).lower()
