"""Lists invalid replica slots, loads, routing traces and scripted placements for the claim ``bad-config``."""

import json
from pathlib import Path

import numpy as np

from benchmarks.bad_inputs import Case, bad, rewrite

FOUR_NODES = ("launch.num_nodes=4", "launch.ranks_per_node=1")
REPLICAS = ("placement=overlap_search", *FOUR_NODES)

PLACEMENT = [
    bad(
        *REPLICAS,
        "placement.num_slots_per_rank=1",
        says=["placement.num_slots_per_rank=1", "4 ranks", "at least model.num_moe_experts=8"],
    ),
    bad(*REPLICAS, "placement.min_replicas=5", says=["placement.min_replicas=5", "1..4", "failure domains"]),
    bad(
        *REPLICAS,
        "topology.failure_domains=[a,a,a,b]",
        "placement.min_replicas=3",
        says=["placement.min_replicas=3", "1..2", "failure domains"],
    ),
    bad(*REPLICAS, "placement.state_copies=5", says=["placement.state_copies=5", "1..4"]),
    bad(
        *REPLICAS,
        "parallel.expert_model_parallel_size=2",
        says=["parallel.expert_model_parallel_size=2", "must be 1 if placement.algorithm is given"],
    ),
    bad(
        *REPLICAS,
        "model.num_moe_experts=null",
        "model.moe_ffn_hidden_size=null",
        says=["placement.algorithm=", "must be null in a dense model"],
    ),
    bad(*REPLICAS, "placement.load_smoothing=1.5", says=["placement.load_smoothing=1.5", "must be at least 0"]),
    bad(*REPLICAS, "placement.schedule=[1-x.json]", says=["placement.schedule=1-x.json", "must be ITERATION:FILE"]),
    bad(
        "placement.loads_file=x.json",
        says=["placement.loads_file=x.json", "must not be set without placement.algorithm"],
    ),
    bad("model.router=random", says=["model.router=random", "must be one of learned, trace"]),
    bad("model.router=trace", says=["model.router_trace_file=null", "must be given with model.router=trace"]),
    bad("model.router_trace_start=3", says=["model.router_trace_start=3", "must be 0 unless model.router=trace"]),
    bad(
        "model.router=trace",
        "model.router_trace_file=x.json",
        "model.moe_router_load_balancing_type=sinkhorn",
        "model.moe_aux_loss_coeff=0",
        says=["model.moe_router_load_balancing_type=sinkhorn", "must keep its default with model.router=trace"],
    ),
]


def placement_file_cases(folder: Path) -> list[Case]:
    """Write files of placements and routings that do not fit the job into ``folder``, and return the cases that name
    them."""
    return [*_loads_cases(folder), *_trace_cases(folder), *_schedule_cases(folder)]


def _loads(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def _loads_cases(folder: Path) -> list[Case]:
    """Return cases with loads from which no first placement can be planned. The job needs loads of 4 layers of 8
    experts."""
    good = [[1] * 8 for _ in range(4)]

    def refused(path: Path, *says: str, exit_code: int = 3) -> Case:
        key = f"placement.loads_file={path}"
        return bad(*REPLICAS, key, says=[key, *says], exit_code=exit_code)

    negative, not_a_number = [[-1] * 8, *good[1:]], [*good[:3], [float("nan")] * 8]
    return [
        refused(_loads(folder, "negative.json", negative), "layer 0, expert 0 is -1", "at least 0"),
        refused(_loads(folder, "nan.json", not_a_number), "layer 3, expert 0 is nan", "finite"),
        refused(_loads(folder, "cut.json", json.dumps(good)[:-9]), "is not JSON"),
        refused(_loads(folder, "ragged.json", [*good[:3], [1] * 7]), "layer 3 has 7 loads", "as many as layer 0"),
        refused(_loads(folder, "loads.txt", good), "unknown suffix"),
        refused(folder / "none.json", "cannot be read"),
        refused(_loads(folder, "narrow.json", [[1] * 6] * 4), "with 8 experts", exit_code=2),
        refused(_loads(folder, "shallow.json", good[:3]), "must contain 4 MoE layers", exit_code=2),
    ]


def _trace_cases(folder: Path) -> list[Case]:
    """Return cases with recorded routings that do not fit the default model."""

    def refused(path: Path, *says: str) -> Case:
        return bad(
            "model.router=trace",
            f"model.router_trace_file={path}",
            says=["model.router_trace_file=", path.name, *says],
            exit_code=3,
        )

    cut, good = folder / "cut.npz", _loads(folder, "trace.json", [[1] * 8] * 4)
    np.savez(cut, counts=np.ones((2, 1, 4, 1, 8), dtype=np.int16), iters=np.arange(2))
    rewrite(cut, lambda content: content[: len(content) // 2])
    return [
        refused(folder / "none.npz", "cannot be read"),
        refused(cut, "is not a readable npz archive"),
        refused(_loads(folder, "few_layers.json", [[1] * 8] * 3), "has 3 layers with loads"),
        refused(_loads(folder, "few_experts.json", [[1] * 6] * 4), "has 6 experts"),
        bad(
            "model.router=trace",
            f"model.router_trace_file={good}",
            "model.router_trace_start=1",
            says=["model.router_trace_start=1", "must be from 0 to 0"],
        ),
    ]


def _schedule_cases(folder: Path) -> list[Case]:
    """Return cases with scripted placements that omit an expert or belong to another job."""
    domains = [f"node{node}" for node in range(4)]
    plan = {"num_experts": 8, "num_slots_per_rank": 4, "ranks": [0, 1, 2, 3], "domains": domains, "algorithm": "given"}
    slots = [[[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]] for _ in range(4)]
    good = {**plan, "layer_numbers": [1, 2, 3, 4], "slots": slots}

    def refused(name: str, document: object, *says: str) -> Case:
        path = _loads(folder, name, document)
        overrides = (*REPLICAS, f"placement.schedule=['5:{path}']")
        return bad(*overrides, says=[f"placement.schedule={path}", *says], exit_code=3)

    def stage(**changes: object) -> dict[str, object]:
        return {"stages": [{**good, **changes}]}

    lacking = [*slots[:3], [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 6], [4, 5, 6, 6]]]
    missing = folder / "none.json"
    return [
        refused("lacking.json", stage(slots=lacking), "layer 4: expert=7: must have at least one slot"),
        refused("foreign.json", stage(slots=[*slots[:3], [[0, 9], [0], [0], [0]]]), "layer 4: expert=9", "from 0 to 7"),
        refused("full.json", stage(slots=[[[0, 1, 2, 3, 4], *slots[0][1:]], *slots[1:]]), "rank 0", "at most 4"),
        refused("ranks.json", stage(ranks=[4, 5, 6, 7]), "ranks=[4, 5, 6, 7]", "must be [0, 1, 2, 3]"),
        refused("layers.json", stage(layer_numbers=[1, 2, 3], slots=slots[:3]), "layer_numbers=[1, 2, 3]"),
        refused("stages.json", {"stages": [good, good]}, "stages=2: "),
        refused("no_plan.json", {"stages": [{"ranks": [0]}]}, "must have the format of a placement plan"),
        refused("cut_plan.json", json.dumps({"stages": [good]})[:-20], "is not JSON"),
        bad(
            *REPLICAS,
            f"placement.schedule=['5:{missing}']",
            says=[f"placement.schedule={missing}", "cannot be read"],
            exit_code=3,
        ),
    ]
