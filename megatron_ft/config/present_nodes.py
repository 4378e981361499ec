"""Configuration of a job on the nodes that train at present."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.job import JobConfig


def config_of(job: JobConfig, nodes: Sequence[int]) -> JobConfig:
    """Return ``job`` adapted to ``nodes``, the node number of each rank of one membership.

    Failure domains keep their names; a node without a name is its own domain. ``placement.min_replicas`` and
    ``snapshot.num_peer_copies`` are lowered if there are too few domains. With ``recovery.keep_layout`` only the
    failure domains change, because the number of nodes stays the same.
    """
    # With a kept layout the order of ``nodes`` determines the ranks of each node: a spare has those of the lost node.
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
            # ``derive_placement`` sets this size to the remaining ranks, which form one expert group.
            parallel=replace(job.parallel, expert_model_parallel_size=1),
            placement=replace(job.placement, min_replicas=min(job.placement.min_replicas, num_domains)),
            snapshot=replace(job.snapshot, num_peer_copies=min(job.snapshot.num_peer_copies, num_domains - 1)),
        )
    )
