"""Heat maps of the load of experts, one for each mixture layer, and a table of how uneven it is now."""

from collections.abc import Iterator

from megatron_ft.telemetry.report.loads import ExpertLoads, LayerLoads
from megatron_ft.telemetry.report.markup import Element, element
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.panels import Panel, panels, runs_of
from megatron_ft.telemetry.report.svg import swatch
from megatron_ft.telemetry.report.tables import table

_LEVELS = (
    (0.25, "load-0", "below 1/4 of the even share"),
    (0.5, "load-1", "1/4 to 1/2"),
    (0.8, "load-2", "1/2 to 0.8"),
    (1.25, "load-3", "0.8 to 1.25: about even"),
    (2.0, "load-4", "1.25 to 2"),
    (4.0, "load-5", "2 to 4 times"),
    (float("inf"), "load-6", "4 times and more"),
)
"""Upper end, class, and words of each colour."""


def load_maps(report: RunReport) -> Iterator[Element]:
    """How tokens spread over the experts of each layer, from the first iterations to the newest."""
    loads = report.loads
    if loads is None:
        return
    yield element("h2", "Expert load", id="expert-load")
    maps = [_panel(loads, layer) for layer in loads.layers]
    first, last = loads.stretches[0][0], loads.stretches[-1][1]
    per_row = "" if loads.experts_per_row == 1 else f" (the busiest of {loads.experts_per_row} neighbours in a row)"
    down = f"experts 0 to {loads.num_experts - 1} from top to bottom{per_row}"
    words = f"A map for each layer: {down}, iterations {first:,} to {last:,} from left to right."
    yield element("p", f"{words} Colours are tokens over the even share.")
    yield element("ul", *(element("li", swatch(class_), words) for _, class_, words in _LEVELS), class_="legend")
    yield from panels(
        "expert-load",
        maps,
        title="Load of experts",
        description=f"{words} The table below says how uneven the newest are.",
        more="The other layers",
    )
    rows = [
        (str(layer.number), str(layer.busiest), f"{layer.max_over_even:.2f}", f"{layer.min_over_even:.2f}", _hhi(layer))
        for layer in loads.layers
    ]
    header = ("layer", "busiest expert", "its load", "lowest load", "HHI")
    first, last = loads.stretches[-1]
    span = f"iterations {first:,} to {last:,}" if last > first else f"iteration {first:,}"
    found = table(f"Tokens over the even share, {span}", header, rows, numbers={0, 1, 2, 3, 4})
    yield element("details", element("summary", "How uneven it is now"), found)
    even = f"{1 / loads.num_experts:.3f}"
    words = f"HHI: sum of squared shares; {even} is even, 1 is all tokens on one expert."
    yield element("p", words, class_="soft")


def level(load: float) -> str:
    """The class of the colour of tokens over the even share."""
    return next(class_ for end, class_, _ in _LEVELS if load < end or end == float("inf"))


def _panel(loads: ExpertLoads, layer: LayerLoads) -> Panel:
    num_rows = len(layer.columns[0])
    rows = ([level(column[row]) for column in layer.columns] for row in range(num_rows))
    return Panel(
        title=f"layer {layer.number}",
        num_rows=num_rows,
        num_columns=len(layer.columns),
        runs=tuple(runs_of(rows)),
        rows=("0", str(loads.num_experts - 1)),
        columns=(f"iteration {loads.stretches[0][0]:,}", f"{loads.stretches[-1][1]:,}"),
    )


def _hhi(layer: LayerLoads) -> str:
    return f"{layer.herfindahl:.3f}"
