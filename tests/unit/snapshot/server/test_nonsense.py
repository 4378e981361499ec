"""Tests malformed messages of a sender with the token: a snapshot server refuses them and continues."""

import json
import os
import random
import socket
import subprocess
import sys
from typing import Any

import pytest

from megatron_ft.errors import ControlError
from megatron_ft.snapshot.server import client as words
from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.snapshot.server.wire import connect
from megatron_ft.testing.snapshot_servers import PAGE, Cluster, cluster, slice_of, wait_replicated, window
from tests.unit.snapshot.server.test_refusals import GREETING, announcement

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2, 3, 4096, 2**31, 2**63, 2**200, 1.5, float("nan"), float("inf")),
    *("", "a", "\0", "\ud800", "../..", [], [[]], [1], {}, {"a": {}}, [["x"] * 8], [[None] * 9], "9" * 6000),
]


def mutated(rng: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with some fields replaced, removed or added, including nested ones."""
    changed = dict(message)
    for name in rng.sample(sorted(changed), min(len(changed), rng.randint(1, 2))):
        value = changed[name]
        if isinstance(value, dict) and value and rng.random() < 0.7:
            changed[name] = mutated(rng, value)
        elif isinstance(value, list) and value and isinstance(value[0], list) and rng.random() < 0.7:
            row = list(value[0])
            row[rng.randrange(len(row))] = rng.choice(ODD)
            changed[name] = [row, *value[1:]]
        elif rng.random() < 0.1:
            del changed[name]
        else:
            changed[name] = rng.choice(ODD)
    return changed


def requests() -> list[dict[str, Any]]:
    """Return one valid request of each kind."""
    record = json.loads(json.dumps(slice_of(10).to_json()))
    return [
        {"op": "allocate", "window_bytes": 2 * PAGE},
        {"op": "begin", "buffer": 0, "start_iteration": 10, "num_slices": 2, "plan": {}},
        {"op": "captured", "buffer": 0, "slice": 0, "record": record},
        {"op": "committed", "start_iteration": 10},
        {"op": "keep", "start_iteration": 10, "generation": 0},
        {"op": "abandon", "start_iteration": 10},
        {"op": "persist", "start_iteration": 10},
        {"op": "problems"},
        {"op": "inventory", "rank": 0, "ask_peers": False},
        {"op": "fetch", "rank": 0, "start_iteration": 10, "node": 0, "generation": 1},
    ]


def check_sound(nodes: Cluster) -> None:
    """Check that the snapshot server still works."""
    assert nodes.nodes[0].process.poll() is None, "the keeper has ended"
    rank = nodes.client(1, node=0, peer_nodes=[])
    arena = rank.allocate(2 * PAGE)
    window(rank, arena, 1, 0, 10)
    wait_replicated(arena, 10)
    assert arena.status(words.NUM_PROBLEMS) == 0


@pytest.mark.parametrize("seed", range(3))
def test_nonsense_from_a_rank(seed: int) -> None:
    rng = random.Random(seed)
    with cluster(1, memory_limit_bytes=1 << 24) as nodes:
        for _ in range(60 if seed else 20):  # each of the first starts another keeper
            hello = nodes.hello(0, node=0, peer_nodes=[])
            try:
                rank = KeeperClient(nodes.nodes[0].socket_path, hello=mutated(rng, hello) if seed == 0 else hello)
                for _ in range(10):
                    sound = rng.choice(requests())
                    ask(rank, mutated(rng, sound) if rng.random() < 0.6 else sound)
            except ControlError:
                continue
            rank.close()
            if seed == 0 and nodes.nodes[0].process.poll() is None:
                nodes.stop()
                nodes.start(0, memory_limit_bytes=1 << 24)
        check_sound(nodes)


def ask(rank: KeeperClient, message: dict[str, Any]) -> None:
    """Send one request, and ignore its answer."""
    try:
        rank._call(message)
    except ControlError as error:
        if "lost" in str(error):
            raise
    while rank._reader.descriptors:
        os.close(rank._reader.descriptors.popleft())


@pytest.mark.parametrize("seed", range(3))
def test_nonsense_from_a_peer(seed: int) -> None:
    rng = random.Random(seed)
    sound = [
        announcement(),
        {"op": "committed", "rank": 0, "generation": 1, "start_iteration": 10},
        {"op": "inventory", "rank": 0},
        {"op": "fetch", "rank": 0, "start_iteration": 10, "generation": 1},
    ]
    with cluster(1, memory_limit_bytes=1 << 24) as nodes:
        for _ in range(150):
            wire, _ = connect(nodes.nodes[0].address, GREETING)
            try:
                wire.send(message := mutated(rng, rng.choice(sound)))
                if message.get("waits") is not True:
                    wire._sock.shutdown(socket.SHUT_WR)  # no bytes follow, for which a keeper would wait 30 s
                if wire.answer() == {"op": "go"}:
                    wire.send_bytes(memoryview(bytes(PAGE)))
                    wire.send(mutated(rng, {"op": "hashes", "hashes": ["0" * 32]}))
                    wire._sock.shutdown(socket.SHUT_WR)
                    wire.answer()
            except (ControlError, OSError):
                pass
            wire.close()
        check_sound(nodes)


def test_no_torch() -> None:
    modules = "megatron_ft.snapshot.server.process, megatron_ft.snapshot.server.client"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
