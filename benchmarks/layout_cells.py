"""Combinations of parallel layout and protection (cells) for the claim ``layouts-bitwise``.

A cell combines TP, the pipeline, the kind of optimizer, replicas, windows, what takes the place of a lost node, and a
*way* to recover: the keys that decide whether the number of ranks changes, the layout is kept, or all ranks start
again. For every cell, the prediction of ``tools/can_recover`` decides whether it survives. Jobs cover every pair of
values that occurs in a surviving cell; other cells are listed with the reason.

A new value of a factor needs its keys in ``Cell.words`` or ``Cell.way_words``, and a rule in ``has_meaning`` if it
cannot be combined with every other value. A combination that is no longer refused is covered without a change here.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import yaml

from benchmarks.covering import Row, Scalar, covering_array
from benchmarks.localized_jobs import TRAINING, Layout
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs
from megatron_ft.config.requirements import KeyChange
from megatron_ft.config.validate import on_device, validate
from megatron_ft.corpus.samples import check_data
from megatron_ft.errors import ConfigError
from megatron_ft.planning.job import with_slots
from megatron_ft.planning.placement.stage import StageRequest, first_plans
from megatron_ft.planning.recovery.costs import cost_of_loss, placer
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.strategy import Cost
from megatron_ft.planning.snapshot.report import SnapshotReport

PIPELINES: Mapping[str, tuple[int, int | None]] = {"1": (1, None), "2": (2, None), "4": (4, None), "VPP 2": (2, 2)}
"""Stages and virtual stages of each rank, by the name of the pipeline."""
FACTORS: Mapping[str, Sequence[Scalar]] = {
    "tp": (1, 2),
    "pp": tuple(PIPELINES),
    "optimizer": ("sharded", "whole"),
    "replicas": (True, False),
    "windows": (True, False),
    "nodes": ("return", "spare", "none"),
    "way": ("fewer nodes", "kept layout", "restart"),
    "dtype": ("fp32", "bf16"),
}
"""Values of all factors. ``nodes``: what takes the place of a lost node. ``way``: how the job recovers: ``fewer nodes``
(``recovery.min_nodes``), ``kept layout`` (``recovery.keep_layout``) or ``restart`` (``recovery.max_restarts``)."""
NUM_EXPERTS = 8
MOST_RANKS = 8
_MOST_LANES = 3
_SPARES = 8
"""Number of spare nodes if the ranks that are lost are not started again."""
_WINDOWS = ("snapshot=sparse_window", "snapshot.num_peer_copies=1", "snapshot.iteration_seconds=1")
_RETURNING = ("nodes.restart_lost_nodes=true", "nodes.max_node_restarts=1000")
_VOCABULARY = 256
"""Size of the vocabulary for predictions. The answers that are used here do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Layout of a job, its protection, and its way to recover."""

    layout: Layout
    replicas: bool
    windows: bool
    nodes: str
    way: str

    @classmethod
    def of(cls, row: Row) -> "Cell":
        """Return the cell of a row of ``FACTORS``."""
        tp, (pp, vpp) = int(str(row["tp"])), PIPELINES[str(row["pp"])]
        # With virtual stages, the number of microbatches of a lane must be a multiple of the number of stages.
        most = 2 if vpp else _MOST_LANES
        dp = min(most, MOST_RANKS // (tp * pp))
        replicas = bool(row["replicas"])
        layout = Layout(
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=dp,
            ep=2 if dp == 2 and not replicas else 1,
            sharded=row["optimizer"] == "sharded",
            dtype=str(row["dtype"]),
        )
        named = {"nodes": str(row["nodes"]), "way": str(row["way"])}
        return cls(layout=layout, replicas=replicas, windows=bool(row["windows"]), **named)

    @property
    def name(self) -> str:
        """Return the cell's name for reports."""
        parts = [self.layout.name, *(["replicas"] if self.replicas else []), *(["windows"] if self.windows else [])]
        return ", ".join([" ".join(parts), f"nodes: {self.nodes}", self.way])

    @property
    def in_fp32(self) -> "Cell":
        """Return the same cell in fp32. Predictions are made only in fp32 and are valid for every precision."""
        return replace(self, layout=replace(self.layout, dtype="fp32"))

    @property
    def num_copies(self) -> int:
        """Number of copies of experts and shards. If a rank is lost, the other ranks of its TP group cannot continue
        either, so the copies of ``tp`` ranks are lost. A stage cannot have more copies than nodes."""
        return min(self.layout.tp + 1, self.layout.tp * self.layout.dp)

    def words(self, fewest_lanes: int) -> list[str]:
        """Return the overrides of the layout and its protection, which do not depend on the way to recover.

        Args:
            fewest_lanes: smallest number of lanes with which the job trains.
        """
        words = [*self.layout.overrides, *(_WINDOWS if self.windows else ())]
        if self.replicas:
            # Slots must be enough for all copies with one lane more than the fewest, and for one copy with the fewest.
            losing = (fewest_lanes + 1) * self.layout.tp
            num_slots = max(-(-self.num_copies * NUM_EXPERTS // losing), -(-NUM_EXPERTS // (losing - self.layout.tp)))
            words += ["placement=overlap_search", f"placement.min_replicas={self.num_copies}"]
            words += [f"placement.num_slots_per_rank={min(NUM_EXPERTS, num_slots)}"]
            words += [f"placement.state_copies={self.num_copies}"] if self.layout.sharded else []
        return words

    def way_words(self, fewest_nodes: int, *, num_spares: int = _SPARES) -> list[str]:
        """Return the overrides of the way to recover.

        Args:
            fewest_nodes: smallest number of nodes with which the job trains.
            num_spares: number of spare nodes if the nodes are not started again.
        """
        if self.way == "restart":
            return ["recovery.max_restarts=1000"]
        if self.way == "kept layout":
            spares = ["nodes.num_spare_nodes=1"] if self.nodes == "spare" else []
            # All ranks start again if they cannot recover in their existing processes.
            return ["recovery.keep_layout=true", "recovery.max_restarts=1000", *_RETURNING, *spares]
        words = [f"recovery.min_nodes={fewest_nodes}"]
        if self.nodes == "return":
            words += [*_RETURNING, "nodes.join_window_seconds=0.1"]
        return words + ([f"nodes.num_spare_nodes={num_spares}"] if self.nodes == "spare" else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Prediction for a cell."""

    refused: str = ""
    """Reason why the job is refused before it starts; empty if it can start."""
    declined: str = ""
    """Reasons why no strategy keeps all committed iterations after a loss; empty if a strategy keeps them."""
    strategies: tuple[str, ...] = ()
    """Strategies that recover from the losses, each listed once."""
    loses_nodes: bool = True
    """Whether whole nodes may be lost; otherwise only ranks."""

    @property
    def survives(self) -> bool:
        """Return whether the job continues with all committed iterations after any loss of one rank."""
        return not self.refused and not self.declined


def prospect_of(cell: Cell) -> Prospect:
    """Predict whether a job of this cell keeps its iterations if any one node is lost, else if any one rank is."""
    lanes, nodes = max(1, cell.layout.dp - 1), cell.layout.num_ranks - 1
    if cell.nodes == "none":
        nodes = cell.layout.pp * cell.layout.tp * lanes
    try:
        config, facts = _planned([*TRAINING, *cell.words(lanes), *cell.way_words(nodes)])
    except ConfigError as error:
        return Prospect(refused=str(error))
    place = placer(config, JobInputs.read(config))
    found: list[Cost] = []
    for is_gone in (True, False):
        costs = [cost_of_loss(facts, [node], is_gone=is_gone, place=place) for node in facts.nodes]
        if all(map(_keeps_iterations, costs)):
            return Prospect(strategies=tuple(dict.fromkeys(cost.strategy for cost in costs)), loses_nodes=is_gone)
        found += costs
    worst = next(cost for cost in found if not _keeps_iterations(cost))
    return Prospect(declined="; ".join(f"{each.strategy}: {each.reason}" for each in worst.declined))


def _keeps_iterations(cost: Cost) -> bool:
    # A rollback to a window in memory counts, because it computes the same iterations again, with the same bits.
    return cost.is_automatic and (cost.keeps_processes or cost.medium == "memory")


def _planned(words: Sequence[str]) -> tuple[JobConfig, RecoveryFacts]:
    """Return configuration and facts of a job with these overrides. Raises ConfigError if the job is refused."""
    options = tuple(word for word in words if "." not in word.partition("=")[0])
    config = _composed(options)
    for word in words:
        key, _, value = word.partition("=")
        config = config if word in options else KeyChange(key, yaml.safe_load(value)).apply(config)
    validate(config)
    config, _ = with_slots(on_device(config, "cpu"), "cpu", lambda: check_data(config))
    plans = []
    if config.placement.algorithm is not None:
        plans = first_plans(config, StageRequest.of_job(config), JobInputs.read(config))
    return config, RecoveryFacts.of(config, plans, SnapshotReport.of(config, _VOCABULARY))


@cache
def _composed(options: Sequence[str]) -> JobConfig:
    """Return the configuration of a few options such as ``snapshot=sparse_window``. Composing takes most of the time of
    a prediction."""
    from pretrain_moe import compose

    config, _ = compose(list(options))
    return config


def has_meaning(row: Row) -> bool:
    """Return whether the values of a row can be combined at all."""
    if row["way"] == "restart":
        return row["nodes"] == "none"  # only the other ways have keys for spare and returning nodes
    if row["way"] == "kept layout":
        return row["nodes"] != "none"  # a node must take the place of a lost one
    return bool(row["replicas"])  # without replicas, no other node has the experts of a lost node


@cache
def prospects() -> Mapping[Cell, Prospect]:
    """Predict, in fp32, every cell whose values can be combined. The cells are in the order of ``FACTORS``."""
    factors = {**FACTORS, "dtype": ("fp32",)}
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return {cell: prospect_of(cell) for cell in map(Cell.of, filter(has_meaning, rows))}


def covered() -> list[Cell]:
    """Return surviving cells that together contain every pair of factor values which occurs in any surviving cell."""

    def survives(row: Row) -> bool:
        return has_meaning(row) and prospects()[Cell.of({**row, "dtype": "fp32"})].survives

    return [Cell.of(row) for row in covering_array(FACTORS, allowed=survives)]
