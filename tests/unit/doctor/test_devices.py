"""CUDA devices: each finding appears with its cause, and goes with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.doctor.devices import DeviceFacts, check_devices, observe_devices
from tests.helpers.machines import DEVICES, NEEDS, judged

CUDA = replace(NEEDS, device="cuda", device_is_asked_for=True)
CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "no driver": ({"has_driver": False, "num_gpus": 0}, "no CUDA device, and training.device=cuda"),
    "a driver without GPUs": ({"num_gpus": 0}, "0 GPUs"),
    "too few": ({"num_gpus": 7}, "8 ranks here need one each"),
    "too few that are visible": ({"visible": "0,1"}, "2 of them by CUDA_VISIBLE_DEVICES=0,1"),
    "none that is visible": ({"visible": ""}, "0 of them"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_finding_appears_with_its_cause(cause: str) -> None:
    facts, what = CAUSES[cause]
    (finding,) = check_devices(replace(DEVICES, **facts), CUDA)
    assert (finding.level, what in finding.what) == ("error", True), finding
    assert finding.mend


def test_and_goes_without() -> None:
    assert judged(check_devices(DEVICES, CUDA)) == []
    assert judged(check_devices(replace(DEVICES, visible="0,1,2,3,4,5,6,7"), CUDA)) == []


def test_on_cpu_devices_are_told() -> None:
    (none,) = check_devices(DeviceFacts(has_driver=False, driver="", num_gpus=0), NEEDS)
    assert (none.level, none.what) == ("told", "no CUDA device; the job runs on CPU")


def test_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(version)
    assert observe_devices(None, tmp_path) == DeviceFacts(has_driver=True, driver="580.65.06", num_gpus=2)
    (tmp_path / "dev/nvidiactl").unlink()
    assert not observe_devices(None, tmp_path).has_driver
