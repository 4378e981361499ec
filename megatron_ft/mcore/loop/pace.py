"""How fast this rank computes: the time of work that is the same on every rank and in which nobody waits for others.

That work is the attention of a rank's first layer, between its projections. Its shapes do not depend on where tokens
go, and where the context is not parallel there is no communication in it. An iteration's time says nothing of the kind:
it is the slowest rank's on all of them.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron_ft.mcore.model.names import unwrap

NUM_ITERATIONS = 16
"""Newest iterations whose median counts."""
MIN_ITERATIONS = 8
"""Fewer say little: the first ones of a process are slow, on each rank in its own way."""


class Clock(Protocol):
    """Takes marks in time, and tells the time between two of them."""

    def mark(self) -> Any:
        """Now."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds from one mark to another."""


class WallClock:
    """The time of the process: a CPU is done with a layer when its call returns."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        """Seconds from one mark to another."""
        return ended - began


class StreamClock:
    """The time of the GPU's current stream; nothing waits before the marks are read."""

    def mark(self) -> torch.cuda.Event:
        """When the stream gets here."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """Seconds from one mark to another; waits until the stream has passed both."""
        ended.synchronize()  # type: ignore[no-untyped-call]
        return began.elapsed_time(ended) / 1e3  # type: ignore[no-untyped-call, no-any-return]


class Pace:
    """Times forward passes of a rank's training, iteration by iteration, whatever model it has.

    Args:
        clock: what times them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._iterations: deque[float] = deque(maxlen=NUM_ITERATIONS)

    @classmethod
    def on(cls, device: torch.device) -> "Pace":
        """That of a rank that computes on ``device``."""
        return cls(StreamClock() if device.type == "cuda" else WallClock())

    def watch(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        """From now on the rank's model is this one, bottom first: what earlier ones took still counts.

        Nothing is timed where attention waits for other ranks.
        """
        self._began, self._passes = None, []
        layers = [layer for chunk in model_chunks for layer in unwrap(chunk).decoder.layers]  # type: ignore[union-attr, operator]
        if layers and layers[0].config.context_parallel_size == 1:
            self.time(layers[0].self_attention.core_attention)

    def time(self, module: torch.nn.Module) -> None:
        """Time the forward passes of ``module`` while it trains."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def end_iteration(self) -> float:
        """Seconds of a forward pass, median of the newest iterations' medians; 0.0 while there are too few of them.

        An iteration without a forward pass does not count.
        """
        passes, self._passes = self._passes, []
        if passes:
            self._iterations.append(statistics.median(self._clock.seconds(*marks) for marks in passes))
        return statistics.median(self._iterations) if len(self._iterations) >= MIN_ITERATIONS else 0.0

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        self._began = self._clock.mark() if module.training else None

    def _end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._began is not None:
            self._passes.append((self._began, self._clock.mark()))
            self._began = None
