"""Tests that ranks stop waiting for a machine that dies while they connect to it. A dead machine does not refuse
connections."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from megatron_ft.control.ports import free_port
from megatron_ft.testing.jobs import REPOSITORY
from megatron_ft.testing.slurm_cluster import wait_until

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip: namespaces are made"
    ),
]

HERE, THERE, NOBODY = "10.88.0.1", "10.88.0.2", "10.88.0.3"
BEHIND = "1.88.0.2"
"""Address at which the rank of the other machine listens. Of two ranks, the one with the higher address connects."""
FORM = """
import datetime, sys, threading
import torch.distributed as dist
from megatron_ft.runtime.transport.abort import Opening

opening = Opening()


def hang_up():
    sys.stdin.readline()
    opening.hang_up("node 1 was lost")


threading.Thread(target=hang_up, daemon=True).start()
about = {"world_size": 2, "timeout": datetime.timedelta(seconds=150)}
rank = int(sys.argv[1])
store = dist.TCPStore(sys.argv[2], int(sys.argv[3]), is_master=rank == 0, **about)
try:
    dist.init_process_group("gloo", store=store, rank=rank, **about)
except RuntimeError:
    print("broken")
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


@contextmanager
def another_machine() -> Iterator[list[str]]:
    """Create a network namespace whose address ``THERE`` can be reached and whose address ``BEHIND`` cannot. Yield a
    function that runs a command in it. Packets to ``BEHIND`` are lost without an answer.

    Packets for ``BEHIND`` go to an address without a machine, and no host reports this to the sender.
    """
    name, cables = f"mft{secrets.token_hex(3)}", ("eth0", "eth1")
    with ExitStack() as ending:
        ip("netns", "add", name)
        ending.callback(ip, "netns", "del", name)
        for cable, address in zip(cables, (THERE, BEHIND), strict=True):
            ip("link", "add", f"{name}{cable[-1]}", "type", "veth", "peer", "name", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("link", "set", f"{name}{cable[-1]}", "up")
        ip("addr", "add", f"{HERE}/24", "dev", f"{name}0")
        ip("neigh", "add", NOBODY, "lladdr", "02:00:00:00:00:01", "dev", f"{name}0")
        ip("route", "add", f"{BEHIND}/32", "via", NOBODY)
        yield ["ip", "netns", "exec", name]


@contextmanager
def rank(number: int, port: int, interface: str, through: Sequence[str] = ()) -> Iterator["subprocess.Popen[str]"]:
    command = [*through, sys.executable, "-c", FORM, str(number), HERE, str(port)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def unanswered(process: "subprocess.Popen[str]") -> list[str]:
    """Return the addresses to which a process tries to connect."""
    connections = psutil.Process(process.pid).net_connections("tcp")
    return [found.raddr.ip for found in connections if found.status == psutil.CONN_SYN_SENT]


def test_ranks_that_are_informed_stop_connecting_to_a_machine_that_has_died() -> None:
    with (
        another_machine() as there,
        rank(1, port := free_port(HERE), "eth1", there),
        rank(0, port, f"{there[-1]}0") as here,
    ):
        wait_until("it connects to the rank that is not there", lambda: unanswered(here) == [BEHIND], seconds=60)
        output, _ = here.communicate("\n", timeout=30)
    assert output == "broken\n"
