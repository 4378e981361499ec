"""Computes costs of recoveries from the measured times of stages, on the virtual clock.

A pipeline has one layer in each chunk. Windows of W slices follow each other without a gap, and a window is committed
in the iteration after its last slice. So between W and 2W - 1 iterations are replayed after a failure, each number
equally often; the first W - 1 of them run with frozen operators. Costs are means over these cases.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.stage_times import LOADS, NOTHING, TOKENIZER_VOCAB_SIZE, Kind, Pattern, Request, Times, local_name
from megatron_ft.config.job import JobConfig
from megatron_ft.planning.cost.pipeline_clock import IterationSeconds, StageSeconds
from megatron_ft.planning.pipeline import PipelineShape
from megatron_ft.planning.snapshot.orders import HardCount, LayerOrder
from megatron_ft.planning.snapshot.plan import Activations, WindowPlan
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.planning.snapshot.report import estimate_demand
from megatron_ft.planning.snapshot.sparse_window import SparseWindow
from megatron_ft.testing.ranks import compose
from megatron_ft.topology import Topology

WINDOW_ITERATIONS = 4
MICROBATCHES_PER_STAGE = 2
ANY_BANDWIDTH = 1e15
"""Bandwidth in bytes per second that is large enough for windows of the requested number of slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Pipeline, and the techniques that its recovery uses."""

    num_stages: int
    num_chunks: int = 1
    num_microbatches: int = 0
    """Number of microbatches; 0 for twice the number of stages."""
    by_popularity: bool = True
    """Whether windows are ordered by the popularity of experts. If not, they are ordered by layer and expert number."""
    skips_frozen: bool = True
    """Whether weight gradients of frozen operators are not computed."""

    @property
    def shape(self) -> PipelineShape:
        """Return the shape of the pipeline of one data-parallel rank."""
        num = self.num_microbatches or MICROBATCHES_PER_STAGE * self.num_stages
        return PipelineShape(num_stages=self.num_stages, num_chunks=self.num_chunks, num_microbatches=num)

    @property
    def name(self) -> str:
        """Return the name of the schedule."""
        return "1F1B" if self.num_chunks == 1 else f"interleaved, {self.num_chunks} chunks"

    def requests(self) -> set[Request]:
        """Return the measurements of stages that the case needs."""
        frozen = frozen_operators(self.num_stages, self.num_chunks, self.by_popularity)
        passes = {self._request(place, NOTHING) for place in range(self.num_stages * self.num_chunks)}
        return passes | {self._request(place, pattern) for row in frozen for place, pattern in enumerate(row)}

    def recover(
        self, times: Times, replayed: Collection[int] | None = None, send_seconds: float = 0.0
    ) -> "RecoveryCost":
        """Return the cost of a recovery in which the stages ``replayed`` replay; None stands for all stages."""
        total, sums = None, []
        for iteration in range(1, 2 * WINDOW_ITERATIONS):
            stages = [self._stage(times, stage, iteration) for stage in range(self.num_stages)]
            run = IterationSeconds.of(self.shape, stages, replayed=replayed, send_seconds=send_seconds)
            total = run if total is None else total + run
            if iteration >= WINDOW_ITERATIONS:
                sums.append(total)
        return RecoveryCost.mean(sums)

    def _stage(self, times: Times, stage: int, iteration: int) -> StageSeconds:
        frozen = frozen_operators(self.num_stages, self.num_chunks, self.by_popularity)
        passes, rest = [], 0.0
        for chunk in range(self.num_chunks):
            place = chunk * self.num_stages + stage
            pattern = frozen[iteration - 1][place] if iteration < WINDOW_ITERATIONS else NOTHING
            passes.append(times[self._request(place, pattern if self.skips_frozen else NOTHING)].passes)
            rest += times[self._request(place, pattern)].rest_seconds
        return StageSeconds(chunks=tuple(passes), update_seconds=rest)

    def _request(self, place: int, pattern: Pattern) -> Request:
        return kind_of(place, self.num_stages * self.num_chunks), pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCost:
    """Mean costs over the iterations in which a failure can happen."""

    wall_seconds: float
    cpu_seconds: float
    num_executions: float
    """Number of executions of a microbatch in a stage, forward and backward."""

    @classmethod
    def mean(cls, runs: Collection[IterationSeconds]) -> "RecoveryCost":
        """Return the mean of equally likely recoveries."""
        return cls(
            wall_seconds=sum(run.makespan_seconds for run in runs) / len(runs),
            cpu_seconds=sum(run.busy_seconds for run in runs) / len(runs),
            num_executions=sum(run.num_executions for run in runs) / len(runs),
        )


def kind_of(place: int, num_places: int) -> Kind:
    """Return the kind of the chunk at position ``place``, counted from the embedding: first, middle or last."""
    if place == 0:
        return "first"
    return "last" if place == num_places - 1 else "middle"


@cache
def frozen_operators(num_stages: int, num_chunks: int, by_popularity: bool) -> tuple[tuple[Pattern, ...], ...]:
    """Return the frozen operators of each chunk, from the bottom of the model, in the replayed iterations 1 to W -
    1."""
    plan = window_of(num_stages, num_chunks, by_popularity)
    return tuple(tuple(_frozen(plan, index, num_stages * num_chunks)) for index in range(WINDOW_ITERATIONS - 1))


def window_of(num_stages: int, num_chunks: int, by_popularity: bool) -> WindowPlan:
    """Return the window that the job's policy plans for a pipeline with one rank per stage."""
    num_layers = num_stages * num_chunks
    job = _micro_job()
    parallel = replace(
        job.parallel,
        pipeline_model_parallel_size=num_stages,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
    )
    config = replace(job, model=replace(job.model, num_layers=num_layers), parallel=parallel)
    demand = estimate_demand(config, Topology.of(config.parallel, num_stages), TOKENIZER_VOCAB_SIZE)
    policy = SparseWindow(order=HardCount() if by_popularity else LayerOrder(), min_window_iterations=WINDOW_ITERATIONS)
    context = SnapshotContext(
        bandwidth_bytes_per_second=ANY_BANDWIDTH, iteration_seconds=1.0, activations=activations_of(num_layers)
    )
    plan = policy.plan(demand, context)
    assert plan.num_iterations == WINDOW_ITERATIONS, f"a window of {plan.num_iterations} iterations"
    return plan


@cache
def _micro_job() -> JobConfig:
    return compose("model=moe_micro")


def activations_of(num_layers: int) -> Activations:
    """Return the tokens of each expert. Each layer has the loads of the kind of stage (first, middle, last) that was
    measured in its place."""
    rows: Mapping[Kind, tuple[int, ...]] = dict(zip(("first", "middle", "last"), LOADS, strict=True))
    layers = tuple(range(1, num_layers + 1))
    return Activations(layers=layers, tokens=(tuple(rows[kind_of(layer - 1, num_layers)] for layer in layers),))


def _frozen(plan: WindowPlan, index: int, num_layers: int) -> Iterator[Pattern]:
    """Yield the frozen operators of each layer. The embedding belongs to the first layer, and the head to the last
    one."""
    active = {unit.operator for unit in plan.active(index)}
    frozen = {unit.operator for unit in plan.frozen(index)} - active
    for layer in range(1, num_layers + 1):
        mine = [one for one in frozen if min(max(one.layer, 1), num_layers) == layer]
        yield frozenset(local_name(one) for one in mine)


def ablation(case: Case) -> dict[str, Case]:
    """Return the case, and the same case with techniques removed one after the other, in the order of MoEvement's
    figure 13."""
    plain = replace(case, by_popularity=False, skips_frozen=False)
    return {
        "sparse windows": plain,
        "+ no weight gradients of frozen operators": replace(plain, skips_frozen=True),
        "+ popular experts last": case,
    }
