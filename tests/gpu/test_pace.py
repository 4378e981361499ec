"""Tests that the measured time of a rank on a GPU is the time of the work on the device, not of the calls that start
it."""

import time

import torch

from megatron_ft.mcore.training.reporting import MIN_ITERATIONS, StragglerTimer, _StreamClock


class Products(torch.nn.Module):
    """Layer with a number of products of large matrices in sequence."""

    def forward(self, matrix: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            matrix = (matrix @ matrix).clamp(-1.0, 1.0)
        return matrix


def timer_of(matrix: torch.Tensor, count: int) -> float:
    work = Products()
    pace = StragglerTimer(_StreamClock())
    pace.time(work)
    output = 0.0
    for _ in range(2 * MIN_ITERATIONS):
        work(matrix, count)
        output = pace.end_iteration()
    return output


def test_it_is_the_time_on_the_stream() -> None:
    matrix = torch.rand((4096, 4096), device="cuda")
    few, many = timer_of(matrix, 2), timer_of(matrix, 20)
    assert many > 3.0 * few > 0.0
    began = time.perf_counter()
    Products()(matrix, 20)
    torch.cuda.synchronize()
    assert many < 2.0 * (time.perf_counter() - began)
