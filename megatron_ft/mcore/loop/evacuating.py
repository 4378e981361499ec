"""Before nodes leave: their experts go to ranks that stay, while all are there."""

from collections.abc import Sequence

from megatron_ft.config.present_nodes import config_of
from megatron_ft.mcore.loop.trainer import Trainer


def evacuate(trainer: Trainer, leaving: Sequence[int]) -> None:
    """Have ranks on other nodes than ``leaving`` hold every expert; collective, nothing to do where they do."""
    placement, engine = trainer.placement, trainer.engine
    assert placement is not None, "without replicas nobody can leave"
    staying = [rank for rank, node in enumerate(trainer.nodes) if node not in leaving]
    config = config_of(trainer.job, [trainer.nodes[rank] for rank in staying])
    moves = placement.evacuation(config, staying)
    if moves is None:
        return
    trainer.context.worker.progress(engine.iteration + 1, "migrate")
    if trainer.snapshots is not None:
        trainer.snapshots.pause()
    trainer.move(moves, engine.iteration + 1, is_evacuation=True)
    placement.plans = [moves.placement]
    trainer.report_placement("evacuation")
