"""Tests that a rank abandons an operation whose peer was killed in the middle of a payload, keeps its process, and
exits at once."""

import json
import subprocess
import sys
from typing import Any

import pytest

from megatron_ft.testing.engines import REPOSITORY
from tests.helpers.cut_payloads import FORGOTTEN, GROUP_TIMEOUT_SECONDS, OPERATIONS

IN_TIME_SECONDS = GROUP_TIMEOUT_SECONDS / 3
"""Limit far below the timeout of the group. A rank that cannot abandon the operation waits for this timeout."""

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def survivors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the survivor of each operation observed."""
    outcome = tmp_path_factory.mktemp("cut") / "outcome.json"
    command = [sys.executable, "-m", "tests.helpers.cut_payloads", str(outcome)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=170)
    return json.loads(outcome.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_survivor_leaves_the_operation_and_its_groups(survivors: dict[str, Any], name: str) -> None:
    seen = survivors[name]
    assert seen["error"] is not None, "the operation cannot have ended well"
    assert seen["wait_seconds"] < IN_TIME_SECONDS
    assert seen["release_seconds"] < IN_TIME_SECONDS
    assert seen["next_backward_seconds"] < IN_TIME_SECONDS, "it destroyed a group whose operation is blocked"
    assert seen["exit_seconds"] < IN_TIME_SECONDS
    assert seen["exit_code"] == 0


@pytest.mark.parametrize("name", FORGOTTEN)
def test_an_operation_that_gloo_forgets_is_abandoned(survivors: dict[str, Any], name: str) -> None:
    seen = survivors[name]
    assert seen["error"].startswith("WaitAbandoned: ")
    assert "reason of the shutdown: rank 1 was killed" in seen["error"]
    assert seen["num_abandoned"] == 1


def test_the_group_of_an_abandoned_collective_is_held(survivors: dict[str, Any]) -> None:
    """The destructor of the group would wait for the blocked thread."""
    assert survivors["broadcast"]["num_held"] == 1
    assert survivors["backward_pass"]["num_held"] == 1
