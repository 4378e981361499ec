"""Claim ``replica-parity``: expert replicas change where experts are computed, not what is computed.

The claim has five parts. (1) Runs on 1, 2, 3 and 4 ranks with uneven replicas are compared with the run without
replicas. Each iteration begins with the state of the latter. (2) Moving experts changes no bit of any state. (3) A run
that rebalances itself equals, bit for bit, a run that is given the same history of placements. (4) At the end of this
run, all copies of an expert have the same bits. (5) So do the copies of optimizer state in other failure domains.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import parity
from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import derive_placement
from megatron_ft.corpus.samples import check_data
from megatron_ft.testing.ranks import Rank, compose, join, run_ranks

ID = "replica-parity"
WORLD_SIZES, QUICK_WORLD_SIZES = (1, 2, 3, 4), (3,)
ITERATIONS, QUICK_ITERATIONS = 20, 3
MAX_DIFFERENCE = 1e-5
SLOTS = {1: 8, 2: 6, 3: 5, 4: 5}
LOADS = (1, 2, 3, 4, 6, 9, 14, 25)
"""Skewed loads, so that experts have different numbers of copies. From layer to layer the list is rotated by one
expert."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all parts and report the result."""
    arguments = parse_arguments(__doc__, argv)
    sizes = QUICK_WORLD_SIZES if arguments.quick else WORLD_SIZES
    iterations = QUICK_ITERATIONS if arguments.quick else ITERATIONS
    with tempfile.TemporaryDirectory(prefix="replica-parity-") as folder:
        runs = Path(folder)
        plain = parity.config_of(iterations)
        check_data(plain)
        worst = _parity(plain, sizes, runs)
        moved = _moves(runs, sizes[-1])
        history = _history(runs, sizes[-1], 8 if arguments.quick else 16)
    largest = max(value for row in worst.values() for value in row.values())
    passed = largest <= MAX_DIFFERENCE and not moved["changed"] and not any(history["problems"].values())
    enough = moved["moved"] > 0 and history["changes"] > 0 and history["state_copies"] > 0
    return finish(
        arguments.out,
        ID,
        passed=passed and enough,
        figure=f"largest relative difference {largest:.1e}; {moved['moved']} expert states moved, "
        f"{len(moved['changed'])} tensors changed; {history['changes']} rebalances, "
        f"{sum(map(len, history['problems'].values()))} differences to the scripted run and between copies",
        threshold=f"<= {MAX_DIFFERENCE:g}; no bit changed by a move; 0 differences",
        counts={
            "world_sizes": len(sizes),
            "iterations_each": iterations,
            "expert_states_moved": moved["moved"],
            "tensors_compared_after_move": moved["compared"],
            "rebalances": history["changes"],
            "digests_compared": history["digests"],
            "copies_compared": history["copies"],
            "state_copies_compared": history["state_copies"],
        },
        details={"parity": worst, "moves": moved, "history": history},
    )


def _with_replicas(config: JobConfig, world_size: int, runs: Path, *overrides: tuple[str, Any]) -> JobConfig:
    """Return ``config`` with uneven replicas on ``world_size`` nodes of one rank."""
    path = runs / "loads.json"
    shifted = [[LOADS[(expert + layer) % len(LOADS)] for expert in range(len(LOADS))] for layer in range(4)]
    path.write_text(json.dumps(shifted))
    placement = replace(
        config.placement,
        algorithm={"_target_": "megatron_ft.planning.placement.overlap_search.OverlapSearch"},
        num_slots_per_rank=SLOTS[world_size],
        min_replicas=1 if world_size == 1 else 2,
        loads_file=str(path),
        **dict(overrides),
    )
    launch = replace(config.launch, num_nodes=world_size, ranks_per_node=1)
    return derive_placement(replace(config, placement=placement, launch=launch))


def _parity(plain: JobConfig, sizes: Sequence[int], runs: Path) -> dict[str, dict[str, float]]:
    reference = run_ranks(parity.run_reference, plain, world_size=1, run_dir=runs / "reference")[0]
    worst = {}
    for size in sizes:
        config = _with_replicas(plain, size, runs)
        config = replace(config, checkpoint=replace(config.checkpoint, load=str(runs / "reference")))
        rows = run_ranks(parity.run_layout, config, world_size=size, run_dir=runs / f"replicas-{size}")
        worst[f"{size} ranks"] = parity.differences(rows, reference)
        print(f"{size} ranks: {worst[f'{size} ranks']}", flush=True)
    return worst


def _moves(runs: Path, world_size: int) -> dict[str, Any]:
    """Train, move experts to the ranks of another placement, and compare all state by name."""
    config = _with_replicas(_quiet(3), world_size, runs)
    ranks = run_ranks(_move, config, world_size=world_size, run_dir=runs / "moves")
    known: dict[str, set[str]] = {}
    for rank in ranks:
        for name, digest in rank["before"].items():
            known.setdefault(_shared_name(name, rank["rank"]), set()).add(digest)
    changed = [
        f"rank {rank['rank']}: {name}"
        for rank in ranks
        for name, digest in rank["after"].items()
        if known.get(_shared_name(name, rank["rank"])) != {digest}
    ]
    return {
        "moved": ranks[0]["moved"],
        "compared": sum(len(rank["after"]) for rank in ranks),
        "changed": changed[:5],
    }


def _shared_name(name: str, rank: int) -> str:
    """Return the name under which a tensor is compared. For experts this is the name alone. For other state (shards of
    optimizer state) it consists of rank and name."""
    return name if ".experts." in name else f"{rank}/{name}"


def _move(config: JobConfig, rank: Rank) -> dict[str, Any]:

    trainer, _ = join(config, rank)
    for iteration in range(1, 4):
        trainer.iterate(iteration)
    before = _digests(trainer)
    keeper = trainer.placement
    keeper.loads = [[[float(tokens) for tokens in reversed(LOADS)]] * 4]
    change = keeper.propose()
    migration = keeper.part_of(change)
    trainer.move(change, 4)
    keeper.adopt(change)
    return {"rank": rank.rank, "before": before, "after": _digests(trainer), "moved": len(migration.transfers)}


def _digests(trainer: Any) -> dict[str, str]:
    from megatron_ft.mcore.state.tensors import take_state

    return _digests_of(take_state(trainer.engine.model_chunks, trainer.engine.optimizer))


def _history(runs: Path, world_size: int, iterations: int) -> dict[str, Any]:
    """Compare a run that rebalances itself with a run that is given the recorded placements of the first."""
    base = _quiet(iterations)
    copies_knob = ("state_copies", 2)
    knobs = [
        copies_knob,
        ("rebalance_interval_iterations", 3),
        ("rebalance_min_gain", 0.0),
        ("rebalance_bytes_per_token", 1e12),
    ]
    own = run_ranks(
        _run, _with_replicas(base, world_size, runs, *knobs), world_size=world_size, run_dir=runs / "rebalanced"
    )
    files = sorted((runs / "rebalanced" / "placements").glob("iter_*.json"))
    schedule = [f"{int(path.stem.split('_')[1])}:{path}" for path in files]
    scripted = run_ranks(
        _run,
        _with_replicas(base, world_size, runs, copies_knob, ("schedule", schedule)),
        world_size=world_size,
        run_dir=runs / "scripted",
    )
    unequal = [
        f"iteration {n + 1}"
        for n, pair in enumerate(zip(own[0]["rows"], scripted[0]["rows"], strict=True))
        if pair[0] != pair[1]
    ]
    copies: dict[str, set[str]] = {}
    num_copies = 0
    for rank in own:
        for name, digest in rank["experts"].items():
            copies.setdefault(name, set()).add(digest)
            num_copies += 1
    return {
        "changes": len(files) - 1,
        "digests": len(own[0]["rows"]) * world_size,
        "copies": num_copies,
        "state_copies": sum(len(tensors) for rank in own for tensors in rank["kept"].values()),
        "problems": {
            "scripted run": unequal,
            "copies": [name for name, digests in copies.items() if len(digests) > 1][:5],
            "state copies": [
                f"{name} of rank {owner}"
                for rank in own
                for owner, tensors in rank["kept"].items()
                for name, digest in tensors.items()
                if own[int(owner)]["masters"][name] != digest
            ][:5],
        },
    }


def _run(config: JobConfig, rank: Rank) -> dict[str, Any]:
    trainer, _ = join(config, rank)
    rows = []
    from megatron_ft.mcore.state.tensors import state_digest

    for iteration in range(1, config.training.train_iterations + 1):
        trainer.iterate(iteration)
        digests = trainer.collectives.gather(state_digest(trainer.engine.model_chunks, trainer.engine.optimizer))
        rows.append([digests, list(trainer.engine.history.losses)[-1:]])
    experts = {name: digest for name, digest in _digests(trainer).items() if ".experts." in name}
    kept = {k.owner: _digests_of(k.tensors()) for k in trainer.engine.state_copies.kept}
    return {"rows": rows, "experts": experts, "kept": kept, "masters": _master_digests(trainer)}


def _digests_of(tensors: dict[str, Any]) -> dict[str, str]:
    from megatron_ft.mcore.state.tensors import tensor_digest

    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def _master_digests(trainer: Any) -> dict[str, str]:
    from megatron_ft.mcore.optimizer.adamw import MOMENTS, masters

    found = {}
    for master in masters(trainer.engine.model_chunks, trainer.engine.optimizer):
        found[f"{master.name}/master"] = master.tensor
        found |= {f"{master.name}/{kind}": master.state[kind] for kind in (*MOMENTS, "step")}
    return _digests_of(found)


def _quiet(iterations: int) -> JobConfig:
    return compose(
        "model=moe_micro",
        "model.num_layers=4",
        f"training.train_iterations={iterations}",
        "training.eval_interval_iterations=0",
        "optimizer.lr_warmup_iterations=1",
    )


if __name__ == "__main__":
    raise SystemExit(main())
