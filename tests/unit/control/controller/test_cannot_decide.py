"""Tests that a controller which cannot write its decisions ends the job in the same way as any other end."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.control.controller import server
from megatron_ft.control.controller.controller import Controller
from megatron_ft.control.controller.journal import EssentialWrites, Journal
from megatron_ft.control.membership.events import StopRequested
from megatron_ft.control.membership.state import Outcome
from megatron_ft.control.report import JobResult
from megatron_ft.control.rpc import RpcClient
from tests.unit.control.controller.test_controller import POLICY, TOKEN, launch_spec

COMING = replace(POLICY, starts_nodes=False)
"""Policy of a job whose nodes start by themselves, so no launcher observes or ends their processes."""


class Job:
    """Controller whose journal is in a folder that can be deleted."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.result: JobResult | None = None
        writes = EssentialWrites(run_dir, lambda _: None, lambda _: None)
        self.controller = Controller(
            COMING,
            interface="127.0.0.1",
            token=TOKEN,
            launch_spec=launch_spec,
            record_decision=lambda _: None,
            journal=Journal(run_dir / "journal.jsonl", writes.do),
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.client = RpcClient(self.controller.address, "Controller", token=TOKEN)

    def _run(self) -> None:
        self.result = self.controller.run(lambda *_: None, lambda _: None)

    def call(self, method: str, **body: Any) -> dict[str, Any]:
        return self.client.call(method, body, timeout_seconds=20, wait_for_peer=True)

    def join(self) -> None:
        """Let both nodes register and fetch the order to start."""
        for node in (0, 1):
            self.call("join", node=node, process_id=7)
        for node in (0, 1):
            assert self.last_order(node, after=0)["op"] == "start"

    def last_order(self, node: int, *, after: int) -> dict[str, Any]:
        orders = self.call("poll", node=node, session=0, after=after, wait_seconds=20)["orders"]
        return dict(orders[-1])

    def close(self) -> None:
        self.client.close()
        self.controller.close()

    def ends_once_every_node_knows(self, *, after: int) -> None:
        assert self.last_order(0, after=after)["op"] == "end"
        self.thread.join(timeout=0.3)
        assert self.thread.is_alive(), "node 1 does not know of the end yet"
        assert self.last_order(1, after=after)["op"] == "end"
        self.thread.join(timeout=20)
        assert self.result is not None and self.result.outcome is Outcome.FAILED
        assert "was deleted or moved away" in self.result.reason


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(server, "_LAST_ORDER_SECONDS", 60.0)
    job = Job(tmp_path / "run")
    yield job
    job.close()


def test_nodes_that_come_by_themselves_fetch_the_end_before_the_controller_goes(job: Job) -> None:
    job.thread.start()
    job.join()
    shutil.rmtree(job.run_dir)
    job.controller.post(StopRequested())
    job.ends_once_every_node_knows(after=1)


def test_a_controller_that_takes_over_and_cannot_write_ends_the_job_too(job: Job) -> None:
    job.thread.start()
    job.join()
    path = job.run_dir / "journal.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"order"' not in line))
    following = Job(job.run_dir)
    shutil.rmtree(job.run_dir)
    following.thread.start()
    following.ends_once_every_node_knows(after=0)
    following.close()
