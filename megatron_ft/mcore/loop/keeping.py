"""How a rank reaches its node's keeper, and which nodes keep copies for which."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.mcore.checkpoint.agreement import Agreement
from megatron_ft.planning.snapshot.peers import PeerAssignment, assign_peers
from megatron_ft.runtime.keeper.client import KeeperClient
from megatron_ft.runtime.storage.window_folder import WindowFolder

if TYPE_CHECKING:
    from megatron_ft.mcore.loop.trainer import Trainer

SERVICE = "keeper"
_FOLDER = "windows"


def peer_assignment(config: JobConfig) -> PeerAssignment:
    """Which nodes keep copies for which, over the job's failure domains; nodes count from 0 among those that are there.

    What a rank captures nobody else does: state that several ranks hold is cut over them, so no domain has a copy
    already.
    """
    return assign_peers(config.launch.member_domains, config.snapshot.num_peer_copies)


def connect_keeper(trainer: "Trainer") -> KeeperClient | None:
    """A connection to the keeper of this rank's node; None where the job takes no snapshots.

    Raises:
        ControlError: the keeper is not there, or refuses this rank.
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


def share_addresses(context: RankContext, agreement: Agreement) -> RankContext:
    """``context`` with the addresses of the keepers of all nodes that are there, told by their own ranks; collective.

    Nodes that join later know of all that were there before, and these not of them.
    """
    service = context.sidecars[SERVICE]
    told = agreement.gather([context.node, service["addresses"][str(context.node)]])
    addresses = {**service["addresses"], **{str(node): address for node, address in told}}
    return replace(context, sidecars={**context.sidecars, SERVICE: {**service, "addresses": addresses}})


def persist_url(config: JobConfig, run_dir: Path) -> str:
    """Where this run's windows are persisted: a path or a URL."""
    url = config.snapshot.persist_url
    return str(run_dir / _FOLDER) if url is None else f"{url.rstrip('/')}/{run_dir.name}"


def window_folder(config: JobConfig, run_dir: Path) -> WindowFolder | None:
    """The run's persisted windows; None where there has never been one."""
    if config.snapshot.persist_url is None and not (run_dir / _FOLDER).is_dir():
        return None
    return WindowFolder(persist_url(config, run_dir))
