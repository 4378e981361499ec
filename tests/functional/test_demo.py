"""Tests the README's demo: a rank whose process id the terminal shows is killed, and no iteration is lost."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.testing.jobs import REPOSITORY
from tests.unit.test_documented_commands import commands_of

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(240)]

NUM_ITERATIONS = 40
KILL_AFTER_ITERATION = 5
KILLED_RANK = 2


def demo() -> list[str]:
    """Return the arguments of the command in README.md."""
    (words,) = [c.words for c in commands_of(REPOSITORY / "README.md") if "experiment=survive_a_kill" in c.words]
    assert words[:2] == ("python", "pretrain_moe.py")
    return list(words[2:])


def test_a_killed_rank_costs_no_iteration(tmp_path: Path) -> None:
    here = [
        f"training.train_iterations={NUM_ITERATIONS}",
        f"run.dir={tmp_path}",
        "run.name=demo",
        "telemetry.wandb=disabled",
    ]
    command = [sys.executable, "pretrain_moe.py", *demo(), *here, f"data.cache_dir={tmp_path / 'cache'}"]
    lines: list[str] = []
    killed = None
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if killed is None and f"iteration {KILL_AFTER_ITERATION:>2}/" in line:
                named = re.search(r"process ids by rank: ([\d ]+)$", "".join(lines), re.MULTILINE)
                assert named is not None, "".join(lines)
                killed = int(named.group(1).split()[KILLED_RANK])
                os.kill(killed, signal.SIGKILL)
    text = "".join(lines)
    assert job.returncode == 0, text
    assert killed is not None and f"rank {KILLED_RANK} on node {KILLED_RANK} died in iteration" in text
    assert re.search(r"3 ranks on nodes \[0, 1, 3\] continue after iteration \d+", text), text
    records = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == list(range(1, NUM_ITERATIONS + 1))
