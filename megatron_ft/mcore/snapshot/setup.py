"""A trainer's windows: what it finds and replays at its start, what it captures while it trains."""

import json
from typing import TYPE_CHECKING

from megatron_ft.mcore.loop.extras import capture_extras
from megatron_ft.mcore.snapshot.client import open_snapshot_client, peer_assignment, share_addresses, window_folder
from megatron_ft.mcore.snapshot.local_window import CONFIG, EXTRAS, PLACEMENT, SETTINGS, KeptPart
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer
from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.server.client import KeeperClient

if TYPE_CHECKING:
    from megatron_ft.mcore.loop.trainer import Trainer


def open_restorer(trainer: "Trainer", client: KeeperClient | None) -> SnapshotRestorer:
    """What finds the newest window for a job that starts."""
    return SnapshotRestorer(
        trainer.config,
        rank=trainer.context.rank,
        node=trainer.context.node,
        run_dir=trainer.context.run_dir,
        identity=trainer.identity,
        topology=trainer.topology_record,
        settings=trainer.replay_config(),
        agreement=trainer.agreement,
        client=client,
        folder=window_folder(trainer.config, trainer.context.run_dir),
        report=trainer.report_own,
    )


def take_snapshots(
    trainer: "Trainer", client: KeeperClient, resumed: tuple[KeptPart, WindowPlan] | None
) -> Snapshotter:
    """Capture from now on; ``resumed`` is what the job has continued from or could go back to, and the plan in
    force."""
    snapshots = Snapshotter(
        trainer.config,
        trainer.engine,
        client=client,
        assignment=peer_assignment(trainer.config),
        node=trainer.context.node,
        header=lambda index: _slice_header(trainer, index),
        report=trainer.report_own,
    )
    if resumed is not None:
        snapshots.resume(*resumed)
    return snapshots


def restart_snapshots(trainer: "Trainer") -> None:
    """In a membership that has formed: windows begin anew, with copies on the nodes that are there; collective."""
    if trainer.config.snapshot.policy is None:
        return
    trainer.context = share_addresses(trainer.context, trainer.agreement)
    client = open_snapshot_client(trainer)
    assert client is not None, "there is a policy"
    trainer.snapshots = take_snapshots(trainer, client, None)


def _slice_header(trainer: "Trainer", index: int) -> dict[str, str]:
    """What a replay needs besides tensors; it begins with slice 0."""
    if index > 0:
        return {}
    placement = None if trainer.placement is None else trainer.placement.to_json()
    return {
        EXTRAS: json.dumps(capture_extras(trainer.engine)),
        PLACEMENT: json.dumps(placement),
        CONFIG: json.dumps(trainer.replay_config()),
        SETTINGS: json.dumps(trainer.identity.settings),
    }
