"""Routing by recorded loads: chooses the experts of each token so that the loads of experts follow a record.

If the model has fewer experts than the record, only the most loaded experts of each recorded layer are used, as in
Lazarus (arXiv 2407.04656), section 6.1. A record determines the proportions of the loads, not the expert of each token.
Tokens are assigned with integer arithmetic, so the same record and random key give the same routing on every machine.

Notation: T tokens of a microbatch, K experts of each token, E experts of a layer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.expert_loads import ExpertLoads, Tokens
from megatron_ft.operators import is_moe_layer
from megatron_ft.planning.placement.allocation import integer_loads

FILE_KEY, START_KEY = "model.router_trace_file", "model.router_trace_start"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """Recorded loads of a model's MoE layers. Each iteration uses one record, cyclically, beginning with ``start``."""

    source: str
    """Name of the file with the records."""
    layer_numbers: tuple[int, ...]
    """MoE layers of the model, in Megatron's numbering."""
    tokens: Tokens
    """Numbers of tokens ``[records, layers, experts]``; every layer of every record has tokens."""
    start: int
    """Index of the record that iteration 1 uses."""
    dropped_layers: int
    """Number of recorded layers with loads that are unused (the last ones), as the model has fewer MoE layers."""
    dropped_experts: int
    """Number of experts per recorded layer that are unused (the least loaded ones), as the model has fewer experts."""

    @classmethod
    def of(cls, model: ModelConfig, recorded: ExpertLoads) -> "RoutingTrace":
        """Select the part of a recording that a model uses.

        The layers of the file that have loads are used for the model's MoE layers, in order. If the file has more
        experts than the model, each layer uses the experts with the most tokens over all records, in the file's order.

        Raises:
            DataError: the file has too few layers or experts, or a layer has no tokens in a record.
            ConfigError: ``model.router_trace_start`` is not the index of a record.
        """
        layers = tuple(number for number in range(1, model.num_layers + 1) if is_moe_layer(model, number))
        tokens: Tokens = recorded.tokens.sum(axis=(1, 3))
        loaded = tokens[:, tokens.any(axis=(0, 2)), :]
        _check_size(recorded.source, "layers with loads", loaded.shape[1], len(layers), "MoE layers of the model")
        num_experts = model.num_moe_experts or 0
        _check_size(recorded.source, "experts", loaded.shape[2], num_experts, "model.num_moe_experts")
        trace = cls(
            source=recorded.source,
            layer_numbers=layers,
            tokens=_most_loaded(loaded[:, : len(layers), :], num_experts),
            start=model.router_trace_start,
            dropped_layers=loaded.shape[1] - len(layers),
            dropped_experts=loaded.shape[2] - num_experts,
        )
        trace.validate()
        return trace

    def validate(self) -> None:
        """Check that ``start`` is the index of a record and that every layer of every record has tokens.

        Raises:
            ConfigError: ``start`` is not the index of a record.
            DataError: a layer of a record has no tokens.
        """
        if not 0 <= self.start < self.num_records:
            what = f"must be from 0 to {self.num_records - 1}, a record of {self.source}"
            raise ConfigError.of(START_KEY, self.start, what)
        empty = np.argwhere(self.tokens.sum(axis=2) == 0)
        if len(empty):
            record, layer = (int(position) for position in empty[0])
            raise DataError(
                f"{FILE_KEY}={self.source}: record {record} must have tokens for layer {self.layer_numbers[layer]} of "
                "the model, but has none"
            )

    @property
    def num_records(self) -> int:
        """Number of records. After the last record, the first record is used again."""
        return int(self.tokens.shape[0])

    def record_of(self, iteration: int) -> int:
        """Return the index of the record for an iteration (from 1). Evaluation (iteration 0) uses record ``start``."""
        return (self.start + max(iteration, 1) - 1) % self.num_records

    def loads(self, iteration: int, layer_number: int) -> list[float]:
        """Return the recorded tokens of each expert, ``[E]``, for one layer in one iteration."""
        loads: list[float] = self.tokens[self.record_of(iteration), self.layer_numbers.index(layer_number)].tolist()
        return loads

    def wrap(self, train_iterations: int) -> str | None:
        """Return a note for the user if training runs past the last record, so that record 0 follows; else None."""
        last = self.num_records - self.start
        if train_iterations <= last:
            return None
        if self.num_records == 1:
            return f"{self.source} has one record, which routes every iteration"
        return (
            f"{self.source} has {self.num_records} records; after iteration {last} routing starts again with record 0"
        )

    def summary(self) -> str:
        records, layers, experts = self.tokens.shape
        text = (
            f"{self.source}: {records} records of {layers} layers x {experts} experts, starting with record "
            f"{self.start}"
        )
        dropped = (("layers at the end", self.dropped_layers), ("least loaded experts", self.dropped_experts))
        left_out = [f"{what}: {count}" for what, count in dropped if count]
        return text + (f"; not used: {', '.join(left_out)}" if left_out else "")


def _check_size(source: str, what: str, found: int, needed: int, needed_by: str) -> None:
    if found < needed:
        raise DataError(f"{FILE_KEY}={source}: has {found} {what}, but must have at least {needed} ({needed_by})")


def _most_loaded(tokens: Tokens, num_experts: int) -> Tokens:
    """Select the ``num_experts`` experts of each layer with the most tokens over all records."""
    # The sort is stable, so that the choice among equal loads does not depend on numpy's version or the CPU.
    order = np.argsort(-tokens.sum(axis=0), axis=1, kind="stable")
    kept = np.sort(order[:, :num_experts], axis=1)
    layers = np.arange(tokens.shape[1])[:, None]
    return tokens[:, layers, kept]


def expert_token_counts(loads: Sequence[float], num_tokens: int, topk: int) -> list[int]:
    """Return the number of tokens of each expert, ``[E]``: T * K tokens are distributed in proportion to ``loads``, by
    the method of largest remainders.

    A token has K different experts, so no expert gets more than T tokens. Tokens above T are divided among the other
    experts in proportion to their loads. If all experts with load have T tokens, experts without load get equal shares.
    """
    assert 1 <= topk <= len(loads), f"a token cannot have {topk} of {len(loads)} experts"
    weights, counts = integer_loads(loads), [0] * len(loads)
    free, left = list(range(len(loads))), num_tokens * topk
    while True:
        if left and not any(weights[expert] for expert in free):
            weights = [1] * len(loads)
        total = sum(weights[expert] for expert in free)
        # The excess of one expert goes to other experts, which may then exceed the limit as well: hence the loop. The
        # comparison is in integers, so that rounding has no influence.
        full = [expert for expert in free if weights[expert] * left > num_tokens * total]
        if not full:
            break
        for expert in full:
            counts[expert] = num_tokens
        free = [expert for expert in free if expert not in full]
        left -= num_tokens * len(full)
    if left:
        _deal_remainders(counts, weights, free, left)
    return counts


def _deal_remainders(counts: list[int], weights: Sequence[int], free: Sequence[int], left: int) -> None:
    total = sum(weights[expert] for expert in free)
    for expert in free:
        counts[expert] = weights[expert] * left // total
    missing = left - sum(counts[expert] for expert in free)
    by_remainder = sorted(free, key=lambda expert: (-(weights[expert] * left % total), expert))
    for expert in by_remainder[:missing]:
        counts[expert] += 1


def forced_experts(counts: Sequence[int], num_tokens: int, key: str) -> npt.NDArray[np.int64]:
    """Return the experts of each token, ``[T, K]``: a row has K different experts, and ``counts[e]`` rows contain e.

    Method: a sequence of T * K entries contains expert e ``counts[e]`` times, in adjacent entries. Each token gets K
    entries that are T positions apart. An expert has at most T entries, so no token gets the same expert twice. ``key``
    determines the order of experts and of tokens.
    """
    topk, rest = divmod(sum(counts), num_tokens)
    assert rest == 0 and max(counts) <= num_tokens, (
        f"{list(counts)} must add up to a multiple of {num_tokens} tokens, and no entry may exceed {num_tokens}"
    )
    order = _shuffled(len(counts), f"{key}/experts")
    row = np.repeat(order, np.asarray(counts, dtype=np.int64)[order])
    return row.reshape(topk, num_tokens).T[_shuffled(num_tokens, f"{key}/tokens")]


def _shuffled(size: int, key: str) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(size)`` that depends only on ``key`` and is the same on every machine.

    Numbers are sorted by a hash: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of a 64-bit counter.
    """
    # numpy's generators may change between versions (NEP 19), and the same record would then give another routing.
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    values = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(values ^ (values >> np.uint64(31)), kind="stable")
