"""Tests that groups with blocked operations are destroyed in a thread for which no rank waits."""

import gc
import time
import weakref
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from megatron_ft.runtime.transport import abort
from tests.unit.runtime.transport.test_waits import until


class Broken(torch.autograd.Function):
    """Autograd function that raises an error in its backward pass. Its graph refers to an object."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, referred: object, breaks: bool) -> torch.Tensor:
        ctx.referred, ctx.breaks = referred, breaks
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.breaks:
            raise RuntimeError("a connection was closed")
        return gradient * 2, None, None


def break_a_backward_pass(referred: object) -> None:
    value = torch.ones(3, requires_grad=True)
    branches = [Broken.apply(value * number, referred, number == 3) for number in range(1, 4)]
    try:
        sum(branch.sum() for branch in branches).backward()
    except RuntimeError:
        return
    raise AssertionError("the backward pass has ended well")


def group_of_one() -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore("one", HashStore()), 0, 1)


def test_the_graph_of_a_broken_backward_pass_is_freed() -> None:
    class Referred:
        pass

    referred = Referred()
    seen = weakref.ref(referred)
    break_a_backward_pass(referred)
    del referred
    gc.collect()
    assert seen() is not None, "torch has begun to free it: drop_broken_graph is not needed any more"
    abort.drop_broken_graph()
    assert seen() is None


def test_a_group_that_is_referred_to_is_held_until_it_is_not() -> None:
    """Otherwise the code that drops the last reference would destroy the group, and would wait for it."""
    earlier, group = abort.num_held(), group_of_one()
    seen = weakref.ref(group)
    break_a_backward_pass(group)
    groups = [group]
    del group
    assert abort.release(groups) == earlier + 1
    assert groups == []
    abort.drop_broken_graph()
    assert seen() is not None, "it was destroyed by the backward pass"
    assert abort.release([]) <= earlier + 1
    until(lambda: seen() is None and abort.num_held() == earlier)


def test_nobody_waits_long_for_groups() -> None:
    began = time.monotonic()
    abort.release([group_of_one() for _ in range(3)])
    assert time.monotonic() - began < 20
