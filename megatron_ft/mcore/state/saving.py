"""Opens, fills and loads the dense checkpoints of a trainer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.data.data_checks import check_known_data
from megatron_ft.mcore.groups import Groups

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer


def open_checkpoints(trainer: "Trainer", groups: Groups) -> CheckpointManager:
    """Open the manager that saves and loads as a rank of ``groups``."""
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
    """Return data and placement that are saved with a checkpoint, the same on all ranks."""
    extra: dict[str, Any] = {"data_fingerprint": trainer.samples["train"].fingerprint()}
    if trainer.placement is not None:
        extra["placement"] = trainer.placement.to_json()
    return extra


def load(trainer: "Trainer", directory: Path) -> None:
    """Fill the engine from a checkpoint.

    Raises:
        CheckpointError: it is damaged, or does not fit.
        DataError: it has no manifest of format 2, so it could not be compared before, and was trained on other data.
    """
    state = trainer.state({})
    manifest = trainer.checkpoints.load(state, directory).manifest
    if manifest is None or manifest.format_version == 1:
        check_known_data(trainer.config, trainer.samples["train"], state.extra.get("data_fingerprint"), directory)
    trainer.engine.restore(state.host)
