"""Measures the time of a pipeline stage for a microbatch on the real engine, alone in one process.

The stage is built as the first, the middle or the last of three stages with one layer each. Tensors of its neighbours
come from a log, and tensors that it sends are dropped, as in a localized replay. Times are CPU seconds of its only
computing thread, so that other load on the machine has no influence.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_ft.config.job import JobConfig, ParallelConfig
from megatron_ft.operators import OperatorId, operators_of, padded_vocab_size
from megatron_ft.planning.cost.pipeline_clock import PassSeconds
from megatron_ft.testing.ranks import Rank, compose, join_groups, run_ranks

Kind = Literal["first", "middle", "last"]
KINDS: tuple[Kind, ...] = ("first", "middle", "last")
NUM_STAGES = len(KINDS)
NUM_MICROBATCHES = 4
TOKENIZER_VOCAB_SIZE = 257
LOADS = ((3, 40, 2, 5, 13, 7, 10, 20), (20, 2, 10, 5, 40, 3, 7, 13), (5, 13, 3, 20, 40, 7, 2, 10))
"""Relative load of each expert, by layer. The loads are in no order, so that ordering experts by number is neither the
best nor the worst order."""
SIZES = {
    "moe_micro": (),
    "wide": ("model.hidden_size=256", "model.moe_ffn_hidden_size=512", "model.seq_length=128"),
}
"""Overrides of each model: the micro model, and one that spends most of its time on matrix products."""
Pattern = frozenset[str]
"""Frozen operators of a stage, named without their layer."""
NOTHING: Pattern = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Median times of a stage with some operators frozen."""

    forward_seconds: float
    """Time of the forward pass, which does not depend on the frozen operators."""
    backward_seconds: float
    rest_seconds: float
    """Time of all other work of an iteration: preparing and reducing gradients, and the update."""

    @property
    def passes(self) -> PassSeconds:
        """Return the times of passes in the form that the virtual clock needs."""
        return PassSeconds(forward_seconds=self.forward_seconds, backward_seconds=self.backward_seconds)


Request = tuple[Kind, Pattern]
Times = dict[Request, StageTimes]


def measure(size: str, requests: Collection[Request], *, repeats: int, timeout_seconds: float) -> Times:
    """Return the medians of ``repeats`` iterations for each request. One process runs all of them."""
    with tempfile.TemporaryDirectory(prefix="stage-times-") as folder:
        trace = Path(folder) / "loads.json"
        trace.write_text(json.dumps(LOADS), encoding="utf-8")
        config = job_of(size, trace)
        wanted = sorted((kind, sorted(pattern)) for kind, pattern in requests)
        rank = partial(_measure_all, wanted, repeats)
        run = run_ranks(rank, config, world_size=1, run_dir=Path(folder), timeout_seconds=timeout_seconds)[0]
    return {(kind, frozenset(pattern)): StageTimes(**times) for kind, pattern, times in run}


def job_of(size: str, trace: Path) -> JobConfig:
    """Return a job of three stages with one layer each, whose routing follows ``LOADS``."""
    return compose(
        "model=moe_micro",
        *SIZES[size],
        f"model.num_layers={NUM_STAGES}",
        "model.router=trace",
        f"model.router_trace_file={trace}",
        f"parallel.pipeline_model_parallel_size={NUM_STAGES}",
        f"launch.ranks_per_node={NUM_STAGES}",
        "training.micro_batch_size=1",
        f"training.global_batch_size={NUM_MICROBATCHES}",
        "training.eval_interval_iterations=0",
    )


def local_name(operator: OperatorId) -> str:
    """Return the name of an operator within its stage: ``expert.3``, ``gate``, ``head``."""
    return str(operator).partition(".")[2]


def _measure_all(wanted: list[tuple[Kind, list[str]]], repeats: int, config: JobConfig, rank: Rank) -> list[Any]:
    """Run one iteration of each request, and repeat this, so that a change of the machine's load affects all requests
    equally."""
    groups, transformer_impl = join_groups(replace(config, parallel=ParallelConfig()), rank)
    stages = {kind: _Stage(kind, config, groups, transformer_impl) for kind in KINDS}
    iterations: list[list[_Iteration]] = [[] for _ in wanted]
    for number in range(repeats + 1):
        for found, (kind, pattern) in zip(iterations, wanted, strict=True):
            measured = stages[kind].measure(pattern)
            if number > 0:  # the first one warms up
                found.append(measured)
    forward: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for found, (kind, _) in zip(iterations, wanted, strict=True):
        forward[kind] += [one for iteration in found for one in iteration.forward]
    return [
        (kind, pattern, asdict(_medians(forward[kind], found)))
        for found, (kind, pattern) in zip(iterations, wanted, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Iteration:
    """Thread seconds of the passes of an iteration, and of its other work."""

    forward: list[float]
    backward: list[float]
    rest: float


def _medians(forward: list[float], iterations: list[_Iteration]) -> StageTimes:
    return StageTimes(
        forward_seconds=statistics.median(forward),
        backward_seconds=statistics.median(one for iteration in iterations for one in iteration.backward),
        rest_seconds=statistics.median(iteration.rest for iteration in iterations),
    )


class _Stage:
    """Engine of one stage, and a log that supplies the tensors of the other stages."""

    def __init__(self, kind: Kind, config: JobConfig, groups: Any, transformer_impl: str) -> None:
        from benchmarks.stage_engine import build

        self.place, self.config = KINDS.index(kind), config
        vocab_size = padded_vocab_size(config.model, TOKENIZER_VOCAB_SIZE)
        self.engine = build(config, groups, stage=self.place, impl=transformer_impl, vocab_size=vocab_size)

    def measure(self, pattern: Collection[str]) -> _Iteration:
        """Run and measure one iteration."""
        operators = self._operators(pattern)
        with _timed_passes() as passes:
            began = time.thread_time()
            self._run(operators)
            total = time.thread_time() - began
        forward, backward = passes["forward_step"], passes["backward_step"]
        assert len(forward) == len(backward) == NUM_MICROBATCHES, (
            f"the numbers of forward and backward passes are {len(forward)} and {len(backward)}"
        )
        return _Iteration(forward=forward, backward=backward, rest=total - sum(forward) - sum(backward))

    def _operators(self, pattern: Collection[str]) -> set[OperatorId]:
        mine = {self.place + 1, *([0] if self.place == 0 else []), *([NUM_STAGES + 1] if self.place == 2 else [])}
        operators = [operator.id for operator in operators_of(self.config.model, TOKENIZER_VOCAB_SIZE)]
        chosen = {one for one in operators if one.layer in mine and local_name(one) in pattern}
        assert len(chosen) == len(pattern), f"stage {self.place} does not have all of the operators {sorted(pattern)}"
        return chosen

    def _run(self, operators: Collection[OperatorId]) -> None:
        """Run one iteration as ``Replayer`` does in a replay, but without the comparison with other ranks."""
        from megatron_ft.mcore.optimizer import adamw
        from megatron_ft.mcore.snapshot.local_window import frozen, parameters_of, synchronous_reduction

        engine = self.engine
        config = engine.transformer_config
        unchanged = parameters_of(engine.model_chunks, operators, self.config.model.num_layers)
        with synchronous_reduction(engine.model_chunks, config), frozen(engine.model_chunks, unchanged) as thaw:
            engine.before_reduction = thaw
            engine.take_place()
            engine.accumulate(engine.iteration + 1)
        adamw.prepare_known(engine.optimizer, found_inf=False, without=unchanged)
        adamw.update(engine.optimizer, self.config.optimizer.clip_grad, 1.0)
        adamw.gather(engine.optimizer, engine.model_chunks)
        engine.iteration += 1


@contextmanager
def _timed_passes() -> Iterator[dict[str, list[float]]]:
    """Yield the thread seconds of every pass that Megatron's schedules run in the block."""
    from megatron.core.pipeline_parallel import schedules

    found: dict[str, list[float]] = {"forward_step": [], "backward_step": []}
    originals = {name: getattr(schedules, name) for name in found}

    def timed(name: str, *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        result = originals[name](*args, **kwargs)
        found[name].append(time.thread_time() - began)
        return result

    for name in found:
        setattr(schedules, name, partial(timed, name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(schedules, name, original)


def measure_send(num_bytes: int, *, repeats: int, timeout_seconds: float) -> float:
    """Return the seconds from sending ``num_bytes`` over gloo until they arrive: half of the median round trip."""
    with tempfile.TemporaryDirectory(prefix="stage-times-") as folder:
        config = compose("model=moe_micro", "launch.ranks_per_node=2")
        rank = partial(_round_trips, num_bytes, repeats)
        seconds = run_ranks(rank, config, world_size=2, run_dir=Path(folder), timeout_seconds=timeout_seconds)
    return float(seconds[0]) / 2


def _round_trips(num_bytes: int, repeats: int, config: JobConfig, rank: Rank) -> float:
    import torch
    import torch.distributed as dist

    groups, _ = join_groups(config, rank)
    tensor, seconds = torch.zeros(num_bytes, dtype=torch.uint8), []
    calls = (dist.send, dist.recv) if rank.rank == 0 else (dist.recv, dist.send)
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for call in calls:
            call(tensor, 1 - rank.rank, groups.vote)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
