"""Unused ports."""

import contextlib
import random
import socket

from megatron_ft.errors import ConfigError, ControlError

PORTS = range(20000, 32000)
"""Range below the ports that Linux chooses for outgoing connections (32768-60999)."""
_PORT_TRIES = 100


def free_port(interface: str) -> int:
    """Return a port that is unused on ``interface`` now, outside the range of ephemeral ports.

    The process that serves the port binds it later; no outgoing connection can take it in between.

    Raises:
        ConfigError: this machine does not have the address.
    """
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((interface.strip("[]"), 0))
        except OSError as error:
            raise ConfigError.of(
                "control.interface", interface, f"must be an address of this machine: {error}"
            ) from None
    # At random: two jobs that start at the same time rarely try the same port.
    for port in random.SystemRandom().sample(PORTS, _PORT_TRIES):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((interface.strip("[]"), port))
            return port
    raise ControlError(f"no free port on {interface} after {_PORT_TRIES} tries between {PORTS[0]} and {PORTS[-1]}")
