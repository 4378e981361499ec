"""Tests ``python -m tools.doctor``: its output, its exit codes, and that it starts and imports nothing."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_ft.testing.jobs import REPOSITORY

JOB = ("launch.num_nodes=2", "snapshot=sparse_window", "snapshot.num_peer_copies=1", "training.device=cpu")
SUBJECTS = {"versions", "ports", "memory", "limits", "fsync", "disk", "clocks", "devices"}


def doctor(*arguments: str, python: tuple[str, ...] = (), shell: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *python, "-m", "tools.doctor", *arguments]
    if shell:
        command = ["bash", "-c", f'{shell}; exec "$@"', "bash", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY)


def findings(done: "subprocess.CompletedProcess[str]", level: str) -> list[dict[str, Any]]:
    return [each for each in json.loads(done.stdout)["findings"] if each["level"] == level]


def test_a_machine_that_has_all(tmp_path: Path) -> None:
    done = doctor(*JOB, f"run.dir={tmp_path}/runs", python=("-X", "importtime"))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {line[9:].split()[0] for line in done.stdout.splitlines()[:-1] if line[0] != " "} == SUBJECTS
    assert done.stdout.splitlines()[-1].startswith("0 errors, ")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"torch", "megatron", "wandb", "transformer_engine"}
    assert list(tmp_path.iterdir()) == []


def test_fp8_jobs_are_told_the_backends_of_their_update(tmp_path: Path) -> None:
    done = doctor(*JOB, f"run.dir={tmp_path}/runs", "precision=fp8_blockwise", "--json")
    (found,) = [each["what"] for each in findings(done, "info") if each["check"] == "update"]
    assert found.startswith(
        ("backends of scaled AdamW on cpu: torch and cpp (compiled by ", "the only backend of scaled AdamW")
    )


def test_what_would_break_the_job_is_named_with_its_mend(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        overrides = (*JOB, f"run.dir={tmp_path}", f"launch.master_port={port}", "--json")
        done = doctor(*overrides, shell="ulimit -n 100; ulimit -f 4096")
    assert done.returncode == 2, done.stderr
    starts = (f"launch.master_port={port}: cannot listen", "ulimit -f allows 4.0 MiB", "limit of open files: 100; ")
    found = findings(done, "error")
    assert sorted(each["what"].startswith(starts) for each in found) == [True, True, True], found
    assert {each["check"] for each in found} == {"ports", "limits"}
    assert all(each["fix"] for each in found)
    assert json.loads(done.stdout)["exit_code"] == 2


def test_warnings_count_when_asked(tmp_path: Path) -> None:
    arguments = (*JOB, f"run.dir={tmp_path}", "launch.ranks_per_node=4", "training.global_batch_size=64")
    shell = "ulimit -n 300"
    assert doctor(*arguments, shell=shell).returncode == 0
    strict = doctor(*arguments, "--strict", "--json", shell=shell)
    assert strict.returncode == 1, strict.stdout
    assert any("limit of open files: 300" in each["what"] for each in findings(strict, "warning"))


def test_a_job_that_is_refused_is_a_finding(tmp_path: Path) -> None:
    refused = doctor("launch.num_nodes=2", "snapshot=sparse_window", "snapshot.num_peer_copies=2", "--json")
    (finding,) = findings(refused, "error")
    assert (refused.returncode, finding["check"]) == (2, "configuration")
    assert finding["what"].startswith("snapshot.num_peer_copies=2: must be below")
    absent = doctor(f"data.train=[{tmp_path}/none]", "data.tokenizer=bytes", "--json")
    assert [each["check"] for each in findings(absent, "error")] in (["data"], ["configuration"]), absent.stdout


def test_without_its_packages_it_names_them(tmp_path: Path) -> None:
    """The command runs in a Python without any of the required packages."""
    command = [sys.executable, "-S", "-m", "tools.doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY)
    assert done.returncode == 2, done.stderr
    assert "hydra-core is not installed" in {each["what"] for each in findings(done, "error")}
