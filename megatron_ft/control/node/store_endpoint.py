"""Where a node can serve the rendezvous store of a membership whose first rank it has: said when it joins."""

from dataclasses import dataclass

from megatron_ft.control.ports import free_port
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message

NUM_PORTS = 16
"""Generations in a row that have ports of their own."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """An address and ports of a node. Memberships take the ports in turn, for an earlier store may still close."""

    address: str
    ports: tuple[int, ...]

    def port_of(self, generation: int) -> int:
        """The port of the store of a generation."""
        return self.ports[generation % len(self.ports)]

    def to_json(self) -> Message:
        """For ``join``."""
        return {"address": self.address, "ports": list(self.ports)}

    @staticmethod
    def from_json(content: Message) -> "StorePlace":
        """What a node has said.

        Raises:
            ControlError: it is no address with ports.
        """
        address, ports = content.get("address"), content.get("ports")
        is_address = isinstance(address, str) and 0 < len(address) <= 255
        is_ports = isinstance(ports, list) and 0 < len(ports) <= NUM_PORTS
        if not is_address or not is_ports or not all(type(port) is int and 0 < port < 65536 for port in ports):
            raise ControlError(f"a store's place must be an address and 1 to {NUM_PORTS} ports; it is {content!r}")
        return StorePlace(address, tuple(ports))


def find_store_place(address: str) -> StorePlace:
    """Ports that nobody uses at an address of this machine, all different."""
    ports: set[int] = set()
    while len(ports) < NUM_PORTS:
        ports.add(free_port(address))
    return StorePlace(address, tuple(sorted(ports)))
