"""Checks of the keys for recoveries, snapshots, the upstream log and membership schedules."""

from megatron_ft.config.checks.primitives import above, at_least, one_of, require, show
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import MembershipChange, derive_placement, nodes_over_time
from megatron_ft.config.requirements import KEPT_LAYOUT, LIVING_PLACES, REPLICAS, REQUIREMENTS, Requirement, value_of
from megatron_ft.config.serialize import build_policy
from megatron_ft.records import FORMER_STRATEGIES
from megatron_ft.topology import Topology

MAX_OUTLIVE_SECONDS = 7 * 24 * 3600
"""Largest value of ``snapshot.outlive_job_seconds``: snapshot servers that no job takes over must end at some time."""
_OUTLIVE = "snapshot.outlive_job_seconds"
_REPAY = "snapshot.repay_capacity_share"
_BUBBLES = "snapshot.copy_in_bubbles"


def _check_survival(config: JobConfig) -> None:
    """Check ``recovery.min_nodes``, ``recovery.keep_layout``, ``testing.membership_schedule`` and related keys.

    Raises:
        ConfigError: a rule is violated; the message names key, value and constraint.
    """
    launch, recovery = config.launch, config.recovery
    above(0, "recovery.reconfigure_timeout_seconds", recovery.reconfigure_timeout_seconds)
    above(0, "recovery.position_timeout_seconds", recovery.position_timeout_seconds)
    require(
        recovery.min_nodes is None or 1 <= recovery.min_nodes <= launch.num_nodes,
        "recovery.min_nodes",
        recovery.min_nodes,
        f"must be null or from 1 to launch.num_nodes={launch.num_nodes}",
    )
    require(
        not recovery.keep_processes or config.may_change_nodes,
        "recovery.keep_processes",
        recovery.keep_processes,
        "must be null or false: this job ends all processes after a loss. To let them continue, use "
        f"recovery.keep_layout, recovery.min_nodes (below {launch.num_nodes}), nodes.num_spare_nodes, nodes.max_nodes",
    )
    changes = _check_schedule(config)
    # Slots are checked for the smallest membership that can occur, so that no later membership has too few.
    fewest = min(config.fewest_nodes, *(len(nodes) for nodes in nodes_over_time(launch.num_nodes, changes)))
    if recovery.keep_layout:
        _check_keeps_layout(config)
        if not config.may_change_layout:
            return
    if not changes and not config.may_change_nodes:
        return
    feature = config.why_nodes_change or "a testing.membership_schedule"
    instead = ""
    if recovery.keep_layout:
        # Other nodes replace lost nodes. If there are none, the job continues with fewer lanes (model replicas). This
        # requires expert replicas.
        feature = f"recovery.keep_layout=true and recovery.min_nodes={recovery.min_nodes}"
        if config.placement.algorithm is None:
            instead = f"; {_why_no_fewer_lanes(config)}"
    if feature.startswith("nodes.num_spare_nodes="):
        instead = "; if spares are to replace lost nodes in the same layout, set recovery.keep_layout=true"
    _check_requirements(config, REPLICAS, feature, instead)
    _check_slots(config, fewest, feature)
    rates = ((config.placement.algorithm or {}).get("objective") or {}).get("failure_rates")
    constraint = f"must be empty with {feature}: the number of failure domains changes when nodes are lost or join"
    require(not rates, "placement.algorithm.objective.failure_rates", rates, constraint)


def _why_no_fewer_lanes(config: JobConfig) -> str:
    """Return why a job without replica slots cannot continue with fewer lanes (model replicas) after a loss."""
    parallel = config.parallel
    num_expert_ranks = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1)
    windows = "a snapshot window can be loaded only by as many ranks as have captured it"
    if num_expert_ranks * parallel.pipeline_model_parallel_size >= config.world_size:
        return (
            f"one expert-parallel group (parallel.expert_model_parallel_size={parallel.expert_model_parallel_size}) "
            "contains all ranks of a pipeline stage, so without replica slots no remaining rank has a place for the "
            f"experts of a lost rank; {windows}"
        )
    return (
        "without replica slots, only a whole expert-parallel group can leave a job, and ranks form these groups only "
        f"when they start; {windows}"
    )


def _check_strategies(config: JobConfig) -> None:
    """Check three rules: ``recovery.strategies`` contains only known strategies; other keys have the values that these
    strategies need; ``recovery.strategies`` contains each strategy that another key needs.

    Raises:
        ConfigError: a rule is violated; the message names key, value and constraint.
    """
    key, recovery = "recovery.strategies", config.recovery
    names = recovery.strategies
    if names is None:
        return
    require(bool(names), key, names, f"must be null or name at least one of {', '.join(REQUIREMENTS)}")
    for name in names:
        require(name not in FORMER_STRATEGIES, key, name, f"is now called {FORMER_STRATEGIES.get(name)}")
        one_of(REQUIREMENTS, key, name)
    require(len(set(names)) == len(names), key, names, "must name each strategy once")
    feature = f"{key}=[{','.join(names)}]"
    layout = recovery.keep_layout
    for name in names:
        # In a kept layout, living_state needs no replicas. Without copies of lost state, another strategy is used.
        needed = LIVING_PLACES if layout and name == "living_state" else REQUIREMENTS[name]
        _check_requirements(config, needed, feature)
    replays, is_used = "localized_replay" in names, bool({"localized_replay", "living_state", "rollback"} & set(names))
    require(layout or not replays, "recovery.keep_layout", layout, f"must be true with {feature}")
    require(not layout or is_used, "recovery.keep_layout", layout, f"must be false with {feature}")
    require(
        not layout or not config.may_change_layout or "living_state" in names,
        "recovery.min_nodes",
        recovery.min_nodes,
        f"must be null with {feature} and recovery.keep_layout=true: only the strategy "
        "living_state lets a job continue with fewer lanes (model replicas)",
    )
    require(
        not recovery.keep_processes or config.keeps_processes,
        "recovery.keep_processes",
        recovery.keep_processes,
        f"must be null or false with {feature}, recovery.keep_layout={show(layout)}: none of these strategies lets "
        "ranks continue in their processes",
    )
    changes = config.may_change_nodes and not layout
    require(
        changes or layout or "living_state" not in names,
        "recovery.min_nodes",
        recovery.min_nodes,
        f"must be below launch.num_nodes={config.launch.num_nodes} with {feature}: living_state needs this",
    )
    restarts = recovery.may_use("rollback") or recovery.may_use("checkpoint")
    require(
        restarts or not recovery.max_restarts,
        "recovery.max_restarts",
        recovery.max_restarts,
        f"must be 0 with {feature}: only the strategies rollback and checkpoint restart ranks",
    )
    if not changes or config.keeps_processes:
        return
    fixed = f"with {feature} and recovery.keep_layout=false: then only living_state can use joining nodes"
    nodes = config.nodes
    for name, value, expected in (
        ("nodes.num_spare_nodes", nodes.num_spare_nodes, 0),
        ("nodes.max_nodes", nodes.max_nodes, None),
        ("nodes.restart_lost_nodes", nodes.restart_lost_nodes, False),
    ):
        require(value == expected, name, value, f"must be {show(expected)} {fixed}")
    require(
        recovery.max_restarts > 0 and recovery.may_use("checkpoint"),
        "recovery.min_nodes",
        recovery.min_nodes,
        f"must be null with {feature} and recovery.max_restarts={recovery.max_restarts}: without living_state, "
        "a job can continue on fewer nodes only from a checkpoint. To allow this, add checkpoint to the strategies and "
        "set recovery.max_restarts above 0",
    )


def _check_schedule(config: JobConfig) -> list[MembershipChange]:
    key, schedule = "testing.membership_schedule", config.testing.membership_schedule
    num_nodes = config.launch.num_nodes
    changes: list[MembershipChange] = []
    nodes: tuple[int, ...] = tuple(range(num_nodes))
    earliest, last = 1, config.training.train_iterations
    # Check in order, because the members before a change depend on the earlier changes.
    for text in schedule:
        change = MembershipChange.parse(text)
        named = (*change.lose, *change.join)
        require(max(named, default=0) < num_nodes, key, text, f"must name nodes in 0..{num_nodes - 1}")
        members = f"must lose only members of the job; before this change, the members are nodes {list(nodes)}"
        require(set(change.lose) <= set(nodes), key, text, members)
        staying = set(nodes) - set(change.lose)
        require(
            not set(change.join) & staying,
            key,
            text,
            f"must join only nodes that are not members; nodes {sorted(staying)} are members at this change",
        )
        require(bool(staying), key, text, "must keep at least one member, from which joining nodes receive the state")
        nodes = change.after(nodes)
        inside = earliest <= change.before_iteration <= last
        bounds = f"{earliest}..training.train_iterations={last}"
        require(
            inside,
            key,
            text,
            f"must name an iteration in {bounds}, and the entries must be in ascending order of iterations",
        )
        earliest = change.before_iteration
        changes.append(change)
    require(
        not changes or not config.may_change_nodes,
        key,
        schedule,
        f"must be empty with {config.why_nodes_change}: a schedule or failures can change nodes, not both",
    )
    require(
        not changes or config.recovery.max_restarts == 0,
        "recovery.max_restarts",
        config.recovery.max_restarts,
        "must be 0 with a testing.membership_schedule: a restart would also use nodes that the schedule has removed",
    )
    return changes


def _check_requirements(
    config: JobConfig, requirements: tuple[Requirement, ...], feature: str, instead: str = ""
) -> None:
    # Requirements without remedy come first: if the user cannot meet them, there is no need to meet the others.
    found = sorted(Requirement.unmet(config, requirements), key=lambda need: need.remedy is not None)
    # Name all unmet requirements at once, because the user may be unable to meet one of them.
    others = [f"{need.key}={show(value_of(config, need.key))} {need.demand}" for need in found[1:]]
    also = f"; {feature} also requires: {', '.join(others)}" if others else ""
    for need in found[:1]:
        require(False, need.key, value_of(config, need.key), f"{need.constraint(feature)}{also}{instead}")


def _check_keeps_layout(config: JobConfig) -> None:
    nodes = config.nodes
    _check_requirements(config, KEPT_LAYOUT, "recovery.keep_layout=true")
    require(
        nodes.num_spare_nodes > 0 or (nodes.restart_lost_nodes and nodes.max_node_restarts > 0),
        "recovery.keep_layout",
        True,
        "needs nodes that replace lost nodes: set nodes.num_spare_nodes above 0, or nodes.restart_lost_nodes=true and "
        f"nodes.max_node_restarts above 0 (current values: nodes.restart_lost_nodes={show(nodes.restart_lost_nodes)}, "
        f"nodes.max_node_restarts={nodes.max_node_restarts})",
    )


def _check_slots(config: JobConfig, num_nodes: int, feature: str) -> None:
    num_experts = config.model.num_moe_experts or 0
    num_slots = derive_placement(config).placement.num_slots_per_rank or 0
    topology = Topology.of(config.parallel, config.world_size)
    lane = topology.world_size // topology.data_parallel_size
    num_lanes = num_nodes * config.launch.ranks_per_node // lane
    fewest = f"launch.ranks_per_node={config.launch.ranks_per_node} and {num_nodes} nodes"
    require(
        num_lanes > 0,
        "recovery.min_nodes",
        config.recovery.min_nodes,
        f"must leave at least {lane} ranks, because one model replica has TP * CP * PP = {lane}. With {feature}, the "
        f"job may continue with only {fewest}",
    )
    num_ranks = num_lanes * lane // topology.pipeline_model_parallel_size
    require(
        num_slots * num_ranks >= num_experts,
        "placement.num_slots_per_rank",
        config.placement.num_slots_per_rank,
        f"must be large enough that each of model.num_moe_experts={num_experts} experts has a slot: with {feature}, "
        f"the job may continue with only {num_slots * num_ranks} slots (slots per rank: {num_slots}; ranks of a "
        f"pipeline stage: {num_ranks})",
    )


def _check_upstream_log(config: JobConfig) -> None:
    """Check ``upstream_log``. With ``recovery.keep_layout`` and snapshots, check that the configuration makes replays
    of single stages bitwise exact.

    Raises:
        ConfigError: a rule is violated; the message names key, value and constraint.
    """
    at_least(0, "upstream_log.commit_lag_iterations", config.upstream_log.commit_lag_iterations)
    at_least(1, "upstream_log.memory_limit_bytes", config.upstream_log.memory_limit_bytes)
    if config.recovery.keep_layout and config.snapshot.policy is not None:
        _check_replays_exactly(config)


def _check_replays_exactly(config: JobConfig) -> None:
    # A stage that replays reads its window (with the states of random number generators), its samples and the upstream
    # logs of adjacent stages. Stages exchange nothing else except values of the vote (gradient norm, overflow, loss
    # scale), which are recorded, and the number of tokens, which each stage can count.
    feature = "recovery.keep_layout=true"
    require(
        config.training.deterministic,
        "training.deterministic",
        config.training.deterministic,
        f"must be true with {feature}: a replay must reproduce the lost state bit for bit",
    )
    stages = config.parallel.pipeline_model_parallel_size
    require(
        stages == 1 or config.model.untie_embeddings_and_output_weights or not config.keeps_processes,
        "model.untie_embeddings_and_output_weights",
        config.model.untie_embeddings_and_output_weights,
        f"must be true with {feature} and parallel.pipeline_model_parallel_size={stages}: a replay reads logged "
        "messages between stages, which do not contain the gradients of tied embeddings",
    )


def _check_partial(config: JobConfig) -> None:
    """Check, if windows (snapshots) leave out experts, that all other keys allow this. For example, a pipeline stage
    that replays alone needs all of its experts.

    Raises:
        ConfigError: a rule is violated, or the policy cannot be built.
    """
    policy = config.snapshot.policy
    if policy is None or not getattr(build_policy("snapshot.policy", policy), "leaves_out_experts", False):
        return
    target = policy["_target_"]
    require(
        config.precision.regime is None,
        "precision.regime",
        config.precision.regime,
        f"must be null with snapshot.policy={target}: this policy cannot leave out the scales of quantized state yet",
    )
    if policy.get("send_gradients"):
        key = "snapshot.policy.send_gradients"
        reason = "must be false with snapshot.num_peer_copies=0: there are no peers that could repeat updates"
        require(config.snapshot.num_peer_copies > 0, key, True, reason)
        reason = "must be false with training.device=cuda: peers repeat updates on the CPU, which rounds differently"
        require(config.training.device != "cuda", key, True, reason)
    stored, every = policy.get("num_persisted_experts"), config.snapshot.persist_interval_windows
    require(
        stored is None or every > 0,
        "snapshot.policy.num_persisted_experts",
        stored,
        "must be null with snapshot.persist_interval_windows=0: windows are then written to storage only before a "
        "stop, with all captured experts. To write fewer experts, set snapshot.persist_interval_windows above 0",
    )
    require(
        config.model.num_moe_experts is not None,
        "snapshot.policy",
        target,
        "must be a policy that captures the whole state with model.num_moe_experts=null, e.g. snapshot=dense: a dense "
        "model has no experts to leave out",
    )
    require(
        not config.replays_stages,
        "snapshot.policy",
        target,
        "must be a policy that captures all experts with recovery.keep_layout=true, e.g. snapshot=sparse_window: a "
        "stage that replays must restore all of its experts. To use a policy that leaves out experts, set "
        "recovery.keep_processes=false; all ranks then restart from a snapshot",
    )


def _check_repayment(config: JobConfig) -> None:
    """Check ``snapshot.repay_capacity_share``. If it is given, experts must have a capacity, no padding may fill
    it, and windows (snapshots) must leave out experts."""
    share, model, policy = config.snapshot.repay_capacity_share, config.model, config.snapshot.policy
    if share is None:
        return
    require(0 < share <= 1, _REPAY, share, "must be above 0 and at most 1")
    require(
        model.moe_expert_capacity_factor is not None,
        _REPAY,
        share,
        "must be null with model.moe_expert_capacity_factor=null: without a capacity, experts already process all of "
        "their tokens, so they can process no additional ones",
    )
    require(
        not model.moe_pad_expert_input_to_capacity,
        _REPAY,
        share,
        "must be null with model.moe_pad_expert_input_to_capacity=true: padding fills the capacity that experts leave "
        "unused",
    )
    require(
        policy is not None and getattr(build_policy("snapshot.policy", policy), "leaves_out_experts", False),
        _REPAY,
        share,
        "must be null unless snapshots leave out experts (snapshot=partial_experts or snapshot=selective_experts): "
        "otherwise, a recovery loses no tokens that experts could repay",
    )


def _check_storage_bandwidth(config: JobConfig) -> None:
    """Check that ``snapshot.storage_bandwidth_bytes_per_second`` may be set: files are written that can leave out
    experts, and no other key sets the number of experts in a file."""
    snapshot, key = config.snapshot, "snapshot.storage_bandwidth_bytes_per_second"
    rate, policy = snapshot.storage_bandwidth_bytes_per_second, snapshot.policy
    if rate is None:
        return
    above(0, key, rate)
    require(
        policy is not None and getattr(build_policy("snapshot.policy", policy), "leaves_out_experts", False),
        key,
        rate,
        "must be null, because each file contains all experts, whatever the bandwidth is. Files contain fewer experts "
        "only with snapshot=partial_experts or snapshot=selective_experts",
    )
    require(
        snapshot.persist_interval_windows > 0,
        key,
        rate,
        "must be null with snapshot.persist_interval_windows=0: windows are then written to storage only before a stop",
    )
    stored = (policy or {}).get("num_persisted_experts")
    require(
        stored is None,
        key,
        rate,
        f"must be null with snapshot.policy.num_persisted_experts={stored}, which fixes the number of experts per file",
    )


def _check_bubbles(config: JobConfig) -> None:
    """Check ``snapshot.copy_in_bubbles``. If true, the job needs snapshots, several pipeline stages, and CPUs."""
    if not config.snapshot.copy_in_bubbles:
        return
    require(
        config.parallel.pipeline_model_parallel_size > 1,
        _BUBBLES,
        True,
        "must be false with parallel.pipeline_model_parallel_size=1: snapshots are copied while ranks wait for other "
        "stages, and there is only one stage",
    )
    require(
        config.snapshot.policy is not None,
        _BUBBLES,
        True,
        "must be false with snapshot.policy=null: there are no snapshots to copy; choose e.g. snapshot=sparse_window",
    )
    require(
        config.training.device != "cuda",
        _BUBBLES,
        True,
        "must be false with training.device=cuda: on GPUs, a CUDA stream waits for the messages. The CPU, which starts "
        "the copies, cannot see when the stream waits",
    )


def _check_snapshot(config: JobConfig) -> None:
    """Check the keys of ``snapshot``, as far as this is possible before a snapshot plan is computed.

    Raises:
        ConfigError: a rule is violated; the message names key, value and constraint.
    """
    snapshot, launch = config.snapshot, config.launch
    at_least(0, "snapshot.num_peer_copies", snapshot.num_peer_copies)
    above(0, "snapshot.bandwidth_bytes_per_second", snapshot.bandwidth_bytes_per_second)
    above(0, "snapshot.iteration_seconds", snapshot.iteration_seconds)
    at_least(1, "snapshot.host_memory_limit_bytes", snapshot.host_memory_limit_bytes)
    at_least(0, "snapshot.persist_interval_windows", snapshot.persist_interval_windows)
    at_least(0, "snapshot.keep_persisted", snapshot.keep_persisted)
    at_least(0, "snapshot.replan_interval_windows", snapshot.replan_interval_windows)
    _check_repayment(config)
    _check_bubbles(config)
    _check_storage_bandwidth(config)
    outlive = snapshot.outlive_job_seconds
    require(0 <= outlive <= MAX_OUTLIVE_SECONDS, _OUTLIVE, outlive, f"must be from 0 to {MAX_OUTLIVE_SECONDS}")
    require(
        not outlive or launch.node_launcher != "srun",
        _OUTLIVE,
        outlive,
        "must be 0 with launch.node_launcher=srun: at the end of a job step, Slurm ends all of its processes; use "
        "launch=slurm_array, whose tasks continue",
    )
    if snapshot.policy is None:
        require(not outlive, _OUTLIVE, outlive, "must be 0 with snapshot.policy=null: there are no snapshots to keep")
        return
    require(
        launch.mode == "local" or config.dry_run,
        "snapshot.policy",
        snapshot.policy.get("_target_"),
        f"must be null with launch.mode={launch.mode}, which starts no snapshot servers; use "
        "launch.mode=local or snapshot=none",
    )
    num_domains = len(set(config.member_domains))
    require(
        snapshot.num_peer_copies < num_domains,
        "snapshot.num_peer_copies",
        snapshot.num_peer_copies,
        f"must be below the number of failure domains, {num_domains}: a node and each copy of its "
        "snapshots must be in different domains; with 0, there are no copies",
    )


CHECKS = (_check_snapshot, _check_partial, _check_survival, _check_strategies, _check_upstream_log)
"""All checks of this file. They assume that the parallel sizes and the slots are valid."""
