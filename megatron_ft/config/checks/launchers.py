"""What a job lacks that torchrun, ft_launcher or srun start: keys that would do nothing there are refused.

Others with the same condition are refused where they are checked: ``launch.max_restarts``, ``launch.min_nodes``,
``launch.keep_layout``, spares and nodes that join (``survival.py``), ``snapshot.policy`` (``snapshot.py``).
"""

import dataclasses

from megatron_ft.config.checks.primitives import require, show
from megatron_ft.config.detector import DetectorConfig
from megatron_ft.config.job import JobConfig
from megatron_ft.config.launch import LaunchConfig

_LOCAL_ONLY = {
    "interface": "ranks listen where GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say",
    "tls_dir": "there is no control channel to encrypt",
    "forkserver_socket": "the launcher starts the ranks",
    "stop_timeout_seconds": "the launcher decides when ranks are killed",
}
"""Keys of ``launch`` that only the control plane reads, and why they say nothing elsewhere."""


def check_launchers(config: JobConfig) -> None:
    """Keys of the control plane have their defaults where there is none.

    Raises:
        ConfigError: names the key.
    """
    launch, detector = config.launch, config.detector
    if launch.mode == "local":
        return
    for name, reason in _LOCAL_ONLY.items():
        _is_default(f"launch.{name}", getattr(launch, name), getattr(LaunchConfig(), name), launch.mode, reason)
    for field in dataclasses.fields(detector):
        wanted, reason = getattr(DetectorConfig(), field.name), "no node's process watches the ranks"
        _is_default(f"detector.{field.name}", getattr(detector, field.name), wanted, launch.mode, reason)
    if launch.mode == "torchrun":
        _is_default("launch.master_port", launch.master_port, 0, launch.mode, "the launcher's MASTER_PORT is taken")


def _is_default(key: str, value: object, wanted: object, mode: str, reason: str) -> None:
    require(value == wanted, key, value, f"must be left at {show(wanted)} with launch.mode={mode}: {reason}")
