"""Tests how experts change places within a rank."""

from itertools import permutations
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("order", list(permutations((1, 4, 6, 7))), ids=str)
def test_experts_are_sorted_in_place(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ft.mcore.state import tensors

    state: dict[str, Any] = {
        f"decoder.layers.2.mlp.experts.local_experts.{expert}.{kind}": torch.full((2, 3), 10.0 * expert + number)
        for expert in order
        for number, kind in enumerate(("weight", "weight/exp_avg"))
    }
    monkeypatch.setattr(tensors, "distinct_state", lambda *_: iter(state.items()))
    addresses = [tensor.data_ptr() for tensor in state.values()]
    tensors.ExpertPlaces([], None).sort(3, order)  # type: ignore[arg-type]
    assert [tensor.data_ptr() for tensor in state.values()] == addresses
    wanted = [10.0 * expert + number for expert in sorted(order) for number in range(2)]
    assert [tensor.unique().tolist() for tensor in state.values()] == [[value] for value in wanted]
