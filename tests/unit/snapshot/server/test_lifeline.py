"""Tests how a snapshot server outlives its agent, and which agents can take it over."""

import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.framing import FrameReader, send
from megatron_ft.snapshot.server import client as words
from megatron_ft.testing.snapshot_servers import (
    TOKEN,
    WAIT_SECONDS,
    Cluster,
    Node,
    cluster,
    content,
    fetch,
    find,
    wait_until,
    window,
)

NEXT_TOKEN = "n" * 64
SAME = {"run_id": "a-run", "fingerprint": "f", "interface": "127.0.0.1"}


class Agent:
    """Connection of an agent that takes a server over."""

    def __init__(self, node: Node, **changes: object) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_SECONDS)
        self.sock.connect(node.socket_path)
        self.answer = self.ask(
            {"op": "adopt", "token": TOKEN, "new_token": NEXT_TOKEN, "seconds": 100, **SAME, **changes}
        )

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        send(self.sock, message)
        (answer,), _ = FrameReader(self.sock).pump()
        return answer


def begin(nodes: Cluster, folder: Path, seconds: int = 100) -> Node:
    """Start a server with one complete window."""
    record = folder / "record.json"
    record.touch()
    node = nodes.start(0, outlive={"seconds": seconds, "record_path": str(record), **SAME})
    rank = nodes.client(0, node=0, peer_nodes=[])
    arena = rank.allocate(8192)
    window(rank, arena, 0, 0, 10)
    wait_until(lambda: arena.status(words.REPLICATED_START) == 10, "hashes")
    rank.committed(10)
    rank.problems()
    return node


def hang_up(node: Node) -> None:
    """Close the standard input, as the end of the agent does."""
    assert node.process.stdin is not None
    node.process.stdin.close()


def test_the_next_job_gets_the_windows_with_its_token_and_ends_the_server(tmp_path: Path) -> None:
    with cluster(0) as nodes:
        node = begin(nodes, tmp_path)
        hang_up(node)
        first = Agent(node)
        assert first.answer == {"op": "adopted"}
        with pytest.raises(words.KeeperRefused, match="wrong or missing token"):
            nodes.client(0, node=0, peer_nodes=[])
        again = nodes.client(0, node=0, peer_nodes=[], token=NEXT_TOKEN, generation=1_000_001)
        assert find(again.inventory(0), start_iteration=10, committed=True, complete=True)
        assert fetch(again, 0, 10, node=0) == [content(0, 10, 4096), content(0, 11, 4096)]
        first.sock.close()
        # The token of the job that took the server over is needed to take it over again.
        assert "wrong or missing token" in Agent(node).answer["reason"]
        second = Agent(node, token=NEXT_TOKEN, new_token=TOKEN)
        assert second.ask({"op": "end", "reason": "the job has finished"}) == {"op": "ok"}
        assert node.process.wait(WAIT_SECONDS) == 0
        assert not Path(node.socket_path).exists() and not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("difference", [{"run_id": "other"}, {"fingerprint": "g"}, {"interface": "127.0.0.2"}])
def test_a_job_that_cannot_use_the_windows_ends_the_server(difference: dict[str, str], tmp_path: Path) -> None:
    with cluster(0) as nodes:
        node = begin(nodes, tmp_path)
        (name,) = difference
        assert Agent(node, **difference).answer["reason"].startswith(f"{name}={difference[name]}: must be {SAME[name]}")
        assert node.process.wait(WAIT_SECONDS) == 0


@pytest.mark.parametrize("wrong", [{"token": "w" * 64}, {"token": None}, {"new_token": "short"}])
def test_wrong_tokens_are_refused_and_change_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    with cluster(0) as nodes:
        node = begin(nodes, tmp_path, seconds=1)
        assert "token" in Agent(node, **wrong).answer["reason"]
        assert find(nodes.client(0, node=0, peer_nodes=[]).inventory(0), start_iteration=10)
        hang_up(node)
        assert node.process.wait(WAIT_SECONDS) == 0, "its time is over"


def test_the_time_is_that_of_the_job_that_took_the_server_over(tmp_path: Path) -> None:
    with cluster(0) as nodes:
        node = begin(nodes, tmp_path)
        hang_up(node)
        began = time.monotonic()
        Agent(node, seconds=1).sock.close()
        assert node.process.wait(WAIT_SECONDS) == 0
        assert time.monotonic() - began >= 1


def test_sigterm_ends_a_server_that_waits_and_nothing_is_left(tmp_path: Path) -> None:
    with cluster(0) as nodes:
        node = begin(nodes, tmp_path)
        hang_up(node)
        assert Agent(node).answer == {"op": "adopted"}, "it waits for the next job"
        node.process.terminate()
        assert node.process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
        assert not Path(node.socket_path).exists() and not (tmp_path / "record.json").exists()


def test_a_server_without_windows_ends_with_its_agent(tmp_path: Path) -> None:
    with cluster(0) as nodes:
        node = nodes.start(0, outlive={"seconds": 100, "record_path": str(tmp_path / "record.json"), **SAME})
        hang_up(node)
        assert node.process.wait(WAIT_SECONDS) == 0


def test_a_server_that_ends_with_its_agent_cannot_be_taken_over() -> None:
    with cluster(1) as nodes:
        assert "ends when its agent ends" in Agent(nodes.nodes[0]).answer["reason"]
        assert nodes.client(0, node=0, peer_nodes=[]).inventory(0) == []
