"""Tests the device of a job: given, detected, or either of both if the machine is not known."""

from dataclasses import replace

import pytest

from megatron_ft.config.job import LaunchConfig, RecoveryConfig
from megatron_ft.errors import ConfigError
from megatron_ft.planning.devices import (
    DeviceChoice,
    DeviceFacts,
    device_index,
    gpus_needed,
    node_on_host,
    other_device,
)

GPUS = DeviceFacts(has_driver=True, driver="580", num_gpus=8)
NONE = DeviceFacts(has_driver=False, driver="", num_gpus=0)
BOTH = {"cpu": "", "cuda": ""}
CPU_ONLY = {"cpu": "", "cuda": "training.device=cuda: must be cpu with recovery.min_nodes=3"}
CUDA_ONLY = {"cpu": "model.add_bias_linear=true: needs CUDA", "cuda": ""}


def choose(
    facts: DeviceFacts,
    refused: dict[str, str],
    *,
    requested: str = "auto",
    memory: int | None = None,
    elsewhere: bool = False,
) -> tuple[str, bool]:
    found = DeviceChoice.of(requested, facts, gpu_memory_bytes=memory, refused=refused, may_be_elsewhere=elsewhere)
    return found.device, found.is_certain


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (GPUS, 8),
        (NONE, 0),
        (replace(GPUS, has_driver=False), 0),
        (replace(GPUS, torch_has_cuda=False), 0),
        (replace(GPUS, visible=""), 0),
        (replace(GPUS, visible="-1"), 0),
        (replace(GPUS, visible="3,1"), 2),
        (replace(GPUS, visible="0,-1,2"), 1),
        (replace(GPUS, visible="GPU-8f0f"), 1),
        (replace(GPUS, num_gpus=1, visible="0,1"), 1),
    ],
)
def test_gpus_that_pytorch_would_find(facts: DeviceFacts, expected: int) -> None:
    assert facts.usable_gpus() == expected


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_gpu_here_decides_and_its_refusal_counts(elsewhere: bool) -> None:
    assert choose(GPUS, BOTH, elsewhere=elsewhere) == ("cuda", True)
    with pytest.raises(
        ConfigError, match=r"must be cpu with recovery\.min_nodes=3 \(training\.device=auto found 8 GPUs"
    ):
        choose(GPUS, CPU_ONLY, elsewhere=elsewhere)


def test_without_a_gpu_a_start_takes_the_cpu_or_is_refused() -> None:
    assert choose(NONE, BOTH) == ("cpu", True)
    assert choose(NONE, CPU_ONLY) == ("cpu", True)
    with pytest.raises(ConfigError, match=r"add_bias_linear=true: .* \(training\.device=auto found no GPU on this"):
        choose(NONE, CUDA_ONLY)
    with pytest.raises(
        ConfigError,
        match=r"training\.device=auto: finds no GPU; for CPU, set training\.device=cpu and limits\.gpu_memory_by",
    ):
        choose(NONE, BOTH, memory=80_000_000_000)


def test_a_plan_for_an_unknown_machine_names_both_answers() -> None:
    for refused, device in ((BOTH, "cpu"), (CPU_ONLY, "cpu"), (CUDA_ONLY, "cuda")):
        assert choose(NONE, refused, elsewhere=True) == (device, False)
    with pytest.raises(ConfigError):
        choose(NONE, {"cpu": "no", "cuda": "no"}, elsewhere=True)
    assert choose(NONE, BOTH, memory=80_000_000_000, elsewhere=True) == ("cuda", True)
    with pytest.raises(ConfigError, match=r"recovery\.min_nodes=3"):
        choose(NONE, CPU_ONLY, memory=80_000_000_000, elsewhere=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_named_device_is_taken_and_its_refusal_is_raised(device: str) -> None:
    for facts in (NONE, GPUS):
        assert choose(facts, {device: ""}, requested=device) == (device, True)
        with pytest.raises(ConfigError, match="so it is"):
            choose(facts, {device: "so it is"}, requested=device)


def test_the_other_device_is_described_where_ranks_may_find_it() -> None:
    any_kind, kept = RecoveryConfig(), RecoveryConfig(keep_layout=True)
    accepted = "on cuda this job would also be accepted"
    for refused, recovery, expected in (
        (CPU_ONLY, any_kind, "on cuda this job would be refused"),
        (BOTH, any_kind, f"{accepted}, with the same cost of losses"),
        (BOTH, kept, f"{accepted}, but after a loss all ranks would start again (recovery.keep_processes=null)"),
        (BOTH, replace(kept, keep_processes=False), f"{accepted}, with the same cost of losses"),
    ):
        choice = DeviceChoice.of("auto", NONE, gpu_memory_bytes=None, refused=refused, may_be_elsewhere=True)
        assert other_device(choice, refused, recovery).startswith(expected)
    known = DeviceChoice.of("auto", NONE, gpu_memory_bytes=None, refused=CPU_ONLY, may_be_elsewhere=False)
    assert other_device(known, CPU_ONLY, any_kind) == ""


@pytest.mark.parametrize(
    ("mode", "launcher", "expected"),
    [("local", "local", 5), ("local", "srun", 0), ("local", "none", 0), ("torchrun", "local", 0), ("srun", "local", 0)],
)
def test_nodes_share_a_machine_only_where_the_command_starts_them_on_its_own(
    mode: str, launcher: str, expected: int
) -> None:
    assert node_on_host(LaunchConfig(mode=mode, node_launcher=launcher, num_nodes=8), 5) == expected


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 8), (8, 1), (2, 4), (4, 2)])
def test_nodes_of_one_machine_share_out_its_gpus(num_nodes: int, ranks_per_node: int) -> None:
    taken = [
        device_index(node_on_host=node, local_rank=rank, ranks_per_node=ranks_per_node, num_visible=8)
        for node in range(num_nodes)
        for rank in range(ranks_per_node)
    ]
    assert taken == list(range(8))


def test_a_rank_takes_the_one_gpu_that_its_launcher_has_bound_it_to() -> None:
    """With ``srun --gpus-per-task=1``, each process sees one GPU, with the number 0."""
    assert device_index(node_on_host=0, local_rank=3, ranks_per_node=4, num_visible=1) == 0


def test_ranks_share_gpus_where_that_is_asked_for() -> None:
    taken = [
        device_index(node_on_host=node, local_rank=rank, ranks_per_node=2, num_visible=2, ranks_per_gpu=3)
        for node in range(3)
        for rank in range(2)
    ]
    assert taken == [0, 0, 0, 1, 1, 1]
    assert [gpus_needed(num_ranks, 3) for num_ranks in (1, 3, 4, 6)] == [1, 1, 2, 2]


@pytest.mark.parametrize("num_visible", [0, 2, 3])
def test_a_rank_without_a_gpu_is_an_error(num_visible: int) -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.ranks_per_gpu=1: must be larger.*process 3 of this machine needs GPU 3"
    ):
        device_index(node_on_host=3, local_rank=0, ranks_per_node=1, num_visible=num_visible)
