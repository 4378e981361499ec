"""Snapshots fit the job: who holds copies, who starts the ranks."""

from megatron_ft.config.checks.primitives import above, at_least, require
from megatron_ft.config.job import JobConfig


def check_snapshot(config: JobConfig) -> None:
    """Everything about ``snapshot`` that needs no plan.

    Raises:
        ConfigError: names key, value and constraint.
    """
    snapshot, launch = config.snapshot, config.launch
    at_least(0, "snapshot.num_peer_copies", snapshot.num_peer_copies)
    above(0, "snapshot.bandwidth_bytes_per_second", snapshot.bandwidth_bytes_per_second)
    above(0, "snapshot.iteration_seconds", snapshot.iteration_seconds)
    at_least(1, "snapshot.host_memory_limit_bytes", snapshot.host_memory_limit_bytes)
    at_least(0, "snapshot.persist_interval_windows", snapshot.persist_interval_windows)
    at_least(0, "snapshot.keep_persisted", snapshot.keep_persisted)
    at_least(0, "snapshot.replan_interval_windows", snapshot.replan_interval_windows)
    if snapshot.policy is None:
        return
    require(
        launch.mode == "local" or config.dry_run,
        "snapshot.policy",
        snapshot.policy.get("_target_"),
        f"needs node processes, which own the memory of snapshots: launch.mode={launch.mode} has none; use "
        "launch.mode=local or snapshot=none",
    )
    num_domains = len(set(launch.member_domains))
    require(
        snapshot.num_peer_copies < num_domains,
        "snapshot.num_peer_copies",
        snapshot.num_peer_copies,
        f"must be below the number of failure domains, {num_domains}: copies lie in other domains than their node; "
        "0 keeps windows on their own node only",
    )
