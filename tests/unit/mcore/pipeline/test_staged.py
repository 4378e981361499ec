"""Tests messages between stages that go through host memory. ``test_fake_gpu.py`` tests their devices."""

import pytest

from megatron_ft.testing.engines import of_ranks, run_scenarios

SLOW_SECONDS = 0.25
"""``SLOW_SECONDS`` of the scenario."""
PP2 = {"model.num_layers": 4, "parallel.pipeline_model_parallel_size": 2}
PIPELINES = {"pp2": PP2, "vpp2": {**PP2, "parallel.virtual_pipeline_model_parallel_size": 2}}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_what_goes_through_host_memory_arrives_with_the_same_bits() -> None:
    """Tests both kinds of schedule: one waits for its messages at once, the other one later."""
    entry = "tests.helpers.staged_scenarios:train"
    outcomes = run_scenarios(
        {
            f"{name}:{is_staged}": (entry, 2, {"overrides": overrides, "is_staged": is_staged})
            for name, overrides in PIPELINES.items()
            for is_staged in (True, False)
        },
        timeout_seconds=380,
    )
    for name in PIPELINES:
        for through_host, direct in zip(
            of_ranks(outcomes, f"{name}:True"), of_ranks(outcomes, f"{name}:False"), strict=True
        ):
            assert through_host["losses"] == direct["losses"]
            assert through_host["state"] == direct["state"]
            assert through_host["num_messages"] == direct["num_messages"] > 0
            assert (through_host["num_direct"], direct["num_direct"] > 0) == (0, True)


@pytest.mark.slow
@pytest.mark.distributed
def test_an_output_arrives_although_its_memory_is_freed_while_it_is_sent() -> None:
    """Interleaved schedules wait for a send one pass later."""
    entry = "tests.helpers.staged_scenarios:send_and_free"
    outcomes = run_scenarios({"freed": (entry, 2, {"overrides": PIPELINES["vpp2"]})})
    assert of_ranks(outcomes, "freed") == [0, 1 << 22]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_each_wait_for_a_message_is_measured() -> None:
    """The first stage waits for the slow last stage. All ranks know the waits of all ranks."""
    entry = "tests.helpers.staged_scenarios:measure_waits"
    outcomes = run_scenarios(
        {name: (entry, 2, {"overrides": overrides}) for name, overrides in PIPELINES.items()}, timeout_seconds=380
    )
    for name in PIPELINES:
        ranks = of_ranks(outcomes, name)
        for waits, num_messages, seconds in ranks:
            assert waits == [num_messages] * 3 and num_messages > 0
            assert seconds == ranks[0][2] and all(each > 0 for of_iteration in seconds for each in of_iteration)
        assert max(first for first, _ in ranks[0][2]) > 2 * SLOW_SECONDS
        assert max(first - last for first, last in ranks[0][2]) > SLOW_SECONDS
