"""A job that goes on without nodes it loses: what of it is covered, and scripted losses that can happen."""

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.checks.primitives import above, require, show
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership_schedule import parse_membership_change
from megatron_ft.errors import ConfigError


def check_survival(config: JobConfig) -> None:
    """``launch.min_nodes`` and ``launch.membership_schedule``.

    Raises:
        ConfigError: names key, value and constraint; also what cannot be combined with them.
    """
    launch = config.launch
    above(0, "launch.reform_timeout_seconds", launch.reform_timeout_seconds)
    require(
        launch.min_nodes is None or 1 <= launch.min_nodes <= launch.num_nodes,
        "launch.min_nodes",
        launch.min_nodes,
        f"must be null or in 1..launch.num_nodes={launch.num_nodes}",
    )
    _check_schedule(config)
    fewest = min([launch.fewest_nodes, launch.num_nodes - len(_scripted_losses(config))])
    if fewest == launch.num_nodes:
        return
    reason = f"launch.min_nodes={launch.min_nodes}" if launch.may_lose_nodes else "a launch.membership_schedule"
    _check_covered(config, reason)
    _check_slots(config, fewest, reason)


def _scripted_losses(config: JobConfig) -> set[int]:
    changes = map(parse_membership_change, config.launch.membership_schedule)
    return {node for change in changes for node in change.nodes}


def _check_schedule(config: JobConfig) -> None:
    key, launch = "launch.membership_schedule", config.launch
    lost: set[int] = set()
    earliest, last = 1, config.training.train_iterations
    for text in launch.membership_schedule:
        change = parse_membership_change(text)
        require(change.nodes[-1] < launch.num_nodes, key, text, f"must name nodes in 0..{launch.num_nodes - 1}")
        require(not lost & set(change.nodes), key, text, "must name each node once: it does not come back")
        lost |= set(change.nodes)
        require(len(lost) < launch.num_nodes, key, text, "must leave a node")
        inside = earliest <= change.before_iteration <= last
        bounds = f"{earliest}..training.train_iterations={last}"
        require(inside, key, text, f"must name an iteration in {bounds}; iterations must increase")
        earliest = change.before_iteration + 1
    require(
        not launch.membership_schedule or not launch.may_lose_nodes,
        key,
        launch.membership_schedule,
        f"must be empty with launch.min_nodes={launch.min_nodes}: losses come from a script or from faults",
    )
    require(
        not launch.membership_schedule or launch.max_restarts == 0,
        "launch.max_restarts",
        launch.max_restarts,
        "must be 0 with a launch.membership_schedule: a start is of all nodes again",
    )


def _check_covered(config: JobConfig, reason: str) -> None:
    """Ranks go on without others only where each has all that is dense, and experts have replicas."""
    parallel, launch = config.parallel, config.launch
    covered: tuple[tuple[str, object, object], ...] = (
        ("launch.mode", launch.mode, "local"),
        ("launch.master_port", launch.master_port, 0),
        ("parallel.pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, 1),
        ("parallel.tensor_model_parallel_size", parallel.tensor_model_parallel_size, 1),
        ("parallel.context_parallel_size", parallel.context_parallel_size, 1),
        ("parallel.use_distributed_optimizer", parallel.use_distributed_optimizer, False),
        ("placement.schedule", config.placement.schedule, []),
        ("placement.state_copies", config.placement.state_copies, None),
    )
    for key, value, wanted in covered:
        require(value == wanted, key, value, f"must be {show(wanted)} with {reason}")
    require(
        config.placement.algorithm is not None,
        "placement.algorithm",
        None,
        f"must be given with {reason}: experts live on in their replicas, e.g. placement=overlap_search",
    )
    require(
        config.training.device != "cuda",
        "training.device",
        config.training.device,
        f"must be cpu with {reason}: connections of NCCL are not broken yet when a rank is lost",
    )
    policy = config.snapshot.policy
    if policy is not None:
        raise ConfigError.of("snapshot.policy", policy.get("_target_"), f"must be null with {reason}: snapshot=none")


def _check_slots(config: JobConfig, num_nodes: int, reason: str) -> None:
    """The fewest ranks still have a slot for every expert."""
    num_experts = config.model.num_moe_experts or 0
    num_slots = derive_placement(config).placement.num_slots_per_rank or 0
    num_ranks = num_nodes * config.launch.ranks_per_node
    require(
        num_slots * num_ranks >= num_experts,
        "placement.num_slots_per_rank",
        config.placement.num_slots_per_rank,
        f"must give {num_ranks} ranks at least model.num_moe_experts={num_experts} slots: {reason} may leave so few",
    )
