"""Finds a transport for several ranks that share one GPU, by trying each transport on this machine.

NCCL refuses two ranks on one device of one host. If each rank has a different ``NCCL_HOSTID``, NCCL treats them as
ranks on different hosts. With direct transports switched off, NCCL uses sockets of the loopback interface. This is
slow, but it tests the real library with real aborts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.gpu import ranks
from tools.gpu.day import Day, describe

SOCKETS_ONLY = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
PROBE_SECONDS = 30.0
"""Time limit for the test of one transport. If all three transports hang, the stage still has time to report this."""
TIMEOUT_SECONDS = 60.0
"""Timeout of the process groups that a stage forms."""
_FILE = "transport.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Backend of torch.distributed with the environment variables that let several ranks share one GPU."""

    name: str
    backend: str
    """Backend of torch's process groups for tensors on the device."""
    variables: Mapping[str, str] = field(default_factory=dict)
    host_ids: bool = False
    """Whether each rank has its own ``NCCL_HOSTID``. NCCL then treats the ranks as if they were on different hosts."""

    def environments(self, world_size: int, more: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """Return the environment variables that each rank needs for this transport, together with ``more``."""
        found = []
        for rank in range(world_size):
            own = {"NCCL_HOSTID": f"megatron-ft-rank-{rank}"} if self.host_ids else {}
            found.append({**self.variables, **own, **(more or {})})
        return found


TRANSPORTS = (
    Transport(name="nccl, a host id for each rank", backend="nccl", variables=SOCKETS_ONLY, host_ids=True),
    Transport(
        name="nccl, with several ranks per GPU allowed",
        backend="nccl",
        variables={**SOCKETS_ONLY, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    ),
    Transport(name="gloo with tensors on the device", backend="gloo"),
)


def find_transport(day: Day) -> Transport:
    """Return the first of ``TRANSPORTS`` that works, or the one that an earlier stage of this call has already found.

    Raises:
        RuntimeError: no transport works.
    """
    path = day.shared / _FILE
    if path.exists():
        name = json.loads(path.read_text(encoding="utf-8"))["name"]
        return next(transport for transport in TRANSPORTS if transport.name == name)
    failures = {}
    for transport in TRANSPORTS:
        try:
            _probe(day, transport)
        except RuntimeError as error:
            failures[transport.name] = describe(error)[-300:]
            continue
        path.write_text(json.dumps({"name": transport.name}), encoding="utf-8")
        day.record(transport=transport.name, transports_that_failed=failures)
        return transport
    raise RuntimeError(f"no transport works: {failures}")


def _probe(day: Day, transport: Transport) -> None:
    """Test a transport: sum a tensor over two ranks. Raise a RuntimeError if this fails or gives a wrong sum."""
    sums = ranks.run_ranks(
        "tools.gpu.transports:add_up",
        world_size=2,
        arguments={"backend": transport.backend, "device_type": day.device_type},
        environments=transport.environments(2),
        seconds=min(PROBE_SECONDS, day.remaining_seconds - 5),
    )
    if sums != [3.0, 3.0]:
        raise RuntimeError(f"an all-reduce of 1 and 2 must give 3 on both ranks, but gave {sums}")


def add_up(place: ranks.Place, pipe: Any, *, backend: str, device_type: str) -> float:
    """Sum rank + 1 over all ranks with an all-reduce on the device. Return the sum."""
    import torch
    import torch.distributed as dist

    join(place, backend)
    tensor = torch.full((1024,), float(place.rank + 1), device=device_type)
    dist.all_reduce(tensor)
    return float(tensor.mean())


def join(place: ranks.Place, backend: str, *, prefix: str = "first", store: Any = None) -> Any:
    """Form the default process group with ``store``; if None, with a new TCPStore in rank 0. Return the store."""
    import datetime

    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    if store is None:
        store = dist.TCPStore(
            "127.0.0.1",
            place.port,
            place.world_size,
            is_master=place.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    return store
