"""Claim ``transfer-plan``: for 8,192 ranks, the transfers after a loss are planned in at most 2 CPU seconds."""

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.report import finish, parse_arguments
from megatron_ft.operators import Kind, OperatorId
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.recovery.layout import LaneLimits, choose_layout
from megatron_ft.planning.state.holdings import STORAGE, Holdings, Medium, Needs
from megatron_ft.planning.state.model_state import ModelState, Parameter, Sharding
from megatron_ft.planning.state.parallel_layout import ParallelLayout
from megatron_ft.planning.state.transfers import TransferPlan

ID = "transfer-plan"
SIZES, QUICK_SIZES = (512, 1024, 2048, 4096, 8192), (512, 1024, 2048)
MAX_SECONDS, MAX_EXPONENT = 2.0, 1.2
REPEATS, QUICK_REPEATS = 3, 2
TENSOR_SIZE, NUM_STAGES, EXPERT_SIZE, NUM_EXPERTS, NUM_SLOTS = 2, 4, 8, 8, 2
NUM_LAYERS, HIDDEN, FFN, VOCAB, KEY_VALUE = 32, 4096, 14336, 32000, 1024
RANKS_PER_NODE, STATE_COPIES, ITERATION = 8, 2, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Change of the membership: how to plan it, and the expected properties of the plan."""

    name: str
    plan: Callable[[], TransferPlan]
    """Plans the change, from the previous layout and the live ranks. Only the list of tensors is prepared before."""


def main(argv: Sequence[str] | None = None) -> int:
    """Time every case at every size, check its plan, and judge the slowest case and the steepest growth."""
    arguments = parse_arguments(__doc__, argv)
    sizes = QUICK_SIZES if arguments.quick else SIZES
    repeats = QUICK_REPEATS if arguments.quick else REPEATS
    model = mixtral()
    rows = [measure(case, size, repeats) for size in sizes for case in cases(model, size)]
    exponents = {
        name: exponent([(row["ranks"], row["seconds"]) for row in rows if row["case"] == name])
        for name in dict.fromkeys(row["case"] for row in rows)
    }
    for row in rows:
        print(
            "{ranks:>6} ranks  {case:<24} {seconds:6.3f} s  {transfers:>8,} transfers  {rounds:>3} rounds".format(**row)
        )
    for name, value in exponents.items():
        print(f"{name:<24} grows as ranks ** {value:.2f}")
    slowest = max((row for row in rows if row["ranks"] == sizes[-1]), key=lambda row: row["seconds"])
    steepest = max(exponents, key=lambda name: exponents[name])
    return finish(
        arguments.out,
        ID,
        passed=slowest["seconds"] <= MAX_SECONDS and exponents[steepest] <= MAX_EXPONENT,
        figure=f"{slowest['seconds']:.2f} CPU s for {sizes[-1]:,} ranks ({slowest['case']}, the slowest of "
        f"{len(exponents)} cases), growth exponent at most {exponents[steepest]:.2f} ({steepest})",
        threshold="<= 2 CPU s for 8,192 ranks, growth exponent <= 1.2 from 512 ranks, in every case",
        counts={"cases": len(exponents), "sizes": len(sizes), "repeats": repeats},
        details={"rows": rows, "exponents": exponents},
    )


def mixtral() -> ModelState:
    """Return the state of Mixtral 8x7B with TP2 PP4: the parameters of Megatron's modules, in tensor-parallel parts."""
    per_stage = NUM_LAYERS // NUM_STAGES
    stages = []
    for stage in range(NUM_STAGES):
        layers = range(stage * per_stage + 1, (stage + 1) * per_stage + 1)
        parameters = [parameter for layer in layers for parameter in _layer(layer)]
        edge = VOCAB * HIDDEN // TENSOR_SIZE
        if stage == 0:
            parameters.insert(0, _dense("embedding.word_embeddings.weight", 0, edge, "embedding"))
        if stage == NUM_STAGES - 1:
            parameters.append(_dense("decoder.final_layernorm.weight", NUM_LAYERS + 1, HIDDEN, "head", is_split=False))
            parameters.append(_dense("output_layer.weight", NUM_LAYERS + 1, edge, "head"))
        stages.append((tuple(parameters),))
    return ModelState(chunks=tuple(stages), num_experts=NUM_EXPERTS, tensor_size=TENSOR_SIZE)


def _layer(layer: int) -> list[Parameter]:
    name = f"decoder.layers.{layer - 1}"
    found = [
        _dense(f"{name}.input_layernorm.weight", layer, HIDDEN, is_split=False),
        _dense(f"{name}.self_attention.linear_proj.weight", layer, HIDDEN * HIDDEN // TENSOR_SIZE),
        _dense(f"{name}.self_attention.linear_qkv.weight", layer, HIDDEN * (HIDDEN + 2 * KEY_VALUE) // TENSOR_SIZE),
        _dense(f"{name}.pre_mlp_layernorm.weight", layer, HIDDEN, is_split=False),
        _dense(f"{name}.mlp.router.weight", layer, NUM_EXPERTS * HIDDEN, "gate", is_split=False),
    ]
    for expert in range(NUM_EXPERTS):
        operator = OperatorId(layer=layer, kind="expert", expert=expert)
        for matrix, size in (("linear_fc1", 2 * HIDDEN * FFN), ("linear_fc2", HIDDEN * FFN)):
            path = f"{name}.mlp.experts.local_experts.{expert}.{matrix}.weight"
            found.append(Parameter(name=path, operator=operator, num_elements=size, is_split=False))
    return found


def _dense(name: str, layer: int, size: int, kind: Kind = "non_expert", *, is_split: bool = True) -> Parameter:
    return Parameter(name=name, operator=OperatorId(layer=layer, kind=kind), num_elements=size, is_split=is_split)


def cases(model: ModelState, num_ranks: int) -> list[Case]:
    """Return changes of a job of ``num_ranks`` ranks, 8 per node, with copies of optimizer state on two nodes."""
    shape = {"tensor_size": TENSOR_SIZE, "num_stages": NUM_STAGES}
    layout = ParallelLayout.regular(num_ranks, **shape)
    node_of = {rank: rank // RANKS_PER_NODE for rank in range(num_ranks + RANKS_PER_NODE)}
    domain_of = {rank: f"node{node}" for rank, node in node_of.items()}
    lost = set(range(num_ranks // 2, num_ranks // 2 + RANKS_PER_NODE))
    new = set(range(num_ranks, num_ranks + RANKS_PER_NODE))
    plain = Sharding(expert_parallel_size=EXPERT_SIZE, num_state_copies=STATE_COPIES)
    slots = replace(plain, num_state_copies=1)
    limits = LaneLimits.of(layout, layout.num_lanes, num_expert_ranks=EXPERT_SIZE)
    free = LaneLimits.of(layout, layout.num_lanes, num_experts=NUM_EXPERTS, num_slots_per_rank=NUM_SLOTS)

    def change(
        former: ParallelLayout, living: set[int], bounds: LaneLimits, sharding: Sharding, *, has_slots: bool = False
    ) -> TransferPlan:
        def of(any_layout: ParallelLayout) -> Sharding:
            return replace(sharding, placements=_placements(any_layout, domain_of)) if has_slots else sharding

        chosen = choose_layout(former, living, node_of, bounds)
        assert isinstance(chosen, ParallelLayout), chosen.summary()
        held = model.holdings(former, of(former), iteration=ITERATION, domain_of=domain_of)
        gone = sorted({*former.ranks, *former.spares} - living)
        needs = model.needs(chosen, of(chosen), iteration=ITERATION, domain_of=domain_of)
        return _planned(held.without(ranks=gone), needs)

    def load() -> TransferPlan:
        needs = model.needs(layout, replace(plain, num_state_copies=1), iteration=ITERATION, domain_of=domain_of)
        return _planned(_stored(model), needs)

    everyone = set(range(num_ranks))
    fewer = choose_layout(layout, everyone - lost, node_of, limits)
    assert isinstance(fewer, ParallelLayout), fewer.summary()
    return [
        Case(name="spare node, same layout", plan=lambda: change(layout, (everyone - lost) | new, limits, plain)),
        Case(name="node lost, fewer lanes", plan=lambda: change(layout, everyone - lost, limits, plain)),
        Case(name="node back, more lanes", plan=lambda: change(fewer, (everyone - lost) | new, limits, plain)),
        Case(
            name="node lost, slots",
            plan=lambda: change(layout, everyone - lost, free, replace(slots, num_state_copies=2), has_slots=True),
        ),
        Case(name="dense checkpoint", plan=load),
    ]


def _placements(layout: ParallelLayout, domain_of: dict[int, str]) -> tuple[PlacementPlan, ...]:
    """Return placements with two of eight experts on every rank, chosen by the rank's number. Continuing ranks keep
    their experts."""
    per_stage = NUM_LAYERS // NUM_STAGES
    plans = []
    for stage in range(NUM_STAGES):
        ranks = tuple(rank for group in layout.stages[stage] for rank in group)
        rows = [tuple(tuple(sorted(((rank + k) % 8, (rank + k + 4) % 8))) for rank in ranks) for k in range(per_stage)]
        plans.append(
            PlacementPlan(
                num_experts=NUM_EXPERTS,
                num_slots_per_rank=NUM_SLOTS,
                ranks=ranks,
                domains=tuple(domain_of[rank] for rank in ranks),
                layer_numbers=tuple(range(stage * per_stage + 1, (stage + 1) * per_stage + 1)),
                slots=tuple(rows),
                algorithm="compact",
            )
        )
    return tuple(plans)


def _stored(model: ModelState) -> Holdings:
    """Return holdings in which storage has every tensor completely."""
    index = model.index
    count = len(index)
    return Holdings(
        index=index,
        rank=np.full(count, STORAGE, dtype=np.int64),
        tensor=np.arange(count, dtype=np.int64),
        start=np.zeros(count, dtype=np.int64),
        stop=index.sizes,
        iteration=np.full(count, ITERATION, dtype=np.int64),
        medium=np.full(count, int(Medium.STORAGE), dtype=np.int64),
        domain_of={},
    )


def _planned(holdings: Holdings, needs: Needs) -> TransferPlan:
    plan = TransferPlan.of(holdings, needs)
    assert isinstance(plan, TransferPlan), plan.summary()
    assert plan.num_bytes + plan.kept_bytes == needs.num_bytes, "every needed byte must be kept or moved exactly once"
    return plan


def measure(case: Case, num_ranks: int, repeats: int) -> dict[str, Any]:
    """Return the CPU seconds of the fastest repeat and the size of the plan, after checking that its rounds keep their
    limit."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        started = time.process_time()
        plan = case.plan()
        seconds.append(time.process_time() - started)
    plan.validate()
    sent = plan.sent_bytes()
    return {
        "case": case.name,
        "ranks": num_ranks,
        "seconds": round(min(seconds), 4),
        "transfers": len(plan),
        "rounds": plan.num_rounds,
        "moved_bytes": plan.num_bytes,
        "most_sent_bytes": max((size for rank, size in sent.items() if rank != STORAGE), default=0),
        "most_received_bytes": max(plan.received_bytes().values(), default=0),
        "digest": plan.digest(),
    }


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of log seconds over log ranks, by least squares."""
    slope, _ = np.polyfit([math.log(ranks) for ranks, _ in points], [math.log(seconds) for _, seconds in points], 1)
    return round(float(slope), 3)


def on_one_core() -> None:
    """Start this program again with one thread for matrix products. numpy reads this number when it is imported."""
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in single.items()):
        command = [sys.executable, "-m", "benchmarks.transfer_plan", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **single})


if __name__ == "__main__":
    on_one_core()
    sys.exit(main())
