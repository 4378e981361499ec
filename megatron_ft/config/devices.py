"""Both answers of ``training.device=auto``: the configuration on each device, and why a device refuses it."""

import dataclasses

from megatron_ft.config.job import JobConfig
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError

DEVICES = ("cpu", "cuda")


def on_device(config: JobConfig, device: str) -> JobConfig:
    """``config`` with ``training.device`` decided: ``cpu`` or ``cuda``."""
    assert device in DEVICES, f"device {device!r} is not decided"
    return dataclasses.replace(config, training=dataclasses.replace(config.training, device=device))


def refused_devices(config: JobConfig) -> dict[str, str]:
    """Why each possible device refuses ``config``, with an empty text for a device that accepts it.

    ``training.device=auto`` can become both devices; a named device is the only key of the result.
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
