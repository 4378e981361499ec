"""Checks of the network: whether the job can listen on its addresses and ports, and whether named interfaces exist."""

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.control.ports import PORTS
from megatron_ft.doctor.findings import Finding
from megatron_ft.doctor.needs import JobNeeds
from megatron_ft.formatting import counted

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with comma-separated names of network interfaces. NCCL also uses interfaces whose names begin
with a listed name. In NCCL's variable, ``=`` before the list demands exact names, and ``^`` excludes interfaces.
Sources: PyTorch, torch.distributed, "Common environment variables"; NCCL user guide, "Environment variables"."""
PORTS_PER_RANK = 64
"""Estimated largest number of ports that a rank needs. A rank has about 25 process groups. In each group it needs one
port to listen, and one to connect to a peer."""
SPARE_PORTS = 1000
"""Number of ephemeral ports that must remain for other programs on the machine, besides those of the ranks."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RESERVED = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface of this machine."""

    is_up: bool
    addresses: tuple[str, ...]
    """IPv4 and IPv6 addresses of the interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """Observed interfaces, addresses and ports of this machine."""

    interfaces: Mapping[str, Interface]
    resolved: tuple[str, ...]
    """IP addresses to which ``control.interface`` resolves; empty if it does not resolve."""
    bind_error: str | None
    """Error of an attempt to listen at the address ``control.interface`` on port ``launch.master_port`` (0: on any free
    port). None if the attempt succeeded."""
    port_is_taken: bool = False
    """Whether ``bind_error`` occurred because another process uses the port."""
    ephemeral: tuple[int, int] | None = None
    """First and last port for outgoing connections (ephemeral ports); None if the system does not report them."""
    reserved: tuple[tuple[int, int], ...] = ()
    """Port ranges that the kernel does not use for outgoing connections."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Value of each of ``INTERFACE_VARIABLES`` that is set in the environment."""

    def check(self, needs: JobNeeds) -> list[Finding]:
        """Check the job's address and ports, and the network interfaces that environment variables name."""
        found = _check_variables(self)
        if needs.mode == "local":
            found += _check_interface(self, needs) or _check_binding(self, needs)
        return [*found, *_check_ephemeral(self, needs)]

    @classmethod
    def observe(cls, needs: JobNeeds) -> "NetworkFacts":
        """Return this machine's interfaces, its port range, and whether ``launch.master_port`` can be bound."""
        interfaces = _interfaces()
        if needs.is_batch_job and needs.interface in interfaces:
            # IPv4 addresses come first, because the launcher prefers them, too.
            resolved = tuple(sorted(interfaces[needs.interface].addresses, key=lambda address: ":" in address))
        else:
            resolved = _resolve(needs.interface)
        bind_error, port_is_taken = _try_to_bind(resolved, needs.master_port)
        return cls(
            interfaces=interfaces,
            resolved=resolved,
            bind_error=bind_error,
            port_is_taken=port_is_taken,
            ephemeral=_ephemeral(),
            reserved=_parse_ranges(_RESERVED.read_text(encoding="ascii")) if _RESERVED.exists() else (),
            variables={name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)},
        )


def _interfaces() -> dict[str, Interface]:
    import psutil

    stats = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: Interface(
            is_up=name in stats and stats[name].isup,
            addresses=tuple(each.address.partition("%")[0] for each in addresses if each.family in families),
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def _resolve(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()  # the check reports a name without addresses as an error
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _try_to_bind(addresses: tuple[str, ...], port: int) -> tuple[str | None, bool]:
    # Return the error if the port cannot be used, and whether another process uses it. The function also listens,
    # because only this reserves a port.
    if not addresses:
        return "no address", False
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Stores of a job set this option, too. It permits a port whose last connections are still closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((addresses[0], port))
            probe.listen(1)
        except OSError as reason:
            return str(reason), reason.errno == errno.EADDRINUSE
    return None, False


def _ephemeral() -> tuple[int, int] | None:
    if not _RANGE.exists():
        return None
    low, high = _RANGE.read_text(encoding="ascii").split()
    return int(low), int(high)


def _parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse port ranges in the syntax of the kernel, e.g. ``8080,20000-31999``."""
    ranges = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        ranges.append((int(low), int(high or low)))
    return tuple(ranges)


def _check_interface(facts: NetworkFacts, needs: JobNeeds) -> list[Finding]:
    named = f"control.interface={needs.interface}"
    is_name = needs.interface in facts.interfaces
    if is_name and not needs.is_batch_job:
        addresses = facts.interfaces[needs.interface].addresses
        instead = f"set control.interface={addresses[0]}" if addresses else f"give an address: {_own(facts)}"
        return [Finding.error("interface", f"{named}: must be an address, not the name of an interface", instead)]
    first = facts.resolved[0] if facts.resolved else ""
    holder = next((name for name, each in facts.interfaces.items() if first in each.addresses), None)
    is_loopback = first.startswith("127.") or first == "::1"
    if needs.is_batch_job and not is_name and holder is None and not is_loopback:
        return [
            Finding.info("interface", f"{named}: is not on this machine; the batch job's host must have this address")
        ]
    if not facts.resolved:
        what = f"{named}: does not resolve to an address"
        return [Finding.error("interface", what, f"give an address of this machine: {_own(facts)}")]
    if holder is None and not is_loopback:
        what = f"{named}: {first} is not an address of this machine"
        return [Finding.error("interface", what, f"give an address of this machine: {_own(facts)}")]
    if holder is not None and not facts.interfaces[holder].is_up:
        return [Finding.error("interface", f"{named}: its interface {holder} is down", f"run ip link set {holder} up")]
    if is_loopback and (needs.is_batch_job or needs.nodes_here < needs.num_nodes):
        what = f"{named}: nodes on other machines cannot reach this address"
        return [Finding.error("interface", what, f"give an address that other machines can reach: {_own(facts)}")]
    return []


def _own(facts: NetworkFacts) -> str:
    """List the addresses of this machine's active interfaces, e.g. ``10.0.0.5 (eth0)``."""
    up = [(name, each) for name, each in facts.interfaces.items() if each.is_up and each.addresses]
    return ", ".join(f"{each.addresses[0]} ({name})" for name, each in up) or "this machine has none"


def _check_binding(facts: NetworkFacts, needs: JobNeeds) -> list[Finding]:
    if facts.bind_error is None:
        return []
    what = f"launch.master_port={needs.master_port}: cannot listen on {needs.interface}: {facts.bind_error}"
    fix = "choose a port above 1023, or 0 for a free one"
    if facts.port_is_taken:
        find = f"ss -ltnp 'sport = :{needs.master_port}'"
        fix = f"choose another port (0 for a free one), or end the process that uses this port ({find})"
    return [Finding.error("ports", what, fix)]


def _check_ephemeral(facts: NetworkFacts, needs: JobNeeds) -> list[Finding]:
    if facts.ephemeral is None:
        return [Finding.info("ports", "the range of ephemeral ports is unknown")]
    low, high = facts.ephemeral
    found, width = [], high - low + 1 - sum(max(0, min(b, high) - max(a, low) + 1) for a, b in facts.reserved)
    wide = "run sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
    needed = SPARE_PORTS + PORTS_PER_RANK * needs.ranks_here
    if width < needed:
        what = f"only {width} ephemeral ports ({low}-{high}); {counted(needs.ranks_here, 'rank')} may need {needed}"
        found.append(Finding.warning("ports", what, wide))
    for first, last, named in _own_ports(needs):
        free = not (first <= high and last >= low)
        # The kernel never gives reserved ports to outgoing connections, even inside the ephemeral range.
        if not free and not any(a <= max(first, low) and min(last, high) <= b for a, b in facts.reserved):
            what = f"another program's outgoing connection (ports {low}-{high}) may occupy {named} before the job does"
            ports = str(first) if first == last else f"{first}-{last}"
            found.append(
                Finding.warning("ports", what, f"{wide}, or sysctl -w net.ipv4.ip_local_reserved_ports={ports}")
            )
    return found or [Finding.info("ports", f"{width} ephemeral ports ({low}-{high})")]


def _own_ports(needs: JobNeeds) -> list[tuple[int, int, str]]:
    """Return the ranges of fixed ports on which this job listens: first port, last port and description of each."""
    if needs.mode != "local":
        return []
    if needs.master_port:
        return [(needs.master_port, needs.master_port, f"launch.master_port={needs.master_port}")]
    return [(PORTS[0], PORTS[-1], f"rendezvous ports {PORTS[0]}-{PORTS[-1]}")]


def _check_variables(facts: NetworkFacts) -> list[Finding]:
    found = []
    for variable, value in facts.variables.items():
        prefixes = variable.startswith("NCCL")
        if prefixes and value.startswith("^"):
            continue
        # NCCL treats a name as the beginning of interface names, gloo as a complete name.
        exact = not prefixes or value.startswith("=")
        for name in filter(None, value.lstrip("=").split(",")):
            holders = [own for own in facts.interfaces if (own == name if exact else own.startswith(name))]
            usable = [own for own in holders if facts.interfaces[own].is_up and facts.interfaces[own].addresses]
            if not usable:
                lack = "has no address or is down" if holders else "does not exist on this machine"
                what = f"{variable}={value}: interface {name} {lack}"
                found.append(Finding.error("interface", what, f"name an interface that is up: {_own(facts)}"))
    return found
