"""Tests a window in pinned memory of a snapshot server: other processes read what the GPU wrote."""

import json
import subprocess
import sys

import pytest
import torch
import xxhash

from megatron_ft.snapshot.capture.capture import CopyBatch, WindowMemory, open_copier
from megatron_ft.testing.jobs import REPOSITORY as ROOT
from megatron_ft.testing.snapshot_servers import PAGE, Cluster, begin, cluster, find, slice_of, wait_replicated

DEVICE = torch.device("cuda")
NUM_BYTES = 1024 * PAGE
READER = """
import json, sys, xxhash
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.server.client import KeeperClient

path, hello = json.loads(sys.argv[1])
client = KeeperClient(path, hello=hello)
window, payload = client.fetch(1, WindowKey(start_iteration=5, generation=1), node=0)
for part in window.slices:
    part.check_payload(payload[part.offset : part.end], f"slice of iteration {part.iteration}")
print(json.dumps(xxhash.xxh3_128_hexdigest(payload)))
client.close()
"""


@pytest.fixture
def keepers() -> "object":
    """Yield one node whose snapshot server makes no copies on other nodes."""
    with cluster(1) as started:
        yield started


def test_another_process_reads_what_the_gpu_wrote(keepers: Cluster) -> None:
    client = keepers.client(1, node=0, peer_nodes=[])
    arena = client.allocate(2 * NUM_BYTES)
    memory = WindowMemory(arena, DEVICE)
    slices = [torch.randn(NUM_BYTES // 4, device=DEVICE) for _ in range(2)]
    copier = open_copier(DEVICE)
    begin(client, 0, 5)
    for index, source in enumerate(slices):
        offset = index * NUM_BYTES
        part = memory.buffers[0].narrow(0, offset, NUM_BYTES)
        copier.start(CopyBatch.of([source], [part]))
        copier.wait()
        client.captured(0, index, slice_of(5 + index, NUM_BYTES, offset=offset))
        del part
    wait_replicated(arena, 5)
    client.committed(5)
    assert len(find(client.inventory(1), start_iteration=5, complete=True, where="own")) == 1
    expected = xxhash.xxh3_128_hexdigest(b"".join(source.cpu().numpy().tobytes() for source in slices))
    assert read_in_another_process(keepers) == expected
    copier.close()
    memory.release()
    client.close()


def test_memory_is_pinned_again_by_the_next_process(keepers: Cluster) -> None:
    """A restarted rank finds its window and captures into the same memory."""
    for value in (1, 2):
        client = keepers.client(1, node=0, peer_nodes=[])
        memory = WindowMemory(client.allocate(NUM_BYTES), DEVICE)
        found = int(memory.buffers[1][0])
        assert found == value - 1, "the memory of the process before"
        copier = open_copier(DEVICE)
        source = torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=DEVICE)
        part = memory.buffers[1].narrow(0, 0, NUM_BYTES)
        copier.start(CopyBatch.of([source], [part]))
        copier.wait()
        assert bytes(memory.arena.buffer(1)[:NUM_BYTES]) == bytes([value]) * NUM_BYTES
        copier.close()
        del part
        memory.release()
        client.close()


def read_in_another_process(keepers: Cluster) -> str:
    """Return the digest of the window as read by a separate process."""
    about = [keepers.nodes[0].socket_path, keepers.hello(2, node=0, peer_nodes=[])]
    command = [sys.executable, "-c", READER, json.dumps(about)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    digest: str = json.loads(done.stdout.splitlines()[-1])
    return digest
