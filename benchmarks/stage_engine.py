"""Runs the training engine as one stage of a pipeline without the other stages. A log supplies the tensors that they
would send."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.training.engine import TrainingEngine
from megatron_ft.planning.upstream_log import tensor_shape
from megatron_ft.testing.engines import MadeUpSamples


class Place:
    """Replacement for the model's pipeline group, with a rank and a size but without peers."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage, self._num_stages = stage, num_stages

    def rank(self) -> int:
        """Return the stage."""
        return self._stage

    def size(self) -> int:
        """Return the number of stages."""
        return self._num_stages


class Logged(P2PCommunicator):
    """Returns logged tensors as if neighbouring stages had sent them, and drops tensors that are sent to these
    stages."""

    def __init__(self, place: Place, config: Any, shape: tuple[int, int, int]) -> None:
        self.pp_group: Any = place
        self.config = config
        self.virtual_pipeline_model_parallel_size = None
        generator = torch.Generator().manual_seed(1)
        self._tensor = torch.randn(shape, generator=generator, dtype=config.pipeline_dtype)

    def _communicate(self, *, recv_prev: bool, recv_next: bool, **_: Any) -> tuple[Any, Any, Any]:
        before = self._tensor.clone().requires_grad_() if recv_prev else None
        after = self._tensor.clone() if recv_next else None
        return before, after, {}


class StageEngine(TrainingEngine):
    """One stage of a pipeline, in a job of one process."""

    before_reduction: Callable[[], None] = staticmethod(lambda: None)
    """Function that is called after the last backward pass of an iteration."""
    place: Place
    alone: Any
    """Pipeline group of the process, which contains only the process itself."""

    def take_place(self) -> None:
        """Make all code that looks up the pipeline group find this stage. Engines of several stages share the process
        groups."""
        self.pg.pp = self.place  # type: ignore[assignment]

    def _connect_schedule(self) -> None:
        self.pg.pp = self.alone
        super()._connect_schedule()
        self.take_place()
        self.p2p = Logged(self.place, self.transformer_config, tensor_shape(self.config))
        self.forward_backward = get_forward_backward_func(self.place.size(), None)

    def _finalize_gradients(self, *args: Any, **kwargs: Any) -> None:
        self.before_reduction()
        self.pg.pp = self.alone
        super()._finalize_gradients(*args, **kwargs)
        self.take_place()


def build(config: JobConfig, groups: Any, *, stage: int, impl: str, vocab_size: int) -> StageEngine:
    """Return the engine of stage ``stage`` of the pipeline of ``config``, over process groups of one rank."""
    samples = MadeUpSamples(config.model.seq_length)
    engine = StageEngine(
        config,
        device=torch.device("cpu"),
        transformer_impl=impl,
        vocab_size=vocab_size,
        samples={"train": samples, "valid": samples},
    )
    engine.place = Place(stage, config.parallel.pipeline_model_parallel_size)
    engine.alone = groups.pg_collection.pp
    engine.pg = groups.pg_collection
    engine.take_place()
    try:
        engine.build(groups)
    finally:
        groups.pg_collection.pp = engine.alone
    return engine
