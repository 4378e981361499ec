"""Specification of the ranks that start in a generation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.messages import LaunchSpec
from megatron_ft.control.node.store_endpoint import StoreEndpoint
from megatron_ft.control.ports import free_port


def launch_spec(
    config: JobConfig,
    run_dir: Path,
    entry: str,
    generation: int,
    members: Sequence[int],
    stores: Mapping[int, StoreEndpoint],
    *,
    resume_from: Path | None,
    working_dir: str,
) -> LaunchSpec:
    """Specification of the ranks that start in a generation of the nodes ``members``. Later ones continue the run.

    Args:
        stores: where nodes can serve the store of a membership; nodes on this machine need no entry.
    """
    store = stores.get(members[0])
    address = config.control.interface if store is None else store.address
    # Each generation gets another port where none is configured: the store of the last one may still be closing.
    port = config.launch.master_port or (free_port(address) if store is None else store.port_of(generation))
    # Later generations continue this run, whatever ``run.resume`` was at its start.
    source = resume_from if generation == 0 else run_dir / "checkpoints"
    return LaunchSpec(
        entry=entry,
        config=to_dict(config),
        run_dir=str(run_dir),
        resume_from=None if source is None else str(source),
        working_dir=working_dir,
        world_size=len(members) * config.launch.ranks_per_node,
        num_nodes=len(members),
        can_survive=config.may_lose_nodes,
        master_addr=address,
        master_port=port,
    )
