"""How a rank reaches its node's keeper, and which nodes keep copies for which."""

from pathlib import Path

from megatron_ft.config.job import JobConfig
from megatron_ft.control.worker import RankContext
from megatron_ft.planning.snapshot.peers import PeerAssignment, assign_peers
from megatron_ft.runtime.keeper.client import KeeperClient
from megatron_ft.runtime.storage.window_folder import WindowFolder

SERVICE = "keeper"
_FOLDER = "windows"


def peer_assignment(config: JobConfig) -> PeerAssignment:
    """Which nodes keep copies for which, over the job's failure domains.

    What a rank captures nobody else does: state that several ranks hold is cut over them, so no domain has a copy
    already.
    """
    launch = config.launch
    domains = launch.failure_domains or [f"node{node}" for node in range(launch.num_nodes)]
    return assign_peers(domains, config.snapshot.num_peer_copies)


def connect_keeper(config: JobConfig, context: RankContext, topology: dict[str, int]) -> KeeperClient | None:
    """A connection to the keeper of this rank's node; None where the job takes no snapshots.

    Raises:
        ControlError: the keeper is not there, or refuses this rank.
    """
    if config.snapshot.policy is None:
        return None
    service = context.services[SERVICE]
    hello = {
        "token": service["token"],
        "rank": context.rank,
        "world_size": context.world_size,
        "node": context.node,
        "generation": context.generation,
        "run_id": context.run_dir.name,
        "topology": topology,
        "peers": service["addresses"],
        "peer_nodes": list(peer_assignment(config).peers[context.node]),
        "persist_every": config.snapshot.persist_interval_windows,
        "persist_url": persist_url(config, context.run_dir),
        "num_persisted": config.snapshot.keep_persisted,
    }
    return KeeperClient(service["socket"], hello=hello)


def persist_url(config: JobConfig, run_dir: Path) -> str:
    """Where this run's windows are persisted: a path or a URL."""
    url = config.snapshot.persist_url
    return str(run_dir / _FOLDER) if url is None else f"{url.rstrip('/')}/{run_dir.name}"


def window_folder(config: JobConfig, run_dir: Path) -> WindowFolder | None:
    """The run's persisted windows; None where there has never been one."""
    if config.snapshot.persist_url is None and not (run_dir / _FOLDER).is_dir():
        return None
    return WindowFolder(persist_url(config, run_dir))
