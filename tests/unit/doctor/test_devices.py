"""Tests the checks of CUDA devices: each finding appears with its cause and disappears without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.doctor.devices import (
    _built_with_cuda,
    _smallest_memory,
    check_devices,
    check_environment,
    observe_devices,
)
from megatron_ft.planning.devices import DeviceFacts
from tests.helpers.machines import DEVICES, GIB, NEEDS, judged

CUDA = replace(NEEDS, device="cuda", device_reason="training.device=cuda", device_bytes=60 * GIB)
NO_GPU = DeviceFacts(has_driver=False, driver="", num_gpus=0)
CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "no driver": ({"has_driver": False, "num_gpus": 0}, "no CUDA device, but the job needs GPUs: training.device=cuda"),
    "a driver without GPUs": ({"num_gpus": 0}, "0 GPUs"),
    "PyTorch without CUDA": ({"torch_has_cuda": False}, "PyTorch is built without CUDA"),
    "too little memory": ({"gpu_memory_bytes": 40 * GIB}, "needs up to 60.0 GiB of GPU memory"),
    "too few": ({"num_gpus": 7}, "8 ranks on this machine must have a GPU each"),
    "too few that are visible": ({"visible": "0,1"}, "2 of the GPUs visible by CUDA_VISIBLE_DEVICES=0,1"),
    "none that is visible": ({"visible": ""}, "0 of the GPUs visible"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_finding_appears_with_its_cause(cause: str) -> None:
    facts, what = CAUSES[cause]
    (finding,) = judged(check_devices(replace(DEVICES, **facts), CUDA))
    assert (finding.level, what in finding.what) == ("error", True), finding
    assert finding.fix


def test_ranks_that_share_gpus_need_fewer() -> None:
    few = replace(DEVICES, num_gpus=2)
    assert judged(check_devices(few, replace(CUDA, ranks_per_gpu=4))) == []
    (finding,) = judged(check_devices(few, replace(CUDA, ranks_per_gpu=3)))
    assert "8 ranks on this machine must have 3 GPUs, with 3 ranks on each" in finding.what


def test_the_environment_of_ranks_is_printed_and_what_is_set_otherwise_is_a_warning() -> None:
    needs = replace(CUDA, environment={"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"})
    assert check_environment({}, NEEDS) == []
    (fact,) = check_environment({"NCCL_PROTO": "Simple"}, needs)
    what = "the job sets these variables for its ranks, if they are not set: NCCL_ALGO=Ring NCCL_PROTO=Simple"
    assert (fact.level, fact.what) == ("info", what)
    (finding,) = judged(check_environment({"NCCL_ALGO": "Tree"}, needs))
    assert finding.level == "warning" and finding.what.startswith("NCCL_ALGO=Tree is set; this job would set")


def test_and_goes_without() -> None:
    assert judged(check_devices(DEVICES, CUDA)) == []
    assert judged(check_devices(replace(DEVICES, visible="0,1,2,3,4,5,6,7"), CUDA)) == []


def test_memory_of_gpus_that_nobody_knows_is_a_warning() -> None:
    unknown = replace(DEVICES, gpu_memory_bytes=None)
    (finding,) = judged(check_devices(unknown, CUDA))
    assert finding.level == "warning" and "the memory of the GPUs is unknown" in finding.what
    assert judged(check_devices(unknown, replace(CUDA, gpu_memory_bytes=80 * GIB))) == [], "the plan was compared"


@pytest.mark.parametrize(
    ("elsewhere", "refused", "level"),
    [(False, False, "info"), (False, True, "info"), (True, False, "info"), (True, True, "warning")],
)
def test_what_the_nodes_of_the_job_would_say_is_reported(elsewhere: bool, refused: bool, level: str) -> None:
    needs = replace(NEEDS, other_device="on cuda: so", is_refused_there=refused, starts_elsewhere=elsewhere)
    assert [(each.level, each.what) for each in check_devices(NO_GPU, needs)][1:] == [(level, "on cuda: so")]


def test_on_cpu_devices_are_reported() -> None:
    (none,) = check_devices(NO_GPU, NEEDS)
    assert (none.level, none.what) == ("info", "no CUDA device; the job runs on CPU")


def test_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(version)
    seen = observe_devices(None, tmp_path)
    assert (seen.has_driver, seen.driver, seen.num_gpus, seen.gpu_memory_bytes) == (True, "580.65.06", 2, None)
    (tmp_path / "dev/nvidiactl").unlink()
    assert not observe_devices(None, tmp_path).has_driver


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", True),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda = None\n", False),
        ("cuda = '11.8'\n", True),
        ("__version__ = '3.0'\n", True),
    ],
)
def test_the_build_of_pytorch_is_read_from_its_version_file(text: str, expected: bool) -> None:
    assert _built_with_cuda(text) is expected


def test_the_version_file_of_the_installed_pytorch_is_understood() -> None:
    import torch

    assert observe_devices(None).torch_has_cuda == (torch.version.cuda is not None)


def test_the_answer_of_nvidia_smi() -> None:
    assert _smallest_memory("143771\n81559\n") == 81559 << 20
    assert _smallest_memory("No devices were found\n") is None
    assert _smallest_memory("[N/A]\n") is None
