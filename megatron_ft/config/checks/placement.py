"""Checks of expert replicas: slots and replicas must fit the experts, ranks and failure domains."""

from megatron_ft.config.checks.primitives import one_of
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import fewest_domains
from megatron_ft.config.placement import SHARES
from megatron_ft.errors import ConfigError
from megatron_ft.topology import Topology

BACKENDS = ("auto", "reference", "cpp", "cuda")
_OTHER_DEVICE = {"cpp": "cuda", "cuda": "cpu"}
"""Maps a dispatch backend to the device on which it cannot be used."""


def check_placement(config: JobConfig) -> None:
    """Check the keys of ``placement``, as far as this is possible before a placement is computed.

    Raises:
        ConfigError: a rule is violated; the message names key, value and constraint.
    """
    placement, model, parallel = config.placement, config.model, config.parallel
    one_of(BACKENDS, "placement.dispatch_backend", placement.dispatch_backend)
    one_of(SHARES, "placement.shares", placement.shares)
    if placement.algorithm is None:
        _check_unused(config)
        return
    if model.num_moe_experts is None:
        raise ConfigError.of("placement.algorithm", placement.algorithm, "must be null in a dense model")
    if parallel.expert_model_parallel_size != 1:
        raise ConfigError.of(
            "parallel.expert_model_parallel_size",
            parallel.expert_model_parallel_size,
            "must be 1 if placement.algorithm is given: all ranks of a stage then form one expert-parallel group",
        )
    if parallel.expert_tensor_parallel_size != 1:
        raise ConfigError.of(
            "parallel.expert_tensor_parallel_size",
            parallel.expert_tensor_parallel_size,
            "must be 1 if placement.algorithm is given",
        )
    _check_backend(config)
    _check_slots(config)
    _check_rebalancing(config)


def _check_backend(config: JobConfig) -> None:
    backend, device = config.placement.dispatch_backend, config.training.device
    if _OTHER_DEVICE.get(backend) == device:
        constraint = f"must be auto, reference or {'cuda' if device == 'cuda' else 'cpp'} with training.device={device}"
        raise ConfigError.of("placement.dispatch_backend", backend, constraint)


def _check_unused(config: JobConfig) -> None:
    # Without an algorithm these keys have no effect. They are refused, because a user who sets them expects replicas.
    for name in ("rebalance_interval_iterations", "schedule", "loads_file", "num_slots_per_rank"):
        value = getattr(config.placement, name)
        if value:
            raise ConfigError.of(
                f"placement.{name}", value, "must not be set without placement.algorithm, e.g. placement=overlap_search"
            )
    copies = config.placement.state_copies
    if copies is not None:
        if not config.recovery.keep_layout:
            raise ConfigError.of(
                "placement.state_copies",
                copies,
                "must be null unless placement.algorithm or recovery.keep_layout=true is given: otherwise, no recovery "
                "can use copies of optimizer shards",
            )
        _check_copies(config, "state_copies", copies)


def _check_slots(config: JobConfig) -> None:
    placement, num_experts = config.placement, config.model.num_moe_experts or 0
    stage_size = Topology.of(config.parallel, config.world_size).stage_size
    if placement.num_slots_per_rank is not None:
        slots = placement.num_slots_per_rank * stage_size
        if placement.num_slots_per_rank < 1 or slots < num_experts:
            raise ConfigError.of(
                "placement.num_slots_per_rank",
                placement.num_slots_per_rank,
                f"must be larger: the {stage_size} ranks of a pipeline stage together need at least "
                f"model.num_moe_experts={num_experts} slots, one for each expert",
            )
    _check_copies(config, "min_replicas", placement.min_replicas)
    _check_copies(config, "state_copies", placement.state_copies)


def _check_copies(config: JobConfig, name: str, value: int | None) -> None:
    num_domains = fewest_domains(config)
    if value is None or 1 <= value <= num_domains:
        return
    feature = "" if config.placement.algorithm is None else " with placement.algorithm"
    constraint = f"must be in 1..{num_domains}{feature}: a pipeline stage has {num_domains} failure domains"
    if num_domains == 1 and value > 1:
        # A first try often has one node. An upper bound of 1 would not explain that more nodes are needed.
        constraint = (
            f"must be 1{feature}, because all ranks of a pipeline stage are in one failure domain, and each copy must "
            f"be in another one; use more nodes than launch.num_nodes={config.launch.num_nodes}"
        )
        if config.topology.failure_domains:
            constraint += f", or other names in topology.failure_domains={config.topology.failure_domains}"
    raise ConfigError.of(f"placement.{name}", value, constraint)


def _check_rebalancing(config: JobConfig) -> None:
    placement = config.placement
    interval = placement.rebalance_interval
    if interval < 0:
        raise ConfigError.of("placement.rebalance_interval_iterations", interval, "must be at least 0")
    if placement.schedule and interval:
        constraint = f"must be empty with placement.rebalance_interval_iterations={interval}"
        raise ConfigError.of("placement.schedule", placement.schedule, constraint)
    for name, value in (
        ("load_smoothing", placement.load_smoothing),
        ("rebalance_min_gain", placement.rebalance_min_gain),
    ):
        if not 0.0 <= value < 1.0:
            raise ConfigError.of(f"placement.{name}", value, "must be at least 0 and below 1")
