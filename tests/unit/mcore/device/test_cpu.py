"""Tests Megatron on a CPU: its files are unchanged, and ``torch.cuda`` is replaced."""

import base64
import hashlib
import importlib.metadata
from pathlib import PurePosixPath

import pytest
import torch

from megatron_ft.errors import SoftwareError
from megatron_ft.mcore.device import cpu


def test_megatrons_files_are_as_installed() -> None:
    """Every source file of the wheel has the hash that the wheel records."""
    files = importlib.metadata.distribution("megatron-core").files or []
    sources = [file for file in files if PurePosixPath(file).match("megatron/core/**/*.py") or file.suffix == ".py"]
    sources = [file for file in sources if file.parts[:2] == ("megatron", "core")]
    assert len(sources) > 200
    changed = []
    for file in sources:
        assert file.hash is not None and file.hash.mode == "sha256", file
        digest = hashlib.sha256(file.locate().read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(str(file))
    assert changed == []


def test_a_second_install_changes_nothing() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    before = (torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda, moe_utils.torch)
    cpu.install()
    assert (torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda, moe_utils.torch) == before


def test_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(cpu.common, "num_visible_gpus", lambda: 1)
    with pytest.raises(SoftwareError, match=r"training\.device=cpu: this process must not see a GPU"):
        cpu.install()


def test_cuda_questions_are_answered_for_the_cpu() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.float64).dtype is torch.float64
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.cuda.device_count() == 1
    assert not torch.cuda.is_available()
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
    assert event.query()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()


def test_cuda_random_state_is_the_cpus() -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


def test_only_megatron_sees_another_torch() -> None:
    """``device="cuda"`` works in Megatron's modules, and is an error everywhere else."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    for make in ("zeros", "ones", "empty"):
        assert getattr(moe_utils.torch, make)(2, device="cuda").device.type == "cpu"
    assert moe_utils.torch.tensor([1], device="cuda:0").device.type == "cpu"
    assert moe_utils.torch.nn is torch.nn
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
