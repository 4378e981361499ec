"""Tests the checks of ports and interfaces: each finding appears with its cause and disappears without it."""

import socket
from dataclasses import replace
from typing import Any

import pytest

from megatron_ft.doctor.network import Interface, NetworkFacts, _parse_ranges
from tests.helpers.machines import NEEDS, NETWORK, judged

CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a name without an address": ({"resolved": ()}, {"interface": "nowhere"}, "error", "nowhere: does not resolve"),
    "an interface's name": ({"resolved": ()}, {"interface": "eth0"}, "error", "not the name of an interface"),
    "an address of others": ({"resolved": ("10.9.9.9",)}, {}, "error", "is not an address of this machine"),
    "an interface that is down": ({"resolved": ("10.0.1.5",)}, {}, "error", "interface eth1 is down"),
    "loopback for several machines": (
        {"resolved": ("127.0.0.1",)},
        {"interface": "127.0.0.1", "nodes_here": 1},
        "error",
        "other machines cannot reach this address",
    ),
    "loopback for a batch job": (
        {"resolved": ("127.0.0.1",)},
        {"interface": "127.0.0.1", "is_batch_job": True},
        "error",
        "other machines cannot reach this address",
    ),
    "a batch host's interface without an address": (
        {"resolved": ()},
        {"interface": "ib0", "is_batch_job": True},
        "error",
        "ib0: does not resolve",
    ),
    "a batch host's interface that is down": (
        {"resolved": ("10.0.1.5",)},
        {"interface": "eth1", "is_batch_job": True},
        "error",
        "interface eth1 is down",
    ),
    "a port that is taken": (
        {"bind_error": "in use", "port_is_taken": True},
        {"master_port": 29500},
        "error",
        "launch.master_port=29500: cannot listen",
    ),
    "a port that is not allowed": ({"bind_error": "denied"}, {"master_port": 80}, "error", "denied"),
    "a narrow ephemeral range": ({"ephemeral": (60000, 60999)}, {}, "warning", "1000 ephemeral ports"),
    "many ranks for the range": ({}, {"ranks_per_node": 256}, "warning", "512 ranks may need 33768"),
    "a range that is reserved": ({"reserved": ((32768, 60000),)}, {}, "warning", "999 ephemeral ports"),
    "own ports in the range": ({"ephemeral": (1024, 65535)}, {}, "warning", "rendezvous ports 20000-31999"),
    "own port in the range": ({}, {"master_port": 40000}, "warning", "may occupy launch.master_port=40000"),
    "gloo's interface": ({"variables": {"GLOO_SOCKET_IFNAME": "eth"}}, {}, "error", "interface eth does not exist"),
    "gloo's second": ({"variables": {"GLOO_SOCKET_IFNAME": "eth0,ib0"}}, {}, "error", "ib0 has no address"),
    "NCCL's interface": ({"variables": {"NCCL_SOCKET_IFNAME": "=eth"}}, {}, "error", "interface eth does not exist"),
    "NCCL's, down": ({"variables": {"NCCL_SOCKET_IFNAME": "eth1"}}, {}, "error", "or is down"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_finding_appears_with_its_cause(cause: str) -> None:
    facts, needs, level, what = CAUSES[cause]
    (finding,) = judged(replace(NETWORK, **facts).check(replace(NEEDS, **needs)))
    assert (finding.level, what in finding.what) == (level, True), finding
    assert finding.fix


FINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it should be": ({}, {}),
    "loopback for one machine": ({"resolved": ("127.0.0.1",)}, {"interface": "127.0.0.1"}),
    "an interface's name for a batch job": ({}, {"interface": "eth0", "is_batch_job": True}),
    "a name that only compute nodes know": (
        {"resolved": (), "bind_error": "no address"},
        {"interface": "ib7", "is_batch_job": True},
    ),
    "an address that only compute nodes have": (
        {"resolved": ("10.9.9.9",), "bind_error": "cannot assign"},
        {"interface": "10.9.9.9", "is_batch_job": True},
    ),
    "another address of loopback": ({"resolved": ("127.0.0.2",)}, {"interface": "127.0.0.2"}),
    "own ports reserved": ({"ephemeral": (1024, 65535), "reserved": ((20000, 31999),)}, {}),
    "a prefix for NCCL": ({"variables": {"NCCL_SOCKET_IFNAME": "eth"}}, {}),
    "all others for NCCL": ({"variables": {"NCCL_SOCKET_IFNAME": "^docker0"}}, {}),
    "gloo's interface": ({"variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, {}),
    "torchrun, which brings its own store": ({"resolved": (), "bind_error": "no address"}, {"mode": "torchrun"}),
    "a system that does not say": ({"ephemeral": None}, {}),
}


@pytest.mark.parametrize("cause", FINE)
def test_and_goes_without(cause: str) -> None:
    facts, needs = FINE[cause]
    assert judged(replace(NETWORK, **facts).check(replace(NEEDS, **needs))) == []


def test_a_port_that_somebody_listens_on_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        needs = replace(NEEDS, interface="127.0.0.1", master_port=server.getsockname()[1])
        taken = NetworkFacts.observe(needs)
        assert taken.port_is_taken
        assert any("ss -ltnp" in finding.fix for finding in taken.check(needs))
    assert NetworkFacts.observe(needs).bind_error is None


def test_this_machine_has_a_loopback() -> None:
    facts = NetworkFacts.observe(replace(NEEDS, interface="localhost"))
    assert set(facts.resolved) <= {"127.0.0.1", "::1"} and facts.resolved
    assert Interface(is_up=True, addresses=facts.interfaces["lo"].addresses) == facts.interfaces["lo"]
    assert NetworkFacts.observe(replace(NEEDS, interface="no-such-host.invalid")).resolved == ()


def test_an_interface_of_a_batch_host_is_observed_by_its_addresses() -> None:
    needs = replace(NEEDS, interface="lo", is_batch_job=True)
    facts = NetworkFacts.observe(needs)
    assert facts.resolved[0] == "127.0.0.1" and set(facts.resolved) == set(facts.interfaces["lo"].addresses)
    assert facts.bind_error is None
    assert "cannot reach this address" in facts.check(needs)[0].what
    (about,) = replace(NETWORK, resolved=()).check(replace(needs, interface="ib7", master_port=0))[:1]
    assert (about.level, "ib7: is not on this machine" in about.what) == ("info", True)


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert NetworkFacts.observe(replace(NEEDS, interface="127.0.0.1")).variables == {"GLOO_SOCKET_IFNAME": "nowhere0"}


def test_ranges_of_the_kernel() -> None:
    assert _parse_ranges("8080,20000-31999\n") == ((8080, 8080), (20000, 31999))
    assert _parse_ranges("\n") == ()
