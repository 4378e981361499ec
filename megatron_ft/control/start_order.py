"""What every rank is told that starts."""

from collections.abc import Sequence
from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.ports import free_port
from megatron_ft.framing import Message


def start_order(
    config: JobConfig,
    run_dir: Path,
    entry: str,
    generation: int,
    members: Sequence[int],
    *,
    resume_from: Path | None,
    working_dir: str,
) -> Message:
    """What every rank that starts in a generation of the nodes ``members`` is told. Later ones continue the run."""
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
        "master_addr": config.launch.interface,
        "master_port": config.launch.master_port or free_port(config.launch.interface),
    }
