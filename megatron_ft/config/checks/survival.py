"""A job that loses nodes and goes on: what of it is covered, and scripted histories that can happen."""

from megatron_ft.config.checks.placement import derive_placement
from megatron_ft.config.checks.primitives import above, require, show
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership_schedule import MembershipChange, nodes_over_time, parse_membership_change


def check_survival(config: JobConfig) -> None:
    """``launch.min_nodes``, ``launch.keep_layout`` and ``launch.membership_schedule``.

    Raises:
        ConfigError: names key, value and constraint; also what cannot be combined with them.
    """
    launch = config.launch
    above(0, "launch.reform_timeout_seconds", launch.reform_timeout_seconds)
    above(0, "launch.position_timeout_seconds", launch.position_timeout_seconds)
    require(
        launch.min_nodes is None or 1 <= launch.min_nodes <= launch.num_nodes,
        "launch.min_nodes",
        launch.min_nodes,
        f"must be null or in 1..launch.num_nodes={launch.num_nodes}",
    )
    changes = _check_schedule(config)
    fewest = min(launch.fewest_nodes, *(len(nodes) for nodes in nodes_over_time(launch.num_nodes, changes)))
    if launch.keep_layout:
        _check_keeps_layout(config)
        return
    if not changes and not launch.may_lose_nodes:
        return
    reason = launch.why_nodes_change or "a launch.membership_schedule"
    _check_covered(config, reason)
    _check_slots(config, fewest, reason)


def _check_schedule(config: JobConfig) -> list[MembershipChange]:
    key, launch = "launch.membership_schedule", config.launch
    changes: list[MembershipChange] = []
    nodes: tuple[int, ...] = tuple(range(launch.num_nodes))
    earliest, last = 1, config.training.train_iterations
    for text in launch.membership_schedule:
        change = parse_membership_change(text)
        named = (*change.lose, *change.join)
        require(max(named, default=0) < launch.num_nodes, key, text, f"must name nodes in 0..{launch.num_nodes - 1}")
        require(set(change.lose) <= set(nodes), key, text, f"must lose nodes of {list(nodes)}, which are there then")
        staying = set(nodes) - set(change.lose)
        require(not set(change.join) & staying, key, text, f"must have nodes join that are not of {sorted(staying)}")
        require(bool(staying), key, text, "must leave a node that has state")
        nodes = change.after(nodes)
        inside = earliest <= change.before_iteration <= last
        bounds = f"{earliest}..training.train_iterations={last}"
        require(inside, key, text, f"must name an iteration in {bounds}; iterations must not fall")
        earliest = change.before_iteration
        changes.append(change)
    require(
        not changes or not launch.may_lose_nodes,
        key,
        launch.membership_schedule,
        f"must be empty with {launch.why_nodes_change}: losses come from a script or from faults",
    )
    require(
        not changes or launch.max_restarts == 0,
        "launch.max_restarts",
        launch.max_restarts,
        "must be 0 with a launch.membership_schedule: a start is of all nodes again",
    )
    return changes


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
    _check_device(config, reason)


def _check_keeps_layout(config: JobConfig) -> None:
    """Every membership has all places: somebody can fill them, and there is a window that their state comes from."""
    launch, reason = config.launch, "launch.keep_layout=true"
    covered: tuple[tuple[str, object, object, str], ...] = (
        ("launch.mode", launch.mode, "local", ""),
        ("launch.master_port", launch.master_port, 0, ""),
        ("launch.max_nodes", launch.max_nodes, None, ": a job that keeps its layout does not grow"),
        (
            "placement.algorithm",
            config.placement.algorithm,
            None,
            ": experts with replica slots go on by their replicas, on other ranks, not in their places",
        ),
    )
    for key, value, wanted, why in covered:
        require(value == wanted, key, value, f"must be {show(wanted)} with {reason}{why}")
    require(
        launch.min_nodes in (None, launch.num_nodes),
        "launch.min_nodes",
        launch.min_nodes,
        f"must be null or launch.num_nodes={launch.num_nodes} with {reason}: every place is filled again",
    )
    require(
        launch.num_spare_nodes > 0 or (launch.restart_lost_nodes and launch.max_node_restarts > 0),
        "launch.keep_layout",
        True,
        f"needs launch.num_spare_nodes={launch.num_spare_nodes} above 0, or launch.restart_lost_nodes="
        f"{show(launch.restart_lost_nodes)} true with launch.max_node_restarts={launch.max_node_restarts} above 0: "
        "nobody could fill the place of a lost node",
    )
    require(
        config.snapshot.policy is not None,
        "snapshot.policy",
        None,
        f"must be given with {reason}: a stage that loses a rank goes back to a window, e.g. snapshot=sparse_window",
    )
    _check_device(config, reason)


def _check_device(config: JobConfig, reason: str) -> None:
    require(
        config.training.device != "cuda",
        "training.device",
        config.training.device,
        f"must be cpu with {reason}: connections of NCCL are not broken yet when a rank is lost",
    )


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
