"""Claim ``parity``: every layout computes what one rank computes, and one rank computes what bare Megatron computes,
bit for bit.

Layouts are compared one iteration at a time from a common state: the reference (one rank) saves every iteration, and
each layout loads iteration t-1 and runs iteration t. Over several iterations, differences would grow, because rounding
can change a top-k choice.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.samples import check_data
from megatron_ft.testing.ranks import Rank, compose, join, run_ranks, with_parallel

ID = "parity"
MAX_LOSS_DIFFERENCE = 1e-6
MAX_GRAD_NORM_DIFFERENCE = 1e-5
MAX_WEIGHT_DISTANCE = 1e-5
ITERATIONS, QUICK_ITERATIONS = 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel layout of the same job."""

    name: str
    world_size: int
    parallel: dict[str, int]


LAYOUTS = (
    Layout(name="DP=2", world_size=2, parallel={}),
    Layout(name="DP=3, batch not divisible", world_size=3, parallel={}),
    Layout(name="PP=2", world_size=2, parallel={"pipeline_model_parallel_size": 2}),
    Layout(
        name="VPP=2",
        world_size=2,
        parallel={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    Layout(name="EP=2", world_size=2, parallel={"expert_model_parallel_size": 2}),
    Layout(name="TP=2", world_size=2, parallel={"tensor_model_parallel_size": 2}),
    Layout(
        name="PP=2 x EP=2",
        world_size=4,
        parallel={"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report the claim."""
    arguments = parse_arguments(__doc__, argv)
    iterations = QUICK_ITERATIONS if arguments.quick else ITERATIONS
    config = config_of(iterations)
    check_data(config)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        runs = Path(folder)
        equal_bits = run_ranks(_against_bare_megatron, config, world_size=1, run_dir=runs / "bare")[0]
        reference = run_ranks(run_reference, config, world_size=1, run_dir=runs / "reference")[0]
        worst = {}
        for layout in LAYOUTS:
            laid_out = with_parallel(config, **layout.parallel)
            laid_out = replace(laid_out, checkpoint=replace(config.checkpoint, load=str(runs / "reference")))
            rows = run_ranks(run_layout, laid_out, world_size=layout.world_size, run_dir=runs / layout.name)
            worst[layout.name] = differences(rows, reference)
            print(f"{layout.name:28} {_in_words(worst[layout.name])}", flush=True)
    return _judge(arguments.out, iterations, equal_bits, worst)


def _judge(out: Path | None, iterations: int, equal_bits: dict[str, Any], worst: dict[str, dict[str, float]]) -> int:
    loss, grad_norm, weights = (max(row[key] for row in worst.values()) for key in ("loss", "grad_norm", "weights"))
    print(f"bare Megatron: {equal_bits}")
    return finish(
        out,
        ID,
        passed=equal_bits["equal"]
        and loss <= MAX_LOSS_DIFFERENCE
        and grad_norm <= MAX_GRAD_NORM_DIFFERENCE
        and weights <= MAX_WEIGHT_DISTANCE,
        figure=f"loss {loss:.1e}, grad norm {grad_norm:.1e}, weights {weights:.1e}; "
        f"bare Megatron {'equal bits' if equal_bits['equal'] else 'other bits'}",
        threshold=f"loss <= {MAX_LOSS_DIFFERENCE:g}, grad norm <= {MAX_GRAD_NORM_DIFFERENCE:g}, "
        f"weights <= {MAX_WEIGHT_DISTANCE:g}; equal bits",
        counts={"layouts": len(worst), "iterations_each": iterations, "tensors_equal": equal_bits["tensors"]},
        details={"bare_megatron": equal_bits, "layouts": worst},
    )


def config_of(iterations: int) -> JobConfig:
    """Return the configuration of the small fp32 job with which layouts are compared. It saves a checkpoint after every
    iteration."""
    config = compose(
        "model=moe_micro",
        "model.num_layers=4",
        "training.micro_batch_size=1",
        "training.global_batch_size=8",
        f"training.train_iterations={ITERATIONS}",
        f"training.exit_at_iteration={iterations}",
        "training.eval_interval_iterations=0",
        "optimizer.lr_warmup_iterations=1",
        "checkpoint.async_save=false",
        "checkpoint.keep_last=0",
        "checkpoint.save_interval_iterations=1",
    )
    assert config.precision.params_dtype == "fp32", "tolerances are only valid for fp32"
    return config


def run_reference(config: JobConfig, rank: Rank) -> list[dict[str, Any]]:
    """Train on one rank from iteration 0 to the end, and save the weights of every iteration beside its checkpoint."""
    import torch

    from megatron_ft.mcore.model.transformer_config import named_parameters

    trainer, _ = join(config, rank)
    _save_start(trainer, rank)
    rows = []
    for iteration in range(1, (config.training.exit_at_iteration or 0) + 1):
        trainer.iterate(iteration)
        named = {name: p.detach().clone() for name, p in named_parameters(trainer.engine.model_chunks[0])}
        torch.save(named, rank.run_dir / f"weights-{iteration}.pt")
        rows.append(_last_metrics(rank))
    return rows


def _save_start(trainer: Any, rank: Rank) -> None:
    """Save a checkpoint of iteration 0, from which layouts run iteration 1."""
    trainer.checkpoints.save(trainer.state({}), 0)
    trainer.checkpoints.finish()


def run_layout(config: JobConfig, rank: Rank) -> list[dict[str, Any]]:
    """Run every iteration in one layout, each from the reference's state before it."""
    reference, config = Path(str(config.checkpoint.load)), _without_checkpoints(config)
    trainer, _ = join(config, rank)
    rows = []
    for iteration in range(1, (config.training.exit_at_iteration or 0) + 1):
        state = trainer.state({})
        trainer.checkpoints.load(state, reference / "checkpoints" / f"iter_{iteration - 1:07d}")
        trainer.engine.iteration = iteration - 1
        trainer.iterate(iteration)
        distance = _weight_distance(trainer, reference / f"weights-{iteration}.pt", config)
        metrics = _last_metrics(rank) if rank.rank == 0 else {}
        rows.append({**metrics, **distance})
    return rows


def _without_checkpoints(config: JobConfig) -> JobConfig:
    quiet = replace(config.checkpoint, load=None, save_interval_iterations=0)
    return replace(config, checkpoint=quiet)


def _weight_distance(trainer: Any, path: Path, config: JobConfig) -> dict[str, float]:
    """Return sums of squares over this rank's tensors: of the difference from the reference, and of the reference."""
    import torch

    from megatron_ft.mcore.model.transformer_config import named_parameters, own_part

    expected, squares, scale = torch.load(path, weights_only=True), 0.0, 0.0
    for chunk in trainer.engine.model_chunks:
        for name, parameter in named_parameters(chunk):
            mine = own_part(expected[name], parameter, name, config.model, trainer.engine.pg)
            squares += float((parameter.double() - mine.double()).square().sum())
            scale += float(mine.double().square().sum())
    return {"difference_squares": squares, "weight_squares": scale}


def _last_metrics(rank: Rank) -> dict[str, float]:
    import json

    lines = (rank.run_dir / f"records-{rank.rank}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    last = [record for record in records if record.get("kind") == "metrics"][-1]
    return {"loss": last["loss"], "grad_norm": last["grad_norm"]}


def differences(ranks: list[list[dict[str, Any]]], reference: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest relative differences over the iterations."""
    worst = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
    for number, expected in enumerate(reference):
        row = ranks[0][number]
        for key in ("loss", "grad_norm"):
            worst[key] = _worse(worst[key], abs(row[key] - expected[key]) / abs(expected[key]))
        squares = sum(rank[number]["difference_squares"] for rank in ranks)
        scale = sum(rank[number]["weight_squares"] for rank in ranks)
        worst["weights"] = _worse(worst["weights"], math.sqrt(squares / scale))
    return worst


def _worse(worst: float, difference: float) -> float:
    """Return the larger of two differences. NaN counts as larger than any number."""
    return math.inf if math.isnan(difference) else max(worst, difference)


def _in_words(worst: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.2e}" for key, value in worst.items())


def _against_bare_megatron(config: JobConfig, rank: Rank) -> dict[str, Any]:
    """Train the project's loop and a hand-written Megatron loop. Return whether losses, norms and weights are equal in
    every bit."""
    trainer, groups = join(_without_checkpoints(config), rank)
    from benchmarks.bare_megatron import BareLoop

    engine = trainer.engine
    bare = BareLoop(
        config, vocab_size=engine.vocab_size, samples=trainer.samples["train"], pg_collection=groups.pg_collection
    )
    bare.copy_weights(engine.model_chunks[0])
    unequal = []
    for iteration in range(1, (config.training.exit_at_iteration or 0) + 1):
        ours, theirs = engine.run_iteration(iteration).vote, bare.run_iteration(iteration)
        if (ours.loss, ours.grad_norm) != theirs:
            unequal.append({"iteration": iteration, "ours": asdict(ours), "megatron": theirs})
    own = dict(engine.model_chunks[0].module.named_parameters())
    tensors = {name: bool((own[name] == value).all()) for name, value in bare.model.module.named_parameters()}
    unequal += [name for name, same in tensors.items() if not same]
    return {"equal": not unequal, "tensors": len(tensors), "unequal": unequal[:3]}


if __name__ == "__main__":
    raise SystemExit(main())
