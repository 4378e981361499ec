"""The knobs of the control plane's decisions, out of a job's configuration."""

import dataclasses

from megatron_ft.config.job import JobConfig
from megatron_ft.control.detector import DetectorPolicy
from megatron_ft.control.membership.state import MembershipPolicy


def membership_policy(config: JobConfig) -> MembershipPolicy:
    """Of the state machine of ``membership``."""
    launch = config.launch
    return MembershipPolicy(
        num_nodes=launch.num_nodes,
        ranks_per_node=launch.ranks_per_node,
        start_timeout_seconds=launch.start_timeout_seconds,
        stop_timeout_seconds=launch.stop_timeout_seconds,
        max_restarts=launch.max_restarts,
        min_nodes=launch.min_nodes,
        position_timeout_seconds=launch.position_timeout_seconds,
        reform_timeout_seconds=launch.reform_timeout_seconds,
        max_nodes=launch.max_nodes,
        num_spare_nodes=launch.num_spare_nodes,
        join_window_seconds=launch.join_window_seconds,
        max_node_restarts=launch.max_node_restarts,
        restart_lost_nodes=launch.restart_lost_nodes,
        keeps_layout=launch.keep_layout,
        starts_nodes=launch.node_launcher != "none",
    )


def detector_policy(config: JobConfig) -> DetectorPolicy:
    """Of what counts as lost without having ended."""
    return DetectorPolicy(**dataclasses.asdict(config.detector))
