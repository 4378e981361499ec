"""What every rank is told that starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.node.store_endpoint import StorePlace
from megatron_ft.control.ports import free_port
from megatron_ft.framing import Message


def start_order(
    config: JobConfig,
    run_dir: Path,
    entry: str,
    generation: int,
    members: Sequence[int],
    stores: Mapping[int, StorePlace],
    *,
    resume_from: Path | None,
    working_dir: str,
) -> Message:
    """What every rank that starts in a generation of the nodes ``members`` is told. Later ones continue the run.

    Args:
        stores: where nodes can serve the store of a membership; those on this machine say nothing.
    """
    store = stores.get(members[0])
    address = config.launch.interface if store is None else store.address
    port = config.launch.master_port or (free_port(address) if store is None else store.port_of(generation))
    source = resume_from if generation == 0 else run_dir / "checkpoints"
    return {
        "entry": entry,
        "config": to_dict(config),
        "run_dir": str(run_dir),
        "resume_from": None if source is None else str(source),
        "working_dir": working_dir,
        "world_size": len(members) * config.launch.ranks_per_node,
        "num_nodes": len(members),
        "can_survive": config.launch.may_lose_nodes,
        "master_addr": address,
        "master_port": port,
    }
