"""Runs all checks of a configuration that need no files and no hardware: for CPU, for CUDA, or for each of them."""

import dataclasses
from collections.abc import Callable

from megatron_ft.config.checks import launch, model, parallel, recovery, training
from megatron_ft.config.checks.data import check_data_knobs, check_documents
from megatron_ft.config.checks.placement import check_placement
from megatron_ft.config.checks.primitives import finite_numbers, show
from megatron_ft.config.findings import Findings, find_errors
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.failpoints import Failpoint


def validate(config: JobConfig) -> None:
    """Check every key and the combinations of keys.

    Raises:
        ConfigError: a rule is violated; the message names key, value and constraint.
        SeveralErrors: several independent rules are violated.
    """
    found = Findings()
    find_errors(config, CHECKS, found)
    found.raise_errors()


def _check_numbers(config: JobConfig) -> None:
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        if dataclasses.is_dataclass(group):
            finite_numbers(field.name, group)


def _check_failpoints(config: JobConfig) -> None:
    """Check that failpoints (injected faults) can be parsed, and name ranks, nodes and iterations that can occur."""
    num_nodes, world_size = config.most_nodes, config.most_nodes * config.launch.ranks_per_node
    for text in config.testing.failpoints:
        failpoint = Failpoint.parse(text)
        for name, value, bound in (("rank", failpoint.rank, world_size), ("node", failpoint.node, num_nodes)):
            if value is not None and not 0 <= value < bound:
                raise ConfigError.of("testing.failpoints", text, f"must name a {name} in 0..{bound - 1}")
        last_generation = _last_generation(config)
        generation = 0 if failpoint.generation is None else failpoint.generation
        if generation < 0 or (last_generation is not None and generation > last_generation):
            constraint = (
                f"must name a generation that can occur with recovery.max_restarts={config.recovery.max_restarts} and "
                f"recovery.min_nodes={show(config.recovery.min_nodes)}; otherwise the fault is never injected"
            )
            raise ConfigError.of("testing.failpoints", text, constraint)
        last = config.training.train_iterations
        # A test with a fault that never happens would pass without testing anything.
        if failpoint.at_iteration is not None and not 0 <= failpoint.at_iteration <= last:
            constraint = (
                f"must name an iteration in 0..training.train_iterations={last}; otherwise the fault is never injected"
            )
            raise ConfigError.of("testing.failpoints", text, constraint)


def _last_generation(config: JobConfig) -> int | None:
    # Returns the largest generation that can occur, or None if nodes can join without limit. Every finished iteration
    # resets the count of restarts, and after each start nodes can be lost one by one.
    if config.most_nodes > config.launch.num_nodes or config.nodes.restart_lost_nodes:
        return None
    num_restarts = config.recovery.max_restarts * (config.training.train_iterations + 1)
    return num_restarts + (num_restarts + 1) * (config.launch.num_nodes - config.fewest_nodes)


CHECKS: tuple[Callable[[JobConfig], None], ...] = (
    # Must be the first check, because infinity passes all checks of lower bounds.
    _check_numbers,
    *launch.CHECKS,
    lambda config: check_data_knobs(config.data),
    *model.CHECKS,
    *training.CHECKS,
    check_documents,
    *parallel.CHECKS,
    check_placement,
    *recovery.CHECKS,
    _check_failpoints,
)
"""All checks, in their order. A check may assume that the checks before it have passed."""

DEVICES = ("cpu", "cuda")


def on_device(config: JobConfig, device: str) -> JobConfig:
    """Return ``config`` with ``training.device`` set to ``device``, which is ``cpu`` or ``cuda``."""
    assert device in DEVICES, f"device {device!r} must be cpu or cuda"
    return dataclasses.replace(config, training=dataclasses.replace(config.training, device=device))


def refused_devices(config: JobConfig) -> dict[str, str]:
    """Check ``config`` for each possible device. Map each device to its errors, one per line, or to an empty text.

    Both ``cpu`` and ``cuda`` are possible with ``training.device=auto``, otherwise only the configured device.
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
