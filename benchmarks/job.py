"""Shared parts of the measuring scripts that train: configurations and a trainer whose records stay local."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Rank
from benchmarks.source import ROOT
from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.mcore.device.install import install


def compose(*overrides: str) -> JobConfig:
    """Compose the configuration that the entry point would make of ``overrides``."""
    from pretrain_moe import compose as compose_job

    config, _ = compose_job([f"data.cache_dir={ROOT / '.cache' / 'data'}", *overrides])
    return config


class RecordFile:
    """A worker client that writes each record to a file, as an agent would get it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def report(self, record: dict[str, Any]) -> None:
        """Write ``record`` as a JSON line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def progress(self, iteration: int, phase: str) -> None:
        """Write where the rank is."""
        self.report({"iteration": iteration, "phase": phase})

    def stop_requested(self) -> bool:
        """Nobody asks."""
        return False

    def change_requested(self) -> bool:
        """Nobody joins or leaves."""
        return False

    @property
    def can_survive(self) -> bool:
        """Nobody outlives the others."""
        return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def join(config: JobConfig, rank: Rank) -> tuple[Any, Any]:
    """Make this process a rank: (its trainer, built, and its groups)."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    groups, transformer_impl = join_groups(config, rank)
    from megatron_ft.mcore.training.trainer import Trainer

    trainer = Trainer(config, _context(rank), device=torch.device("cpu"), transformer_impl=transformer_impl)
    trainer.build(groups)
    return trainer, groups


def join_groups(config: JobConfig, rank: Rank) -> tuple[Any, str]:
    """Make Megatron usable in this process of one thread and form its groups: (the groups, what builds layers)."""
    torch.set_num_threads(1)
    _, transformer_impl = install(config)
    from megatron_ft.mcore.groups import form_groups

    groups = form_groups(
        config.parallel,
        store=dist.TCPStore("127.0.0.1", rank.master_port, rank.world_size, is_master=rank.rank == 0),
        rank=rank.rank,
        world_size=rank.world_size,
        generation=0,
        device="cpu",
        timeout_seconds=120.0,
    )
    return groups, transformer_impl


def _context(rank: Rank) -> RankContext:
    return RankContext(
        rank=rank.rank,
        world_size=rank.world_size,
        local_rank=rank.rank,
        node=0,
        num_nodes=1,
        generation=0,
        master_addr="127.0.0.1",
        master_port=rank.master_port,
        run_dir=rank.run_dir,
        resume_from=None,
        worker=RecordFile(rank.run_dir / f"records-{rank.rank}.jsonl"),
    )


def with_parallel(config: JobConfig, **sizes: Any) -> JobConfig:
    """``config`` with other parallel sizes."""
    return replace(config, parallel=replace(config.parallel, **sizes))
