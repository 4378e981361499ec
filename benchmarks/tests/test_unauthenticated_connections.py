"""The claim ``unauthenticated-connections``: an operator's call that a crowd pushes out is made again, in time."""

from pathlib import Path

import pytest

from benchmarks import unauthenticated_connections
from megatron_ft.control.admin import JobNotRunning
from megatron_ft.framing import Message


def test_a_status_call_is_made_again_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [JobNotRunning("closed before it has shown the token")] * 2

    def ask(_: Path) -> Message:
        if refusals:
            raise refusals.pop()
        return {"phase": "running"}

    assert unauthenticated_connections.status_in_time(Path(), ask) == ({"phase": "running"}, 2)
    monkeypatch.setattr(unauthenticated_connections, "LIMIT_SECONDS", -1.0)
    refusals.append(JobNotRunning("no answer"))
    with pytest.raises(JobNotRunning):
        unauthenticated_connections.status_in_time(Path(), ask)
