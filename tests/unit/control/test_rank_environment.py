"""Tests that the agent starts ranks on CUDA with the variables that they need, unless these are already set."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.serialize import from_dict, to_dict
from megatron_ft.control.node.agent import _Agent
from megatron_ft.framing import FrameReader


def started(device: str, folder: Path) -> dict[str, str]:
    """Return the environment of process 5 of a job on ``device`` in which two ranks share a GPU."""
    (folder / "logs").mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        agent: Any = _Agent.__new__(_Agent)
        agent._ranks = SimpleNamespace(expect=lambda *args, **kwargs: None)
        agent._socket_path = folder / "agent.sock"
        agent._forkserver = SimpleNamespace(sock=ours)
        config = to_dict(from_dict({"training": {"device": device}, "launch": {"ranks_per_gpu": 2}}))
        agent._spawn(5, {"run_dir": str(folder), "start": 0, "generation": 0, "config": config})
        reader = FrameReader(theirs)
        (message,), _ = reader.pump()
        environment: dict[str, str] = message["spec"]["environment"]
        return environment


def test_ranks_on_cuda_find_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_ALGO", "NCCL_HOSTID", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    found = started("cuda", tmp_path)
    assert (found["NCCL_ALGO"], found["NCCL_HOSTID"], found["CUBLAS_WORKSPACE_CONFIG"]) == ("Ring", "rank-5", ":4096:8")
    assert found["NCCL_PROTO"] == "LL", "the user's own"


def test_ranks_on_a_cpu_find_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in started("cpu", tmp_path)
