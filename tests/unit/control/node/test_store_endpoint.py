"""Tests where the store of a membership runs if its first rank is on another machine than the controller."""

from typing import Any

import pytest

from megatron_ft.control.controller.main import _launch_spec
from megatron_ft.control.messages import LaunchSpec
from megatron_ft.control.ports import NUM_PORTS, StoreEndpoint
from megatron_ft.serde import decode, encode

PLACES = {node: StoreEndpoint(f"10.0.0.{node}", (21000 + node, 22000 + node)) for node in (0, 1)}


def order(generation: int, members: list[int], places: dict[int, StoreEndpoint]) -> tuple[str, int]:
    """Return address and port of the store of a generation."""
    first = LaunchSpec(
        entry="package.module:function",
        config={},
        run_dir="run",
        working_dir=".",
        world_size=2,
        num_nodes=2,
        can_survive=True,
        master_addr="127.0.0.1",
        master_port=0,
    )
    found = _launch_spec(first, generation, members, places)
    return found.master_addr, found.master_port


def test_the_first_member_serves_it_on_the_ports_in_turn() -> None:
    assert [order(generation, [0, 1], PLACES) for generation in range(3)] == [
        ("10.0.0.0", 21000),
        ("10.0.0.0", 22000),
        ("10.0.0.0", 21000),
    ]
    assert order(1, [1], PLACES) == ("10.0.0.1", 22001)


def test_on_the_controllers_machine_it_has_a_port_that_nobody_uses_now() -> None:
    address, port = order(0, [0], {})
    assert address == "127.0.0.1"
    assert port >= 20000


def test_found_ports_differ_and_come_through_json() -> None:
    place = StoreEndpoint.find("127.0.0.1")
    assert len(set(place.ports)) == NUM_PORTS
    assert decode(StoreEndpoint, encode(place)) == place


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"address": "a"},
        {"address": "", "ports": [1]},
        {"address": "a" * 256, "ports": [1]},
        {"address": 7, "ports": [1]},
        {"address": "a", "ports": []},
        {"address": "a", "ports": [65536]},
        {"address": "a", "ports": [True]},
        {"address": "a", "ports": ["1"]},
        {"address": "a", "ports": [1] * (NUM_PORTS + 1)},
    ],
)
def test_what_is_no_place_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="address|ports"):
        decode(StoreEndpoint, content)
