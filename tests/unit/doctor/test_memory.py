"""Tests the checks of memory and limits: each finding appears with its cause and disappears without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.doctor.memory import MemoryFacts, _cgroup_limit
from tests.helpers.machines import GIB, MEMORY, NEEDS, judged

CUDA = {"device": "cuda"}


def limits(**changed: tuple[int | None, int | None]) -> dict[str, Any]:
    return {"limits": {**MEMORY.limits, **changed}}


CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "too little memory": ({"total_bytes": 15 * GIB, "available_bytes": 14 * GIB}, {}, "error", "need 16.0 GiB"),
    "a control group": ({"cgroup_limit_bytes": 8 * GIB}, {}, "error", "the control group"),
    "snapshot servers that would refuse": (
        {"available_bytes": 4 * GIB},
        {},
        "error",
        "too little for snapshot servers",
    ),
    "memory that others hold": ({"available_bytes": 12 * GIB}, {}, "warning", "12.0 GiB are free"),
    "a control group in use": (
        {"cgroup_limit_bytes": 20 * GIB, "cgroup_used_bytes": 10 * GIB},
        {},
        "warning",
        "10.0 GiB are free",
    ),
    "a limit on files": (limits(file_size=(GIB - 1, None)), {}, "error", "ulimit -f allows 1024.0 MiB"),
    "a limit on addresses": (limits(address_space=(GIB, GIB)), {}, "error", "ulimit -v allows 1.0 GiB"),
    "a limit on data": (limits(data=(GIB, None)), {}, "error", "ulimit -d"),
    "too few open files": (limits(open_files=(256, 256)), {}, "error", "needs at least 270"),
    "open files that may not do": (limits(open_files=(300, 4096)), {}, "warning", "may need 431"),
    "many peers": ({}, {"world_size": 512}, "error", "needs at least 1278"),
    "locked memory with InfiniBand": (limits(locked=(8 << 20, 8 << 20)), CUDA, "warning", "locked memory: 8.0 MiB"),
    "small shared memory": ({"shared_free_bytes": 64 << 20}, CUDA, "warning", "/dev/shm 64.0 MiB of 32.0 GiB"),
    "no shared memory": ({"shared_free_bytes": None, "shared_total_bytes": None}, CUDA, "warning", "/dev/shm missing"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_finding_appears_with_its_cause(cause: str) -> None:
    facts, needs, level, what = CAUSES[cause]
    (finding,) = judged(replace(MEMORY, **facts).check(replace(NEEDS, **needs)))
    assert (finding.level, what in finding.what) == (level, True), finding
    assert finding.fix


FINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it should be": ({}, {}),
    "memory of servers that the job takes over": ({"available_bytes": 4 * GIB, "kept_bytes": 12 * GIB}, {}),
    "on CUDA": ({}, CUDA),
    "a wide control group": ({"cgroup_limit_bytes": 128 * GIB, "cgroup_used_bytes": 1}, {}),
    "small shared memory on CPU": ({"shared_free_bytes": 0}, {}),
    "locked memory without InfiniBand": ({**limits(locked=(64 << 10, None)), "has_infiniband": False}, CUDA),
    "one GPU of a machine": ({"shared_free_bytes": 0}, {**CUDA, "ranks_per_node": 1}),
    "limits that are wide": (limits(file_size=(GIB, None), open_files=(431, 431)), {}),
    "no limit on open files": (limits(open_files=(None, None)), {"world_size": 4096}),
}


@pytest.mark.parametrize("cause", FINE)
def test_and_goes_without(cause: str) -> None:
    facts, needs = FINE[cause]
    assert judged(replace(MEMORY, **facts).check(replace(NEEDS, **needs))) == []


def test_a_hard_limit_is_not_ours_to_raise() -> None:
    for hard, expected in ((512, "in the shell"), (300, "administrator")):
        facts = replace(MEMORY, **limits(open_files=(300, hard)))
        (finding,) = judged(facts.check(NEEDS))
        assert expected in finding.fix


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_narrowest_group_of_version_2_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
            "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job_7/memory.max": "1000\n",
            "sys/fs/cgroup/slurm/job_7/memory.current": "500\n",
            "sys/fs/cgroup/slurm/job_7/memory.stat": "anon 200\ninactive_file 100\n",
            "sys/fs/cgroup/slurm/memory.max": "9000\n",
            "sys/fs/cgroup/slurm/memory.current": "8900\n",
            "sys/fs/cgroup/slurm/memory.stat": "inactive_file 0\n",
        },
    )
    assert _cgroup_limit(tmp_path) == (9000, 8900), "100 free there, 600 in the job's own"


def test_a_container_of_version_1_sees_its_group_at_the_top(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    files = {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n"}
    write(tmp_path, files | {f"{top}/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"})
    write(tmp_path, {f"{top}/memory.usage_in_bytes": "700", f"{top}/memory.stat": "total_inactive_file 50\n"})
    assert _cgroup_limit(tmp_path) is None
    write(tmp_path, {f"{top}/memory.limit_in_bytes": "4096\n"})
    assert _cgroup_limit(tmp_path) == (4096, 650)


def test_this_machine_has_memory() -> None:
    facts = MemoryFacts.observe()
    assert 0 < facts.available_bytes <= facts.total_bytes
    assert set(facts.limits) == set(MEMORY.limits)
