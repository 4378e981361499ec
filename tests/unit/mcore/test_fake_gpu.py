"""Tests GPU code with tensors without content: PyTorch raises an error if devices are mixed, and waits of the host are
counted."""

from typing import Any

import pytest
import torch

from tests.helpers import fake_gpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PASSES = 2 * 6
"""Passes of microbatches, two of which are padding, through layers."""
WAITS = {
    "masked_select at moe_utils.py:permute": 2 * PASSES,
    "synchronize at token_dispatcher.py:_maybe_dtoh_and_synchronize": PASSES,
    "item at finalize_model_grads.py:finalize_model_grads": 1,
    "item at engine.py:prepare": 1,
    "item at utils.py:local_multi_tensor_l2_norm": 29,  # one for each parameter, and their norm
    "copy to device that waits at utils.py:local_multi_tensor_l2_norm": 1,
    "item at clip_grads.py:get_grad_norm_fp32": 1,
    "tolist at engine.py:_own_share": 1,
    "item at router.py:take_auxiliary_losses": 2,
    "synchronize at reporting.py:seconds": 6,
}
"""Allowed waits of the host for the device in an iteration. If a number falls, lower it here."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the scenarios."""
    if torch.version.cuda is not None:
        pytest.skip("a build of PyTorch for CUDA has hooks of its own, which ask the driver for a device")
    library = fake_gpu.build(tmp_path_factory.mktemp("fake_gpu"))
    outcome: dict[str, Any] = fake_gpu.run(library, "tests.helpers.fake_training:scenarios", timeout_seconds=380)
    return outcome


def test_an_iteration_waits_for_the_device_only_where_it_is_known_to(found: dict[str, Any]) -> None:
    iterations = found["iterations"]
    assert iterations["actions"] == ["commit", "commit"]
    assert iterations["devices"] == ["cuda:0"]
    assert iterations["waits"] == WAITS


def test_a_microbatch_comes_in_one_copy_while_the_one_before_is_computed(found: dict[str, Any]) -> None:
    batches = found["batches"]
    assert batches["copies"] == {"copy to device at batches.py:begin": 3}
    assert batches["shapes"] == [[2, 8]] * 9 and batches["devices"] == ["cuda:0"]
    assert batches["samples_read_at_each_yield"] == [4, 6, 6]


def test_messages_have_the_device_that_the_backend_can_send_from(found: dict[str, Any]) -> None:
    messages = found["messages"]
    for way in ("waited for at once", "waited for later"):
        assert messages[way] == {"given": ["cpu"] * 4, "received": ["cuda:0", "cuda:0"]}
    # NCCL: from the device, without tags, each direction in a group of its own. gloo: from the host, with tags.
    assert messages["logged nccl"] == {"forward": ["pair", 0, "cuda"], "backward": ["all ranks", 0, "cuda"]}
    assert messages["logged gloo"] == {"forward": ["pair", 1001, "cpu"], "backward": ["pair", 1002, "cpu"]}
