"""Tests that the log of tensors sent from a GPU contains the sent values, even if the tensors change afterwards."""

import torch

from megatron_ft.planning.iteration import Vote
from megatron_ft.runtime.upstream_log.log import UpstreamLog

DEVICE = torch.device("cuda")
SHAPE = (2048, 4, 256)
SENDS = {"forward": ((0, 0), (1, 0)), "backward": ((0, 0),)}
SLEEP_CYCLES = 200_000_000


def make(num_iterations: int = 2) -> UpstreamLog:
    return UpstreamLog(
        num_iterations=num_iterations,
        sends=SENDS,  # type: ignore[arg-type]
        shape=SHAPE,
        dtype=torch.bfloat16,
        device=DEVICE,
    )


def vote(iteration: int) -> Vote:
    values = {"grad_norm": 1.0, "clip_coefficient": 1.0, "loss_scale": 1.0, "loss": 2.0, "aux_loss": 0.0, "z_loss": 0.0}
    return Vote(generation=0, iteration=iteration, found_inf=False, num_tokens=6, **values)  # type: ignore[arg-type]


def sleep() -> None:
    """Keep the computing stream busy for about a tenth of a second."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


def run(log: UpstreamLog, iteration: int) -> None:
    """Send tensors that are computed behind a queue, and that are overwritten and freed as soon as they are logged."""
    log.begin(iteration, 0)
    sleep()
    for direction, order in SENDS.items():
        for position in range(len(order)):
            value = iteration * 10 + position + 5 * (direction == "backward")
            sent = torch.full(SHAPE, float(value), device=DEVICE, dtype=torch.bfloat16)
            log.append(direction, sent)  # type: ignore[arg-type]
            del sent
            torch.full(SHAPE, -1.0, device=DEVICE, dtype=torch.bfloat16)  # takes the memory that was freed
    log.end()
    log.commit(vote(iteration))


def values(log: UpstreamLog, iteration: int, direction: str) -> list[list[float]]:
    """Return the distinct values of each logged tensor."""
    return [kept.unique().tolist() for _, kept in log.entries(iteration, direction)]  # type: ignore[arg-type]


def test_tensors_are_kept_as_they_were_sent() -> None:
    log = make()
    for iteration in (1, 2):
        run(log, iteration)
    for iteration in (1, 2):
        assert values(log, iteration, "forward") == [[iteration * 10.0], [iteration * 10.0 + 1.0]]
        assert values(log, iteration, "backward") == [[iteration * 10.0 + 5.0]]


def test_the_host_does_not_wait_for_the_device_while_it_sends() -> None:
    log = make()
    run(log, 1)  # the first one loads kernels
    log.figures.blocked_seconds = 0.0
    run(log, 2)
    assert log.figures.blocked_seconds < 0.05, "half of the time that the device was busy for"
    assert log.figures.num_tensors == 6


def test_a_slot_is_used_again() -> None:
    log = make(num_iterations=1)
    run(log, 1)
    log.trim(1)
    run(log, 2)
    assert log.iterations == (2,) and values(log, 2, "backward") == [[25.0]]
