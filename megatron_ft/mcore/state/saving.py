"""Connects a trainer to its dense checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.data.data_checks import check_known_data
from megatron_ft.mcore.groups import Groups

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer


def open_checkpoints(trainer: "Trainer", groups: Groups) -> CheckpointManager:
    """Create the ``CheckpointManager`` of a trainer for the process groups ``groups``."""
    return CheckpointManager(
        trainer.config.checkpoint,
        run_dir=trainer.context.run_dir,
        identity=trainer.identity,
        topology_record=trainer.topology_record,
        group=groups.vote,
        dp_cp_group=groups.pg_collection.dp_cp,
        report=trainer.report_record,
        generation=groups.generation,
    )


def extra_state(trainer: "Trainer") -> dict[str, Any]:
    """Return the data fingerprint and the placement, which a checkpoint also contains. The same on all ranks."""
    extra: dict[str, Any] = {"data_fingerprint": trainer.samples["train"].fingerprint()}
    if trainer.placement is not None:
        extra["placement"] = trainer.placement.to_json()
    return extra


def load(trainer: "Trainer", directory: Path) -> None:
    """Load the checkpoint in ``directory`` into the engine of ``trainer``.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not match this job.
        DataError: the checkpoint was trained on other data. Checkpoints with a manifest of format 2 or later are
            compared with the data before they are loaded.
    """
    state = trainer.state({})
    manifest = trainer.checkpoints.load(state, directory).manifest
    if manifest is None or manifest.format_version == 1:
        check_known_data(trainer.config, trainer.samples["train"], state.extra.get("data_fingerprint"), directory)
    trainer.engine.restore(state.host)
