"""Finds unused ports, and describes where the rendezvous store is served: on the node with the first rank."""

import contextlib
import random
import socket
from dataclasses import dataclass
from typing import Annotated

from megatron_ft.errors import ConfigError, ControlError
from megatron_ft.serde import Between, Length

PORTS = range(20000, 32000)
"""Ports from which to choose. They are below the ports that Linux uses for outgoing connections (32768-60999)."""
_PORT_TRIES = 100


def free_port(interface: str) -> int:
    """Return a port that is unused on ``interface`` now. It is not an ephemeral port (a port of outgoing connections).

    A process binds the port later. Until then, no outgoing connection takes it, because it is no ephemeral port.

    Raises:
        ConfigError: ``interface`` is not an address of this machine.
        ControlError: no unused port was found.
    """
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((interface.strip("[]"), 0))
        except OSError as error:
            raise ConfigError.of(
                "control.interface", interface, f"must be an address of this machine: {error}"
            ) from None
    # Ports are tried in random order, so two jobs that start at the same time rarely try the same port.
    for port in random.SystemRandom().sample(PORTS, _PORT_TRIES):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((interface.strip("[]"), port))
            return port
    raise ControlError(f"no free port on {interface} after {_PORT_TRIES} tries between {PORTS[0]} and {PORTS[-1]}")


NUM_PORTS = 16
"""Number of ports that a node offers for the rendezvous store. The generations use these ports in a cycle."""


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """Address and ports at which a node can serve the rendezvous store. Successive memberships use different ports,
    because the store of the previous membership may still be closing."""

    address: Annotated[str, Length(1, 255)]
    ports: Annotated[tuple[Annotated[int, Between(1, 65535)], ...], Length(1, NUM_PORTS)]

    def port_of(self, generation: int) -> int:
        """Return the port at which the rendezvous store of ``generation`` listens."""
        # A port is used again after ``NUM_PORTS`` memberships, when its earlier store has long been closed.
        return self.ports[generation % len(self.ports)]

    @classmethod
    def find(cls, address: str) -> "StoreEndpoint":
        """Find ``NUM_PORTS`` unused ports at an address of this machine."""
        ports: set[int] = set()
        while len(ports) < NUM_PORTS:
            ports.add(free_port(address))
        return cls(address, tuple(sorted(ports)))
