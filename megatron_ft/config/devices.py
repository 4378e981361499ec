"""Devices that ``training.device=auto`` can choose, and the reasons why a device cannot run a configuration."""

import dataclasses

from megatron_ft.config.job import JobConfig
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError

DEVICES = ("cpu", "cuda")


def on_device(config: JobConfig, device: str) -> JobConfig:
    """Return ``config`` with ``training.device`` resolved to ``cpu`` or ``cuda``."""
    assert device in DEVICES, f"device {device!r} is not resolved"
    return dataclasses.replace(config, training=dataclasses.replace(config.training, device=device))


def refused_devices(config: JobConfig) -> dict[str, str]:
    """Return each possible device with the reason why it refuses ``config``; empty if it accepts the configuration.

    Both devices are possible with ``training.device=auto``, otherwise only the named one.
    """
    requested = config.training.device
    reasons = {}
    for device in DEVICES if requested == "auto" else (requested,):
        try:
            validate(on_device(config, device))
            reasons[device] = ""
        except ConfigError as error:
            reasons[device] = str(error)
    return reasons
