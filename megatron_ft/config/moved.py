"""Keys that were moved to other groups. Command lines with old names are refused; files with old names can be read."""

from typing import Any

from megatron_ft.errors import ConfigError

MOVED = {
    "launch.interface": "control.interface",
    "launch.tls_dir": "control.tls_dir",
    "launch.max_restarts": "recovery.max_restarts",
    "launch.min_nodes": "recovery.min_nodes",
    "launch.keep_layout": "recovery.keep_layout",
    "launch.position_timeout_seconds": "recovery.position_timeout_seconds",
    "launch.reform_timeout_seconds": "recovery.reconfigure_timeout_seconds",
    "launch.max_nodes": "nodes.max_nodes",
    "launch.num_spare_nodes": "nodes.num_spare_nodes",
    "launch.join_window_seconds": "nodes.join_window_seconds",
    "launch.max_node_restarts": "nodes.max_node_restarts",
    "launch.restart_lost_nodes": "nodes.restart_lost_nodes",
    "launch.failure_domains": "topology.failure_domains",
    "launch.failure_domain_source": "topology.failure_domain_source",
    "launch.gpu_memory_bytes": "limits.gpu_memory_bytes",
    "launch.host_memory_bytes": "limits.host_memory_bytes",
    "launch.failpoints": "testing.failpoints",
    "launch.membership_schedule": "testing.membership_schedule",
}
"""Maps the old dotted name of each moved key to its new dotted name."""


def with_present_keys(values: Any) -> Any:
    """Return a recorded configuration (a result of ``to_dict``) in which every moved key has its new name.

    Parts of ``values`` that should be mappings but are not remain unchanged; ``from_dict`` refuses them later.

    Raises:
        ConfigError: ``values`` contains both the old and the new name of a key.
    """
    if not isinstance(values, dict):
        return values
    groups = {group: dict(keys) if isinstance(keys, dict) else keys for group, keys in values.items()}
    for old, new in MOVED.items():
        (group, name), (new_group, new_name) = old.split("."), new.split(".")
        former = groups.get(group)
        if not isinstance(former, dict) or name not in former:
            continue
        present = groups.setdefault(new_group, {})
        if not isinstance(present, dict) or new_name in present:
            raise ConfigError.of(old, former[name], f"is now {new}, which is also given; remove one of the two")
        present[new_name] = former.pop(name)
    return groups
