"""Configuration of a job for the nodes of one membership."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.job import JobConfig


def config_of(job: JobConfig, nodes: Sequence[int]) -> JobConfig:
    """Return ``job`` for the ranks on ``nodes`` alone (original node numbers, one for each rank).

    Failure domains keep their names; a node without one is a domain of its own. Minimum replicas and peer copies of
    windows are lowered to the number of domains. With ``launch.keep_layout`` the number of nodes stays the same and
    only their domains change.
    """
    launch = job.launch
    # With a kept layout ranks go by place: the order of nodes says which one has the place of which.
    present = list(dict.fromkeys(nodes)) if launch.keep_layout else sorted(set(nodes))
    names = dict(enumerate(launch.failure_domains))
    domains = [names.get(node, f"node{node}") for node in present]
    if launch.keep_layout:
        return replace(job, launch=replace(launch, failure_domains=domains))
    num_domains = len(set(domains))
    return derive_placement(
        replace(
            job,
            launch=replace(launch, num_nodes=len(present), failure_domains=domains),
            # ``derive_placement`` sets it again: all ranks that are left are one expert group.
            parallel=replace(job.parallel, expert_model_parallel_size=1),
            placement=replace(job.placement, min_replicas=min(job.placement.min_replicas, num_domains)),
            snapshot=replace(job.snapshot, num_peer_copies=min(job.snapshot.num_peer_copies, num_domains - 1)),
        )
    )
