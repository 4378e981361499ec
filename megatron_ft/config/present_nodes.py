"""Configuration of a job for the nodes of one membership."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.job import JobConfig


def config_of(job: JobConfig, nodes: Sequence[int]) -> JobConfig:
    """Return ``job`` for the ranks on ``nodes`` only (original node numbers, one for each rank).

    Failure domains keep their names; a node without a name is its own domain. The minimum number of replicas and the
    peer copies of windows are lowered to the number of domains. With ``recovery.keep_layout`` the number of nodes stays
    the same, and only the domains change.
    """
    # With a kept layout ranks go by place: the order of nodes says which one has the place of which.
    present = list(dict.fromkeys(nodes)) if job.recovery.keep_layout else sorted(set(nodes))
    names = dict(enumerate(job.topology.failure_domains))
    domains = [names.get(node, f"node{node}") for node in present]
    topology = replace(job.topology, failure_domains=domains)
    if job.recovery.keep_layout:
        return replace(job, topology=topology)
    num_domains = len(set(domains))
    return derive_placement(
        replace(
            job,
            launch=replace(job.launch, num_nodes=len(present)),
            topology=topology,
            # ``derive_placement`` sets it again: all ranks that are left are one expert group.
            parallel=replace(job.parallel, expert_model_parallel_size=1),
            placement=replace(job.placement, min_replicas=min(job.placement.min_replicas, num_domains)),
            snapshot=replace(job.snapshot, num_peer_copies=min(job.snapshot.num_peer_copies, num_domains - 1)),
        )
    )
