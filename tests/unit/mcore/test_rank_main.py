"""Tests the first steps of a rank (its device, then code that uses it), and what is imported before ranks are
forked."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.control.node.fork_server import SINGLE_THREAD_ENVIRONMENT
from megatron_ft.control.node.worker_client import InProcessClient, RankContext, StopFlag
from megatron_ft.errors import RankLost
from megatron_ft.mcore import rank_main
from megatron_ft.runtime.dispatch import extension
from megatron_ft.testing.engines import micro_config


class Stop(Exception):
    """Ends a rank at a chosen step."""


@pytest.mark.parametrize(("num_visible", "expected"), [(8, 5), (1, 0)])
def test_a_rank_takes_its_gpu_before_anything_looks_for_software(
    num_visible: int, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rank is on the third of four nodes of one machine, with two ranks each."""
    taken: list[int] = []

    def install(config: Any) -> None:
        raise Stop

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(rank_main, "install", install)
    config = micro_config({"training.device": "cuda", "launch.num_nodes": 4, "launch.ranks_per_node": 2}, world_size=8)
    context = RankContext(
        rank=5,
        world_size=8,
        local_rank=1,
        node=2,
        num_nodes=4,
        generation=0,
        master_addr="127.0.0.1",
        master_port=1,
        run_dir=tmp_path,
        resume_from=None,
        worker=InProcessClient(lambda record: None, stop=StopFlag()),
    )
    with pytest.raises(Stop):
        rank_main.run_rank(config, context)
    assert taken == [expected]


def test_a_joining_rank_without_a_compiler_is_refused_before_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "missing-c++")
    algorithm = {"_target_": "megatron_ft.planning.placement.spread.Spread"}
    config = micro_config(
        {"placement.algorithm": algorithm, "placement.num_slots_per_rank": 4, "placement.min_replicas": 1}, world_size=2
    )
    context = RankContext(
        rank=2,
        world_size=3,
        local_rank=0,
        node=2,
        num_nodes=3,
        generation=0,
        master_addr="127.0.0.1",
        master_port=1,
        run_dir=tmp_path,
        resume_from=None,
        worker=InProcessClient(lambda record: None, stop=StopFlag()),
        is_joining=True,
    )
    from megatron_ft.mcore.moe import placement_manager

    extension.load.cache_clear()
    placement_manager._opened.cache_clear()
    with pytest.raises(
        RankLost, match=r"^this node cannot join: placement\.dispatch_backend=cpp: .*tried missing-c\+\+"
    ):
        rank_main.run_rank(config, context)


_WARM = """
import os, sys
import torch

asked = []

def stand_in(name, answer):
    def ask(*args, **kwargs):
        asked.append(name)
        return answer
    setattr(torch.cuda, name, ask)

for name, answer in (("is_available", True), ("device_count", 1), ("_lazy_init", None), ("current_device", 0),
                     ("get_device_properties", None), ("get_device_capability", (9, 0))):
    stand_in(name, answer)

from megatron_ft.control.node.fork_server import preload

preload([sys.argv[1]])
assert "megatron_ft.mcore.recovery.coordinator" in sys.modules and "megatron.core.parallel_state" in sys.modules
assert asked == [], asked
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("function", ["warm_cuda", "warm"])
def test_importing_ahead_starts_neither_cuda_nor_a_thread(function: str) -> None:
    """Even asking for the number of devices makes CUDA unusable in processes that are forked afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", _WARM, f"megatron_ft.mcore.rank_main:{function}"],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        env={**os.environ, **SINGLE_THREAD_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr


def test_a_module_that_this_version_of_torch_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_main, "_NEEDED_LATER", ("torch.profiler._not_in_this_version", "encodings.idna"))
    rank_main._import_needed_later()
    monkeypatch.setattr(rank_main, "_NEEDED_LATER", ("megatron_ft.not_there",))
    with pytest.raises(ModuleNotFoundError, match="megatron_ft.not_there"):
        rank_main._import_needed_later()
