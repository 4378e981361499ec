"""Checks of nodes, launchers, addresses, failure detection, the run's name and telemetry."""

import dataclasses
import ipaddress
import re

from megatron_ft.config.checks.primitives import above, at_least, one_of, require, show
from megatron_ft.config.job import DetectorConfig, JobConfig, RunConfig
from megatron_ft.config.requirements import value_of
from megatron_ft.config.telemetry import TelemetryConfig
from megatron_ft.serde import means_every_interface

# The name of a run is the name of its folder. Without separators and a leading dot, the folder is inside ``run.dir``.
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# ``sockaddr_un`` has 108 bytes, one of them for the closing zero (unix(7)).
LONGEST_SOCKET_PATH = 107


def _check_launch(config: JobConfig) -> None:
    """Check launch modes, numbers of nodes and ranks, timeouts and memory limits."""
    launch, max_restarts = config.launch, config.recovery.max_restarts
    one_of(("local", "torchrun", "srun"), "launch.mode", launch.mode)
    wanted_values: list[tuple[str, str | None, str | None]] = [("launch.mode", launch.mode, "local")]
    if ":" not in launch.node_launcher:  # for other launchers, the socket is checked at the job's start
        one_of(("local", "srun", "none"), "launch.node_launcher", launch.node_launcher)
        wanted_values.append(("launch.forkserver_socket", launch.forkserver_socket, None))
    for key, value, wanted in wanted_values:
        constraint = (
            f"must be {show(wanted)} with launch.node_launcher={launch.node_launcher}, which uses other machines"
        )
        require(launch.node_launcher == "local" or value == wanted, key, value, constraint)
    at_least(1, "launch.num_nodes", launch.num_nodes)
    at_least(1, "launch.ranks_per_node", launch.ranks_per_node)
    at_least(1, "launch.ranks_per_gpu", launch.ranks_per_gpu)
    require(0 <= launch.master_port <= 65535, "launch.master_port", launch.master_port, "must be in 0..65535")
    above(0, "launch.start_timeout_seconds", launch.start_timeout_seconds)
    above(0, "launch.stop_timeout_seconds", launch.stop_timeout_seconds)
    at_least(0, "recovery.max_restarts", max_restarts)
    require(
        max_restarts == 0 or launch.mode == "local",
        "recovery.max_restarts",
        max_restarts,
        f"must be 0 with launch.mode={launch.mode}: that launcher restarts ranks itself (torchrun --max-restarts)",
    )
    at_least(1, "limits.gpu_memory_bytes", config.limits.gpu_memory_bytes)
    at_least(1, "limits.host_memory_bytes", config.limits.host_memory_bytes)


def _check_topology(config: JobConfig) -> None:
    launch, nodes, topology = config.launch, config.nodes, config.topology
    domains, most = len(topology.failure_domains), config.most_nodes
    counts = f"launch.num_nodes={launch.num_nodes}"
    if nodes.max_nodes is not None:
        counts = f"nodes.max_nodes={nodes.max_nodes}"
    elif nodes.num_spare_nodes:
        counts += f" and nodes.num_spare_nodes={nodes.num_spare_nodes}"
    require(
        domains in (0, most),
        "topology.failure_domains",
        topology.failure_domains,
        f"must have {most} names, one for each node ({counts}), or be empty; it has {domains}",
    )
    above(0, "topology.link_bytes_per_second", topology.link_bytes_per_second)
    key, source = "topology.failure_domain_source", topology.failure_domain_source
    one_of(("listed", "slurm_topology"), key, source)
    if source == "listed":
        return
    other = f"launch.node_launcher={launch.node_launcher}"
    require(
        launch.node_launcher == "srun",
        key,
        source,
        f"must be 'listed' with {other}: only launch.node_launcher=srun can read Slurm's topology",
    )
    require(
        not topology.failure_domains,
        "topology.failure_domains",
        topology.failure_domains,
        f"must be empty with {key}={source}, which takes the names from Slurm",
    )


def _check_nodes(config: JobConfig) -> None:
    launch, nodes, min_nodes = config.launch, config.nodes, config.recovery.min_nodes
    at_least(0, "nodes.num_spare_nodes", nodes.num_spare_nodes)
    fewest = launch.num_nodes + nodes.num_spare_nodes
    require(
        nodes.max_nodes is None or nodes.max_nodes >= fewest,
        "nodes.max_nodes",
        nodes.max_nodes,
        f"must be null or at least {fewest}, the sum of launch.num_nodes={launch.num_nodes} and "
        f"nodes.num_spare_nodes={nodes.num_spare_nodes}",
    )
    at_least(0, "nodes.num_prebuilt_parts", nodes.num_prebuilt_parts)
    require(
        not nodes.num_prebuilt_parts or (config.recovery.keep_layout and nodes.num_spare_nodes > 0),
        "nodes.num_prebuilt_parts",
        nodes.num_prebuilt_parts,
        "must be null or 0 unless recovery.keep_layout=true and nodes.num_spare_nodes is above 0: only such a job has "
        "spares that can build model parts in advance",
    )
    at_least(0, "nodes.join_window_seconds", nodes.join_window_seconds)
    at_least(0, "nodes.max_node_restarts", nodes.max_node_restarts)
    require(
        config.may_change_nodes or not nodes.restart_lost_nodes,
        "nodes.restart_lost_nodes",
        nodes.restart_lost_nodes,
        f"must be false with recovery.min_nodes={show(min_nodes)}: the job ends when it loses a node; set "
        f"recovery.min_nodes below launch.num_nodes={launch.num_nodes}, or recovery.keep_layout=true",
    )


def _check_detector(detector: DetectorConfig) -> None:
    """Check that all times are above 0, and that each timeout exceeds the times on which it depends."""
    interval, timeout = detector.heartbeat_interval_seconds, detector.heartbeat_timeout_seconds
    above(0, "detector.heartbeat_interval_seconds", interval)
    require(
        # One late heartbeat must not make a node count as lost.
        timeout >= 2 * interval,
        "detector.heartbeat_timeout_seconds",
        timeout,
        f"must be at least twice detector.heartbeat_interval_seconds={interval:g}",
    )
    vanished = detector.vanished_seconds
    require(
        vanished is None or 1 <= vanished < timeout,
        "detector.vanished_seconds",
        vanished,
        f"must be at least 1 and below detector.heartbeat_timeout_seconds={timeout:g}, or null",
    )
    lost_controller = detector.lost_controller_seconds
    require(
        # A controller that sends no answer for ``timeout`` is replaced. Nodes must wait longer than this.
        lost_controller > timeout,
        "detector.lost_controller_seconds",
        lost_controller,
        f"must be above detector.heartbeat_timeout_seconds={timeout:g}",
    )
    above(0, "detector.hang_seconds", detector.hang_seconds)
    above(0, "detector.hang_iterations", detector.hang_iterations)
    above(0, "detector.min_hang_seconds", detector.min_hang_seconds)


def _check_interface(interface: str) -> None:
    key = "control.interface"
    require(
        bool(interface.strip()), key, repr(interface), "must be the address of one network interface, e.g. 127.0.0.1"
    )
    # The token of a job authenticates but does not encrypt messages. So the user has to choose a trusted network.
    every = means_every_interface(interface)
    require(not every, key, interface, "must not mean all network interfaces; give the address of one, e.g. 127.0.0.1")
    try:
        ipaddress.ip_address(interface.strip("[]"))
    except ValueError:
        pattern = r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?"
        require(
            re.fullmatch(pattern, interface) is not None,
            key,
            interface,
            "must be the IP address or host name of one network interface",
        )


def _check_socket(path: str | None) -> None:
    require(
        path is None or 0 < len(path.encode()) <= LONGEST_SOCKET_PATH,
        "launch.forkserver_socket",
        path,
        f"must be a path of 1 to {LONGEST_SOCKET_PATH} bytes, the limit of Unix socket addresses",
    )


def _check_run(run: RunConfig) -> None:
    """Check that the run's name is a single folder name, and that ``run.resume`` and ``run.start_over`` are valid."""
    one_of(("never", "must", "auto"), "run.resume", run.resume)
    require(bool(run.dir.strip()), "run.dir", repr(run.dir), "must name a folder")
    require(
        run.name is None or RUN_NAME.fullmatch(run.name) is not None,
        "run.name",
        run.name,
        "must be 1 to 100 letters, digits, dots, dashes or underscores and start with a letter or digit",
    )
    require(
        run.resume != "must" or run.name is not None,
        "run.name",
        run.name,
        "must be given with run.resume=must, to name the run that is resumed",
    )
    require(
        not run.start_over or run.resume == "auto",
        "run.start_over",
        show(run.start_over),
        f"must be false with run.resume={run.resume}: only run.resume=auto can start a run over",
    )


def _check_telemetry(telemetry: TelemetryConfig) -> None:
    """Check ``telemetry``: sinks, intervals, profiles, modes of terminal and wandb, and limits of alerts."""
    for name, spec in telemetry.sinks.items():
        is_named = isinstance(spec, dict) and isinstance(spec.get("_target_"), str)
        why = "must be null or a mapping in which _target_ names the class of a sink"
        require(spec is None or is_named, f"telemetry.sinks.{name}", repr(spec), why)
    for name in ("metrics", "events"):
        is_given = telemetry.sinks.get(name) is not None
        why = "must not be null: resumed runs and reports read the file that this sink writes"
        require(is_given, f"telemetry.sinks.{name}", "null", why)
    at_least(1, "telemetry.log_interval_iterations", telemetry.log_interval_iterations)
    at_least(0, "telemetry.expert_load_interval_iterations", telemetry.expert_load_interval_iterations)
    above(0, "telemetry.peak_tflops", telemetry.peak_tflops)
    at_least(1, "telemetry.profile_first_iteration", telemetry.profile_first_iteration)
    at_least(1, "telemetry.profile_iterations", telemetry.profile_iterations)
    ranks = telemetry.profile_ranks
    is_valid = bool(ranks) and min(ranks) >= 0 and len(set(ranks)) == len(ranks)
    require(
        is_valid,
        "telemetry.profile_ranks",
        ranks,
        "must contain at least one rank, no negative rank, and no rank twice",
    )
    one_of(("live", "plain", "auto"), "telemetry.progress", telemetry.progress)
    one_of(("online", "offline", "disabled", "auto"), "telemetry.wandb", telemetry.wandb)
    require(bool(telemetry.wandb_project), "telemetry.wandb_project", "''", "must not be empty")
    for name in ("single_loss_survival", "free_disk_share", "lost_token_share"):
        share: float | None = getattr(telemetry, f"alert_{name}")
        require(share is None or 0 < share <= 1, f"telemetry.alert_{name}", share, "must be above 0 and at most 1")
    above(0, "telemetry.alert_stall_share", telemetry.alert_stall_share)
    above(1, "telemetry.alert_windows_behind", telemetry.alert_windows_behind)
    above(1, "telemetry.alert_slowest_rank_over_median", telemetry.alert_slowest_rank_over_median)


def _check_names(config: JobConfig) -> None:
    """Check ``dry_run_format`` and ``model.name``. Generated names of runs begin with ``model.name``."""
    require(
        RUN_NAME.fullmatch(config.model.name) is not None,
        "model.name",
        repr(config.model.name),
        "must be 1 to 100 letters, digits, dots, dashes or underscores and start with a letter or digit",
    )
    one_of(("table", "json"), "dry_run_format", config.dry_run_format)


def _check_coming_nodes(config: JobConfig) -> None:
    """Check that nodes which Slurm starts by itself (``launch.node_launcher=none``) can find the run's folder."""
    if config.launch.node_launcher == "none":
        why = (
            "with launch.node_launcher=none: nodes find the controller's address in the run's folder, even after "
            "another command has resumed the run"
        )
        require(config.run.name is not None, "run.name", config.run.name, f"must be given {why}")
        require(config.run.resume != "never", "run.resume", config.run.resume, f"must be 'auto' or 'must' {why}")


_LOCAL_ONLY = {
    "control.interface": "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface of ranks",
    "control.tls_dir": "there is no control channel to encrypt",
    "launch.forkserver_socket": "the launcher starts the ranks",
    "launch.stop_timeout_seconds": "the launcher decides when ranks are killed",
    "training.exit_after_minutes": "launchers take this exit for a failure; let the scheduler send a signal in time",
}
"""Keys that have an effect only with ``launch.mode=local``. Each is mapped to the reason why other modes ignore it."""


def _check_launchers(config: JobConfig) -> None:
    """Check that, with ``launch.mode=torchrun`` or ``srun``, the keys that this mode ignores have their defaults.

    ``_check_launch`` checks ``recovery.max_restarts``. The file ``recovery.py`` checks keys of recovery and snapshots.

    Raises:
        ConfigError: a key that the mode ignores does not have its default; the message names the key.
    """
    launch, detector = config.launch, config.detector
    if launch.mode == "local":
        return
    for key, reason in _LOCAL_ONLY.items():
        _is_default(key, value_of(config, key), value_of(JobConfig(), key), launch.mode, reason)
    for field in dataclasses.fields(detector):
        wanted, reason = getattr(DetectorConfig(), field.name), "no agent watches the ranks"
        _is_default(f"detector.{field.name}", getattr(detector, field.name), wanted, launch.mode, reason)
    if launch.mode == "torchrun":
        _is_default("launch.master_port", launch.master_port, 0, launch.mode, "the launcher chooses MASTER_PORT")


def _is_default(key: str, value: object, wanted: object, mode: str, reason: str) -> None:
    require(value == wanted, key, value, f"must be left at {show(wanted)} with launch.mode={mode}: {reason}")


CHECKS = (
    _check_launch,
    _check_nodes,
    _check_names,
    lambda config: _check_run(config.run),
    _check_coming_nodes,
    _check_topology,
    lambda config: _check_interface(config.control.interface),
    lambda config: _check_socket(config.launch.forkserver_socket),
    lambda config: _check_detector(config.detector),
    _check_launchers,
    lambda config: _check_telemetry(config.telemetry),
)
"""All checks of this file."""
