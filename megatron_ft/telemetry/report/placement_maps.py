"""The placement of expert replicas that is in force, layer by layer, and how it came to be."""

from collections import Counter
from collections.abc import Iterator

from megatron_ft.events import PlacementInForce
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.telemetry.report.markup import Element, element
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.panels import Panel, panels
from megatron_ft.telemetry.report.svg import swatch
from megatron_ft.telemetry.report.tables import table
from megatron_ft.telemetry.wording import seconds, size

MAX_CELLS = 200_000
"""Experts times ranks of all layers; larger placements are told in words only."""
MAX_CHANGES = 40
_WORDS = "A map for each layer: experts from top to bottom, ranks from left to right."
_LEGEND = (("held-1", "a replica"), ("held-2", "two slots or more: one set of weights, more tokens"))


def placement_maps(report: RunReport) -> Iterator[Element]:
    """Which rank holds which expert now, and each placement that took over."""
    if not report.placements:
        return
    newest = report.placements[-1]
    yield element("h2", "Placement", id="placement")
    yield element("p", f"In force from iteration {newest.iteration:,} on ({newest.reason}).")
    yield element("ul", *(element("li", line, class_="words") for line in newest.stages[:64]))
    maps = [_panel(plan, layer) for plan in report.plans for layer in range(len(plan.layer_numbers))]
    num_cells = sum(plan.num_experts * len(plan.ranks) * len(plan.slots) for plan in report.plans)
    if not maps:
        yield element("p", "Its slots are not drawn: the run's folder does not hold the plan.", class_="soft")
    elif num_cells > MAX_CELLS:
        yield element("p", "Its slots are not drawn: there are too many.", class_="soft")
    else:
        yield element("p", _WORDS)
        yield element("ul", *(element("li", swatch(class_), words) for class_, words in _LEGEND), class_="legend")
        yield from panels(
            "placement-map",
            maps,
            title="Placement",
            description=f"{_WORDS} A cell is filled where the rank holds the expert; the lines above say it in short.",
            more="The other layers",
        )
        yield element("details", element("summary", "Ranks and failure domains"), _ranks(report.plans))
    yield element("details", element("summary", "How it came to be"), _changes(report.placements))


def _panel(plan: PlacementPlan, layer: int) -> Panel:
    held = [Counter(experts) for experts in plan.slots[layer]]
    cells = (
        ("held-1" if of_rank[expert] == 1 else "held-2", expert, column, 1)
        for column, of_rank in enumerate(held)
        for expert in sorted(of_rank)
    )
    return Panel(
        title=f"layer {plan.layer_numbers[layer]}",
        num_rows=plan.num_experts,
        num_columns=max(1, len(plan.ranks)),
        runs=tuple(cells),
        rows=("0", str(plan.num_experts - 1)),
        columns=(f"rank {plan.ranks[0]}", f"{plan.ranks[-1]}") if plan.ranks else ("no ranks", ""),
        has_gaps=True,
    )


def _ranks(plans: tuple[PlacementPlan, ...]) -> Element:
    rows = []
    for stage, plan in enumerate(plans):
        for position, (rank, domain) in enumerate(zip(plan.ranks, plan.domains, strict=True)):
            held = [len(by_rank[position]) for by_rank in plan.slots]
            few, most = min(held, default=0), max(held, default=0)
            rows.append((str(rank), str(stage), domain, str(most) if few == most else f"{few} to {most}"))
    header = ("rank", "stage", "failure domain", "filled slots a layer")
    return table("Where the columns are", header, rows, numbers={0, 1, 3}, words=2)


def _changes(placements: tuple[PlacementInForce, ...]) -> Element:
    shown = placements[-MAX_CHANGES:]
    more = len(placements) - len(shown)
    caption = "Each placement that took over" + (f"; {more:,} earlier ones are left out" if more else "")
    header = ("from iteration", "why", "moved", "took", "busiest rank over mean, before", "after", "predicted gain")
    return table(caption, header, [_change(record) for record in shown], numbers={0, 2, 3, 4, 5, 6}, words=1)


def _change(record: PlacementInForce) -> tuple[str, ...]:
    return (
        f"{record.iteration:,}",
        record.reason,
        "-" if record.moved_bytes is None else size(record.moved_bytes),
        "-" if record.seconds is None else seconds(record.seconds),
        "-" if record.imbalance_before is None else f"{record.imbalance_before:.2f}",
        "-" if record.imbalance_after is None else f"{record.imbalance_after:.2f}",
        "-" if record.gain is None else f"{100 * record.gain:.1f} %",
    )
