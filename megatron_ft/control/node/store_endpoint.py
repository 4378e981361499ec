"""Endpoint of the rendezvous store that a node serves if it has the first rank of a membership."""

from dataclasses import dataclass
from typing import Annotated

from megatron_ft.control.ports import free_port
from megatron_ft.serde import Between, Length

NUM_PORTS = 16
"""Number of consecutive generations with different ports."""


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """An address and ports of a node. Memberships use the ports in turn, because the store of the one before may still
    be closing."""

    address: Annotated[str, Length(1, 255)]
    ports: Annotated[tuple[Annotated[int, Between(1, 65535)], ...], Length(1, NUM_PORTS)]

    def port_of(self, generation: int) -> int:
        """Return the port of the store of a generation."""
        # A port comes again after ``NUM_PORTS`` memberships, when its earlier store has long been closed.
        return self.ports[generation % len(self.ports)]


def find_store_endpoint(address: str) -> StoreEndpoint:
    """Find different unused ports at an address of this machine."""
    ports: set[int] = set()
    while len(ports) < NUM_PORTS:
        ports.add(free_port(address))
    return StoreEndpoint(address, tuple(sorted(ports)))
