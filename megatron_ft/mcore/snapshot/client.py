"""Connects a trainer to its node's snapshot server: restore at its start, captures during training."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.events import Record, SnapshotProblem
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.mcore.snapshot.local_window import CONFIG, EXTRAS, PLACEMENT
from megatron_ft.mcore.snapshot.restorer import SnapshotRestorer
from megatron_ft.mcore.snapshot.snapshotter import Snapshotter
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.peers import PeerAssignment, assign_peers
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.server.client import KeeperClient
from megatron_ft.snapshot.storage.run_settings import SETTINGS
from megatron_ft.snapshot.storage.window_folder import open_windows, persist_url

if TYPE_CHECKING:
    from megatron_ft.mcore.training.trainer import Trainer

SERVICE = "keeper"


def peer_assignment(config: JobConfig) -> PeerAssignment:
    """Choose the nodes that hold copies of each node, over the job's failure domains; present nodes count from 0.

    State that several ranks hold is divided among them, so ranks capture disjoint parts and no domain has a copy
    already.
    """
    return assign_peers(config.member_domains, config.snapshot.num_peer_copies)


def open_snapshot_client(trainer: "Trainer") -> KeeperClient | None:
    """Connect to the snapshot server of this rank's node; None if the job takes no snapshots.

    Raises:
        ControlError: the server is missing, or refuses this rank.
    """
    config, context = trainer.config, trainer.context
    if config.snapshot.policy is None:
        return None
    service, present = context.sidecars[SERVICE], list(dict.fromkeys(trainer.nodes))
    peers = peer_assignment(config).peers[present.index(context.node)]
    hello = {
        "token": service["token"],
        "rank": context.rank,
        "world_size": context.world_size,
        "node": context.node,
        "generation": context.generation,
        "run_id": trainer.identity.run_id,
        "topology": trainer.topology_record,
        "peers": service["addresses"],
        "peer_nodes": [present[peer] for peer in peers],
        "persist_every": config.snapshot.persist_interval_windows,
        "persist_url": persist_url(config, context.run_dir),
        "num_persisted": config.snapshot.keep_persisted,
    }
    return KeeperClient(service["socket"], hello=hello)


def share_addresses(context: RankContext, collectives: Collectives) -> RankContext:
    """Add the addresses of the snapshot servers of all present nodes to ``context``; collective.

    A node that joins later knows the addresses of earlier nodes, but they do not know its address.
    """
    service = context.sidecars[SERVICE]
    gathered = collectives.gather([context.node, service["addresses"][str(context.node)]])
    addresses = {**service["addresses"], **{str(node): address for node, address in gathered}}
    return replace(context, sidecars={**context.sidecars, SERVICE: {**service, "addresses": addresses}})


def open_restorer(
    trainer: "Trainer", client: KeeperClient | None, *, region: Collectives | None = None
) -> SnapshotRestorer:
    """Create the object that finds the newest window.

    Args:
        region: ranks of a few pipeline stages that restore from memory while the others wait; None for the whole job.
    """
    config, run_dir = trainer.config, trainer.context.run_dir
    return SnapshotRestorer(
        rank=trainer.context.rank,
        node=trainer.context.node,
        run_dir=run_dir,
        identity=trainer.identity,
        topology=trainer.topology_record,
        settings=trainer.replay_config(),
        collectives=trainer.collectives if region is None else region,
        client=client,
        folder=open_windows(config, run_dir) if region is None else None,
        report=trainer.report_own if region is None else lambda record: _report_problem(trainer, record),
    )


def _report_problem(trainer: "Trainer", record: Record) -> None:
    # Everything else is part of a recovery that is reported as a whole.
    if isinstance(record, SnapshotProblem):
        trainer.report_own(record)


def take_snapshots(
    trainer: "Trainer", client: KeeperClient, resumed: tuple[StoredWindow, WindowPlan] | None
) -> Snapshotter:
    """Begin to capture windows.

    Args:
        resumed: the window from which the job has continued, or to which it could return, and the plan in force.
    """
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
    """Begin new windows in a new membership, with copies on the present nodes; collective."""
    if trainer.config.snapshot.policy is None:
        return
    trainer.context = share_addresses(trainer.context, trainer.collectives)
    client = open_snapshot_client(trainer)
    assert client is not None, "snapshot.policy is not set"
    trainer.snapshots = take_snapshots(trainer, client, None)


def _slice_header(trainer: "Trainer", index: int) -> dict[str, str]:
    # A replay begins with slice 0: it has everything besides tensors.
    if index > 0:
        return {}
    placement = None if trainer.placement is None else trainer.placement.to_json()
    return {
        EXTRAS: json.dumps(trainer.engine.train_state().to_json()),
        PLACEMENT: json.dumps(placement),
        CONFIG: json.dumps(trainer.replay_config()),
        SETTINGS: json.dumps(trainer.identity.settings),
    }
