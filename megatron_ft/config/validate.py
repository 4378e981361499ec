"""All checks of a configuration that need neither files nor devices."""

import dataclasses

from megatron_ft.config.checks.data import check_data_knobs
from megatron_ft.config.checks.launch import (
    check_coming_nodes,
    check_detector,
    check_launch,
    check_launchers,
    check_names,
    check_run,
    check_telemetry,
)
from megatron_ft.config.checks.model import check_model, check_moe
from megatron_ft.config.checks.parallel import check_parallel, check_transformer_engine
from megatron_ft.config.checks.placement import check_placement
from megatron_ft.config.checks.primitives import finite_numbers, show
from megatron_ft.config.checks.recovery import check_snapshot, check_survival, check_upstream_log
from megatron_ft.config.checks.training import check_checkpoint, check_optimizer, check_precision, check_training
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError
from megatron_ft.failpoints import parse


def validate(config: JobConfig) -> None:
    """Check every key and every combination of keys. The first violation is raised.

    Raises:
        ConfigError: names key, value and constraint.
    """
    # First, because infinity passes every lower bound below.
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        if dataclasses.is_dataclass(group):
            finite_numbers(field.name, group)
    check_names(config)
    check_launch(config)
    check_detector(config.detector)
    check_launchers(config)
    check_run(config.run)
    check_coming_nodes(config)
    check_telemetry(config.telemetry)
    check_data_knobs(config.data)
    check_model(config.model)
    check_moe(config.model)
    check_training(config.training)
    check_precision(config.precision)
    check_optimizer(config.optimizer, config.training.train_iterations)
    check_checkpoint(config)
    check_parallel(config)
    check_transformer_engine(config)
    check_placement(config)
    check_snapshot(config)
    check_survival(config)
    check_upstream_log(config)
    _check_failpoints(config)


def _check_failpoints(config: JobConfig) -> None:
    """Check that failpoints parse and name a rank, node and iteration that exist: one that cannot fire is a mistake."""
    num_nodes, world_size = config.most_nodes, config.most_nodes * config.launch.ranks_per_node
    for text in config.testing.failpoints:
        failpoint = parse(text)
        for name, value, bound in (("rank", failpoint.rank, world_size), ("node", failpoint.node, num_nodes)):
            if value is not None and not 0 <= value < bound:
                raise ConfigError.of("testing.failpoints", text, f"must name a {name} in 0..{bound - 1}")
        last_generation = _last_generation(config)
        generation = 0 if failpoint.generation is None else failpoint.generation
        if generation < 0 or (last_generation is not None and generation > last_generation):
            constraint = (
                f"must name a generation that can occur with recovery.max_restarts={config.recovery.max_restarts} and "
                f"recovery.min_nodes={show(config.recovery.min_nodes)}, or it never fires"
            )
            raise ConfigError.of("testing.failpoints", text, constraint)
        last = config.training.train_iterations
        # A test with a fault that never happens would pass without testing anything.
        if failpoint.at_iteration is not None and not 0 <= failpoint.at_iteration <= last:
            constraint = f"must name an iteration in 0..training.train_iterations={last}, or it never fires"
            raise ConfigError.of("testing.failpoints", text, constraint)


def _last_generation(config: JobConfig) -> int | None:
    # Largest generation that can occur; None where nodes can join without limit.
    # The count of restarts begins again after every iteration of progress, and after each start nodes can be lost one
    # by one.
    if config.most_nodes > config.launch.num_nodes or config.nodes.restart_lost_nodes:
        return None
    num_restarts = config.recovery.max_restarts * (config.training.train_iterations + 1)
    return num_restarts + (num_restarts + 1) * (config.launch.num_nodes - config.fewest_nodes)
