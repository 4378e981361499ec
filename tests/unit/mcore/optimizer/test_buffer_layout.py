"""Compares ``_BufferLayout`` with the buffers and shard ranges of Megatron-Core."""

import random

import pytest
import torch

from megatron_ft.mcore.versions import RELEASE
from megatron_ft.planning.state.model_state import _BufferLayout


class _Group:
    """Data-parallel group of a given size, in one process."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_size", [None, 600])
def test_layout_and_shards_are_megatrons(size: int, bucket_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    # Its log asks the world who writes: there is none here.
    monkeypatch.setattr(param_and_grad_buffer, "log_on_each_pipeline_stage", lambda *args, **kwargs: None)
    draw = random.Random(size)
    parameters = [torch.nn.Parameter(torch.zeros(draw.randint(1, 900))) for _ in range(12)]
    parameters[0].shared_embedding = True  # type: ignore[attr-defined]
    parameters[7].shared_embedding = True  # type: ignore[attr-defined]
    sizes = [parameter.numel() for parameter in parameters]
    layout = _BufferLayout.of(sizes, padded_for=[size], bucket_size=bucket_size, alone={0, 7})
    # From 0.17, Megatron's buffer takes parameters with their names. From 0.18, it takes the layout.
    named = [(parameter, str(place)) for place, parameter in enumerate(parameters)]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    given = {}
    if RELEASE >= (0, 18):
        places = list(range(len(parameters)))
        compute = DistributedOptimizer._compute_per_buffer_param_layout
        given["param_layout"] = compute(parameters, bucket_size, size, config, places)
    found = []
    for rank in range(size):
        groups = ProcessGroupCollection()
        groups.tp, groups.dp_cp = _Group(1, 0), _Group(size, rank)
        buffer = _ParamAndGradBuffer(
            config,
            torch.float32,
            torch.float32,
            named if RELEASE >= (0, 17) else parameters,
            groups.dp_cp,
            bucket_size,
            {parameter: str(place) for place, parameter in enumerate(parameters)},
            1.0,
            list(range(len(parameters))),
            False,
            groups,
            **given,
        )
        assert layout.buckets == tuple(buffer.bucket_indices)
        assert layout.ranges == tuple(buffer.param_index_map[parameter][:2] for parameter in parameters)
        for bucket in range(len(buffer.buckets)):
            ranges = DistributedOptimizer._build_model_gbuf_range(buffer, bucket)["param_map"]
            for parameter, by_name in ranges.items():
                place = next(place for place, other in enumerate(parameters) if other is parameter)
                found.append((rank, place, by_name["param"].start, by_name["param"].end))
        for parameter in parameters:  # the next rank's buffer takes them over
            parameter.data = parameter.data.clone()
    shards = layout.shards(size)
    columns = (shards.shard, shards.parameter, shards.start, shards.stop)
    assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(found)
