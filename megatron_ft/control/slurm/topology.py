"""Reads failure domains from Slurm's topology: a node's domain is its leaf switch.

Sources: the manual pages scontrol(1) (``show topology``, variable ``SLURM_TOPO_LEN``) and topology.conf(5); the tests
read output of Slurm 22.05. ``SLURM_TOPOLOGY_ADDR`` is not used, because it describes one node only.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from megatron_ft.config.job import JobConfig
from megatron_ft.control.launchers.torchrun import expand_nodelist
from megatron_ft.control.slurm import calls
from megatron_ft.control.slurm.nodes import Allocation
from megatron_ft.errors import ConfigError

KEY = "topology.failure_domain_source"
SOURCE = "slurm_topology"
_COMMAND = ("scontrol", "show", "topology")
_SWITCH = re.compile(r"SwitchName=(?P<name>\S+) Level=(?P<level>\d+)(?: LinkSpeed=\S+)?(?: Nodes=(?P<nodes>\S+))?")


def with_failure_domains(config: JobConfig, variables: Mapping[str, str]) -> JobConfig:
    """Return ``config`` with failure domains read from Slurm, as if the user had listed them.

    Args:
        variables: the environment of this process, which runs in the job's allocation.

    Raises:
        ConfigError: there is no allocation, no topology, or a node has no leaf switch.
    """
    if config.topology.failure_domain_source != SOURCE:
        return config
    allocation = Allocation.read(variables, most_nodes=config.most_nodes)
    domains = _domains_of(allocation.hosts[: config.most_nodes], _read_topology(variables))
    listed = dataclasses.replace(config.topology, failure_domain_source="listed", failure_domains=domains)
    return dataclasses.replace(config, topology=listed)


def _read_topology(variables: Mapping[str, str]) -> str:
    """Return the output of ``scontrol show topology``.

    Raises:
        ConfigError: the command cannot be run, fails, does not answer, or prints nothing because there is no topology
            plugin.
    """
    # ``SLURM_TOPO_LEN`` would truncate the lines, and so the lists of nodes.
    whole_lines = {name: value for name, value in variables.items() if name != "SLURM_TOPO_LEN"}
    try:
        done = calls.run(_COMMAND, environment=whole_lines)
    except calls.SlurmError as error:
        raise _refused(f"`{' '.join(_COMMAND)}` failed: {error}") from None
    if done.returncode != 0 or not done.stdout.strip():  # without a plugin it ends with 0 and prints nothing
        said = done.stderr.strip() or f"nothing (exit code {done.returncode})"
        raise _refused(
            f"needs a Slurm cluster with TopologyPlugin=topology/tree; `{' '.join(_COMMAND)}` prints: {said}. "
            "List the domains in topology.failure_domains instead, or set neither of the two keys"
        )
    return done.stdout


def _domains_of(hosts: Sequence[str], topology: str) -> list[str]:
    """Return the leaf switch of each host.

    Args:
        topology: output of ``scontrol show topology``.

    Raises:
        ConfigError: a line does not describe a switch, the nodes of a switch cannot be read, or a host does not have
            exactly one leaf switch.
    """
    found: dict[str, list[str]] = {host: [] for host in hosts}
    for line in filter(None, map(str.strip, topology.splitlines())):
        switch = _SWITCH.match(line)
        if switch is None:
            raise _refused(
                f"needs TopologyPlugin=topology/tree, with which each line of `{' '.join(_COMMAND)}` begins with "
                f"SwitchName and Level; this line does not: {line}"
            )
        # Only leaf switches count: a switch of a higher level lists the nodes of all leaves below it.
        if switch["level"] == "0" and switch["nodes"]:
            for host in _nodes_below(switch["name"], switch["nodes"]):
                found.get(host, []).append(switch["name"])
    for host, switches in found.items():
        if len(switches) != 1:
            shown = ", ".join(switches) or "none"
            raise _refused(
                f"needs exactly one leaf switch for each node of the job; leaf switches of {host} in Slurm's topology: "
                f"{shown}"
            )
    return [switches[0] for switches in found.values()]


def _nodes_below(switch: str, nodes: str) -> list[str]:
    try:
        return expand_nodelist("Nodes", nodes)
    except ConfigError as error:
        raise _refused(f"cannot read the nodes of switch {switch}: {error}") from None


def summary(config: JobConfig) -> str:
    """Return one line with the domain of each node of the job."""
    nodes_of: dict[str, list[int]] = {}
    for node, name in enumerate(config.topology.failure_domains):
        nodes_of.setdefault(name, []).append(node)
    parts = [f"{name} (nodes {', '.join(map(str, nodes))})" for name, nodes in nodes_of.items()]
    return f"failure domains from Slurm's topology: {', '.join(parts)}"


def _refused(constraint: str) -> ConfigError:
    return ConfigError.of(KEY, SOURCE, constraint)
