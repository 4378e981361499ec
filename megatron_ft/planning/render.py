"""Renders a ``JobPlan`` as text."""

from collections.abc import Sequence

from megatron_ft.formatting import counted, every, memory_size
from megatron_ft.planning.job import JobPlan, StagePlan
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.report import PlacementReport
from megatron_ft.planning.placement.survival import Survival
from megatron_ft.planning.recovery.gaps import Gap
from megatron_ft.planning.recovery.prebuild import PrebuildReport
from megatron_ft.planning.recovery.strategy import Cost
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.planning.upstream_log import UpstreamLogReport

SHOWN_RANKS = 16
"""Largest number of ranks, stages or nodes that a list shows; ``dry_run_format=json`` lists all."""


def render(plan: JobPlan) -> str:
    """Return the plan as text: layout, parameters, memory, batches, data and the cost of losses in aligned blocks."""
    blocks = [_overview(plan), _parameters(plan), _memory(plan), _ranks(plan), _data(plan)]
    if plan.placement is not None:
        blocks.append(_render_placement(plan.placement, plan.slots_reason, plan.why_no_replicas))
    if plan.snapshot is not None:
        blocks.append(_snapshot(plan.snapshot, plan.windows_serve))
    if plan.upstream_log is not None:
        blocks.append(_upstream_log(plan.upstream_log))
    if plan.prebuilt is not None:
        blocks.append(_prebuilt(plan.prebuilt))
    if plan.losses:
        blocks.append(_losses(plan.losses, plan.gaps, plan.device))
    if plan.routing is not None:
        blocks.append(_pairs("routing", [("forced by", plan.routing)]))
    if plan.notes:
        blocks.append("\n".join(f"note: {note}" for note in plan.notes))
    return "\n\n".join(blocks)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table, with the first column aligned to the left and all other columns to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _pairs(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join([title, *(f"  {name.ljust(width)}  {text}" for name, text in pairs)])


def _overview(plan: JobPlan) -> str:
    sizes = plan.topology
    layout = (
        f"TP {sizes.tensor_model_parallel_size}, PP {sizes.pipeline_model_parallel_size}, "
        f"VPP {sizes.virtual_pipeline_model_parallel_size}, EP {sizes.expert_model_parallel_size}, "
        f"expert TP {sizes.expert_tensor_parallel_size}, CP {sizes.context_parallel_size}, "
        f"DP {sizes.data_parallel_size}, expert DP {sizes.expert_data_parallel_size}"
    )
    microbatches = (
        f"{plan.num_microbatches} per iteration, {plan.num_microbatches_per_rank} per data-parallel rank; "
        f"masked padding microbatches over all ranks: {plan.num_padding_microbatches}"
    )
    return _pairs(
        f"plan of {plan.model}",
        [
            ("ranks", f"{sizes.world_size} = {plan.num_nodes} nodes x {plan.ranks_per_node}, on {plan.device}"),
            *_device(plan),
            ("layout", layout),
            ("formats", plan.formats),
            ("iterations", f"{plan.train_iterations:,} of {plan.tokens_per_iteration:,} tokens"),
            ("microbatches", microbatches),
        ],
    )


def _device(plan: JobPlan) -> list[tuple[str, str]]:
    if not plan.other_device:
        return []
    # If the job would be refused on the other device, a note at the end of the plan contains ``other_device``.
    texts = (plan.device_reason, "" if plan.is_refused_there else plan.other_device)
    return [("device", "; ".join(filter(None, texts)))]


def _snapshot(report: SnapshotReport, serve: str) -> str:
    heaviest = max(report.nodes, key=lambda node: node.total_bytes)
    window = "the size is measured before the first window"
    if report.window_iterations is not None and report.interval_iterations is not None:
        window = (
            f"{counted(report.window_iterations, 'iteration')}; a new window begins {every(report.interval_iterations)}"
        )
    peers = "; ".join(
        f"node {node} on {', '.join(map(str, peers))}" for node, peers in enumerate(report.peers[:SHOWN_RANKS])
    )
    return _pairs(
        f"snapshots by {report.policy}",
        [
            ("window", window),
            ("used for", serve),
            *((("captured", _captured(report)),) if report.leaves_out_experts else ()),
            *((("written to storage", _stored(report)),) if report.stored_bytes is not None else ()),
            ("bytes of a window", f"{memory_size(report.window_bytes)} on the largest rank"),
            ("dense snapshot", f"{memory_size(report.dense_bytes)} on the largest rank"),
            ("peer copies", f"{report.num_peer_copies} of each node: {peers}" if report.num_peer_copies else "none"),
            (
                "host memory",
                f"{memory_size(heaviest.total_bytes)} on the largest node: own windows "
                f"{memory_size(heaviest.own_bytes)}, copies {memory_size(heaviest.copies_bytes)}",
            ),
            ("device memory", f"none; {memory_size(report.restore_bytes)} on a rank that restores a window"),
            ("reason", report.reason),
        ],
    )


def _captured(report: SnapshotReport) -> str:
    whole = memory_size(report.dense_bytes)
    if report.captured_bytes is None:
        return f"a part of {whole} on the largest rank; the size of the part is measured before the first window"
    return (
        f"{memory_size(report.captured_bytes)} of {whole} on the largest rank: everything outside experts, and "
        f"{counted(report.captured_experts or 0, 'expert')} of each layer; the first window captures everything"
    )


def _stored(report: SnapshotReport) -> str:
    return (
        f"at most {memory_size(report.stored_bytes or 0)} of a window on a rank: everything outside experts, and "
        f"{counted(report.stored_experts or 0, 'expert')} of each layer; the first file has everything"
    )


def _upstream_log(report: UpstreamLogReport) -> str:
    head = ("stage", "tensors per iteration", "bytes per iteration", "log of a rank")
    rows: list[Sequence[str]] = [head]
    for stage in range(min(len(report.num_entries), SHOWN_RANKS)):
        in_log = "-" if report.rank_bytes is None else memory_size(report.rank_bytes[stage])
        sizes = (str(report.num_entries[stage]), memory_size(report.iteration_bytes[stage]), in_log)
        rows.append((str(stage), *sizes))
    hidden = len(report.num_entries) - SHOWN_RANKS
    tail = [f"  and {hidden} more stages (dry_run_format=json lists all)"] if hidden > 0 else []
    kept = memory = "unknown until the first windows are measured"
    if report.iterations_kept is not None:
        until = f"until the commit of the next window, at most {report.commit_lag_iterations} iterations after its end"
        kept = f"{report.iterations_kept} iterations: from the start of a window {until}"
        memory = f"{_with_limit(report.host_bytes, report.memory_limit_bytes)} on the largest node"
    text = _pairs("upstream log", [("keeps", kept), ("host memory", memory), ("device memory", "none")])
    return "\n".join([text, *(f"  {line}" for line in table(rows).splitlines()), *tail])


def _prebuilt(report: PrebuildReport) -> str:
    plan = report.plan
    head = ("spare", "stages", "can replace nodes", "bytes")
    rows: list[Sequence[str]] = [head]
    for node in report.spares[:SHOWN_RANKS]:
        for part in plan.of_node(node):
            places, size = _spans(plan.parts[part]), memory_size(report.part_bytes[part])
            rows.append((f"node {node}", _spans(plan.stages[part]), places, size))
    hidden = len(report.spares) - SHOWN_RANKS
    tail = [f"  and {hidden} more spares (dry_run_format=json lists all)"] if hidden > 0 else []
    text = _pairs("built in advance by spares", [("parts", f"{plan.num_built} of {len(plan.parts)}: {report.reason}")])
    return "\n".join([text, *(f"  {line}" for line in table(rows).splitlines()), *tail])


def _parameters(plan: JobPlan) -> str:
    rows = [("total", _against(plan.num_parameters, plan.published_parameters))]
    rows.append(("active", _against(plan.num_active_parameters, plan.published_active_parameters)))
    if plan.published_parameters_source:
        rows.append(("published by", plan.published_parameters_source))
    return _pairs("parameters", rows)


def _against(count: int, published: int | None) -> str:
    if published is None:
        return f"{count:,}"
    return f"{count:,} (published {published:,}: {100 * (count / published - 1):+.2f} %)"


def _memory(plan: JobPlan) -> str:
    head = (
        "stage",
        "layers",
        "parameters",
        "weights",
        "gradients",
        "master",
        "moments",
        "copies",
        "activations*",
        "sum",
        "save, host*",
    )
    lines = [*table([head, *(_memory_row(stage) for stage in plan.stages)]).splitlines()]
    limits = [
        ("host, largest node*", _with_limit(plan.host_bytes_per_node, plan.host_memory_bytes)),
        (f"{plan.device}, largest rank", _device_memory(plan)),
    ]
    text = ["memory of each rank, by pipeline stage (* estimated)", *(f"  {line}" for line in lines)]
    return "\n".join([*text, *_pairs("", limits).splitlines()[1:]])


def _device_memory(plan: JobPlan) -> str:
    if plan.device != "cuda":
        return _with_limit(plan.device_bytes, None)
    if plan.gpu_memory_bytes is None:
        return f"{memory_size(plan.device_bytes)}, not checked (limits.gpu_memory_bytes=null)"
    return _with_limit(plan.device_bytes, plan.gpu_memory_bytes)


def _memory_row(stage: StagePlan) -> tuple[str, ...]:
    memory = stage.memory
    state = (memory.weights_bytes, memory.gradients_bytes, memory.master_bytes, memory.moments_bytes)
    sizes = (*state, memory.copies_bytes, memory.activations_bytes, memory.total_bytes, stage.saving_bytes)
    layers = _spans(stage.layers)
    return (str(stage.pipeline_stage), layers, f"{stage.parameters.total:,}", *(memory_size(size) for size in sizes))


def _spans(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(f"{first}-{last}" if first != last else str(first) for first, last in spans)


def _with_limit(size: int, limit: int | None) -> str:
    return memory_size(size) + ("" if limit is None else f" of {memory_size(limit)}")


def _ranks(plan: JobPlan) -> str:
    shown = min(plan.topology.world_size, SHOWN_RANKS)
    rows: list[Sequence[str]] = [("rank", "node", "pp", "dp", "cp", "tp", "ep", "expert dp")]
    for rank in range(shown):
        place = plan.topology.coordinates(rank)
        numbers = (rank, rank // plan.ranks_per_node, place.pp, place.dp, place.cp, place.tp, place.ep, place.expert_dp)
        rows.append(tuple(str(number) for number in numbers))
    hidden = plan.topology.world_size - shown
    tail = [f"  and {hidden} more (dry_run_format=json lists all)"] if hidden else []
    return "\n".join(["ranks", *(f"  {line}" for line in table(rows).splitlines()), *tail])


def _render_placement(report: PlacementReport, slots_reason: str, why_unused: str = "") -> str:
    """Return the placement report as text: slots, survival and bytes, then the slots in each stage's first MoE layer.

    Args:
        slots_reason: reason for the number of slots per rank; may be empty.
        why_unused: reason why no recovery uses the replicas; empty if a recovery uses them.
    """
    slots, num_ranks = report.num_slots_per_rank, len(report.stages[0].ranks)
    experts = f"{slots * num_ranks} on {num_ranks} ranks for {report.stages[0].num_experts} experts"
    pairs = [
        ("slots per rank", f"{slots} in each MoE layer: {experts}"),
        *((("number of slots", slots_reason),) if slots_reason else ()),
        *((f"stage {number}", plan.summary()) for number, plan in enumerate(report.stages)),
        ("weights left" if why_unused else "weights survive", _survival(report.weights_survival)),
        ("state left" if why_unused else "state survives", _survival(report.state_survival)),
        *((("used after a loss", f"no: {why_unused}"),) if why_unused else ()),
        ("expert weights", f"{memory_size(report.expert_weights_bytes)} in all replicas"),
        ("expert optimizer state", _copies(report, report.expert_state_bytes, report.expert_copies_bytes)),
        ("other optimizer state", _copies(report, report.non_expert_state_bytes, report.non_expert_copies_bytes)),
        ("rebalancing", _rebalancing(report)),
    ]
    return "\n".join([_pairs("first placement", pairs), *(_slots(plan) for plan in report.stages)])


def _rebalancing(report: PlacementReport) -> str:
    if not report.rebalance_interval_iterations:
        return "off"
    moved, staged = memory_size(report.most_moved_bytes), memory_size(report.staged_bytes)
    every = f"planned every {report.rebalance_interval_iterations} iterations"
    wait = "unknown, because topology.link_bytes_per_second=null"
    if report.rebalance_seconds is not None:
        wait = f"about {report.rebalance_seconds:.2g} s for the transfers"
    return (
        f"{every}; moves at most {moved}, {memory_size(report.most_received_bytes)} to one rank; training waits: "
        f"{wait}; a rank needs memory for one more expert ({staged})"
    )


def _survival(values: Sequence[Survival]) -> str:
    shown = [f"{v.num_lost}: {v.probability:.4f}{'' if v.exact else ' (estimated)'}" for v in values]
    return f"probability by number of lost failure domains: {', '.join(shown)}"


def _copies(report: PlacementReport, all_bytes: int, copies_bytes: int | None) -> str:
    text = f"{memory_size(all_bytes)} on the ranks that compute with the parameters"
    if copies_bytes is None:
        return text
    return f"{text}; {memory_size(copies_bytes)} in {report.num_state_copies} copies in different failure domains"


def _slots(plan: PlacementPlan) -> str:
    rows = [
        (f"rank {rank}", domain, " ".join(str(expert) for expert in experts))
        for rank, domain, experts in zip(plan.ranks, plan.domains, plan.slots[0], strict=True)
    ]
    hidden = len(rows) - SHOWN_RANKS
    tail = [f"    and {hidden} more ranks (dry_run_format=json lists all)"] if hidden > 0 else []
    lines = [f"    {line}" for line in table(rows[:SHOWN_RANKS]).splitlines()]
    return "\n".join([f"  experts in the slots of layer {plan.layer_numbers[0]}", *lines, *tail])


def _losses(losses: Sequence[Cost], gaps: Sequence[Gap], device: str) -> str:
    # ``SHOWN_RANKS`` limits rows about lost nodes. There are at most two other rows (death of all ranks or processes).
    gone = [cost for cost in losses if cost.is_gone]
    rows: list[Sequence[str]] = [("lost", "recovers by", "iterations again", "bytes moved", "predicted", "result")]
    for cost in [*gone[:SHOWN_RANKS], *(cost for cost in losses if not cost.is_gone)]:
        name = f"node {cost.lost_nodes[0]}" if cost.is_gone else "all processes" if cost.ends_job else "ranks only"
        moved = "-" if cost.moved_bytes is None else memory_size(cost.moved_bytes)
        rows.append((name, cost.description, cost.iterations, moved, cost.predicted, cost.result))
    hidden = len(gone) - SHOWN_RANKS
    tail = [f"  and {hidden} more nodes (dry_run_format=json lists all)"] if hidden > 0 else []
    meanings: dict[tuple[str, str], list[str]] = {}
    for cost in losses:
        strategies = meanings.setdefault((cost.result, cost.meaning), [])
        strategies += [cost.strategy] * (cost.strategy not in strategies)
    kinds = [result for result, _ in meanings]
    legend = [
        f"  {result}{' by ' + ', '.join(strategies) if kinds.count(result) > 1 else ''}: {meaning}"
        for (result, meaning), strategies in meanings.items()
    ]
    # For most nodes the reasons are the same, so each reason is listed once.
    reasons = dict.fromkeys(declined.summary() for cost in gone for declined in cost.declined)
    shown = [f"  not used: {reason}" for reason in list(reasons)[:SHOWN_RANKS]]
    unknown = dict.fromkeys(", ".join(cost.why_no_seconds) for cost in losses if cost.why_no_seconds)
    shown += [f"  no predicted time: {reason}" for reason in unknown]
    shown += [f"  {gap.summary()}" for gap in gaps]
    return "\n".join(
        [f"cost of a loss on {device}", *(f"  {line}" for line in table(rows).splitlines()), *tail, *legend, *shown]
    )


def _data(plan: JobPlan) -> str:
    return "\n".join(["data", *(f"  {line}" for line in plan.data.summary().splitlines())])
