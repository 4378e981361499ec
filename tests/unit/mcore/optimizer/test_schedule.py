"""Tests that learning rates are those of Megatron and depend only on the iteration."""

from typing import Any

import pytest
import torch

from megatron_ft.testing import engines

STYLES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {},
    "cosine": {"optimizer.lr_decay_iterations": 15},
    "inverse-square-root": {"optimizer.lr_warmup_init": 1e-4},
    "WSD": {"optimizer.lr_wsd_decay_iterations": 6},
    "WSD linear": {"optimizer.lr_wsd_decay_iterations": 6, "optimizer.lr_wsd_decay_style": "linear"},
    "WSD cosine": {"optimizer.lr_wsd_decay_iterations": 6, "optimizer.lr_wsd_decay_style": "cosine"},
    "WSD minus_sqrt": {"optimizer.lr_wsd_decay_iterations": 20, "optimizer.lr_wsd_decay_style": "minus_sqrt"},
}


class Groups:
    """Replacement for an optimizer, with the fields that the schedule needs."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": 1.0, "lr_mult": 1.0}]

    @property
    def learning_rate(self) -> float:
        return float(self.param_groups[0]["lr"])


def scheduler_of(style: str) -> tuple[Any, Groups, int]:
    from megatron_ft.mcore.optimizer.adamw import build_scheduler

    overrides = {"optimizer.lr_decay_style": style.split()[0], "optimizer.lr_warmup_iterations": 3, **STYLES[style]}
    config = engines.micro_config(overrides)
    groups = Groups()
    return build_scheduler(config, groups), groups, config.training.global_batch_size  # type: ignore[arg-type]


@pytest.mark.parametrize("style", STYLES)
def test_learning_rate_is_that_of_megatron_stepping_along(style: str) -> None:
    from megatron_ft.mcore.optimizer.adamw import set_position

    ours, our_groups, batch = scheduler_of(style)
    theirs, their_groups, _ = scheduler_of(style)
    expected, forward = [], []
    for iteration in range(1, 24):
        expected.append(their_groups.learning_rate)
        theirs.step(increment=batch)
        set_position(ours, (iteration - 1) * batch)
        forward.append(our_groups.learning_rate)
    backward = []
    for iteration in range(23, 0, -1):
        set_position(ours, (iteration - 1) * batch)
        backward.append(our_groups.learning_rate)
    assert forward == expected
    assert backward[::-1] == expected
    assert max(expected) == pytest.approx(1e-2)
    assert len(set(expected)) > (3 if style == "constant" else 8)


def test_wsd_by_hand() -> None:
    """After a warm-up of 3 and a constant part, the last 6 of 20 iterations fall linearly to ``min_lr``."""
    from megatron_ft.mcore.optimizer.adamw import set_position

    scheduler, groups, batch = scheduler_of("WSD linear")

    def rate(iteration: int) -> float:
        set_position(scheduler, (iteration - 1) * batch)
        return groups.learning_rate

    assert [rate(1), rate(2), rate(4)] == pytest.approx([0.0, 1e-2 / 3, 1e-2])
    assert rate(15) == pytest.approx(1e-2)
    assert rate(18) == pytest.approx(1e-3 + 0.5 * (1e-2 - 1e-3))
    assert rate(21) == rate(30) == pytest.approx(1e-3)
