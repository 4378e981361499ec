"""Draws a run as one picture: loss, learning rate, gradient norm and expert load.

    python -m tools.plot_run runs/moe_tiny-001                  # writes runs/moe_tiny-001/run.png
    python -m tools.plot_run runs/moe_tiny-001 --out run.pdf

The tool reads ``metrics.jsonl`` and ``events.jsonl`` of a run, which may still be running. It needs matplotlib (the
``docs`` extra).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.errors import ConfigError, DataError, MegatronFtError, SoftwareError
from megatron_ft.events import Evaluation, ExpertLoad, Metrics, Record, RunStarted
from megatron_ft.telemetry.expert_load import relative_load
from megatron_ft.telemetry.read import read_events, read_metrics

FILE = "run.png"
BLUE, ORANGE, VERMILION, GREEN, GREY = "#0072b2", "#e69f00", "#d55e00", "#009e73", "#7f7f7f"
"""Colours of Okabe and Ito's palette, which can be distinguished with any colour vision."""
MAX_LAYERS = 12
SECONDARY = (("learning_rate", "learning rate", GREEN), ("grad_norm", "gradient norm", BLUE))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    formats = "in the format that its suffix names"
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"picture to write, {formats}; default {FILE} in the run's folder"
    )
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / FILE
    try:
        metrics, events = read_run(options.run_dir)
        figure = draw(metrics, events, title=options.run_dir.resolve().name)
        try:
            figure.savefig(out, dpi=150)
        except (OSError, ValueError) as error:  # ValueError: no format has this suffix
            raise ConfigError.of(
                "--out", out, f"must be a writable file with the suffix of a picture: {error}"
            ) from None
    except MegatronFtError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return error.exit_code
    print(out)
    return 0


def read_run(run_dir: Path) -> tuple[list[Metrics], list[Record]]:
    """Read the metrics and events of a run.

    Raises:
        DataError: a file of the run is missing or damaged, or the run has no metrics yet.
    """
    try:
        metrics, events = read_metrics(run_dir), read_events(run_dir)
    except (OSError, ValueError) as error:
        raise DataError(
            f"run_dir={run_dir}: must be the folder of a run with intact files metrics.jsonl and events.jsonl: {error}"
        ) from error
    if not metrics:
        raise DataError(f"run_dir={run_dir}: must contain the metrics of at least one iteration")
    return metrics, events


def draw(metrics: Sequence[Metrics], events: Sequence[Record], *, title: str) -> Any:
    """Draw the picture and return it as ``matplotlib.figure.Figure``.

    Raises:
        SoftwareError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SoftwareError("matplotlib: must be installed, e.g. with pip install -e '.[docs]'") from error
    loads = {event.iteration: event for event in events if isinstance(event, ExpertLoad)}
    figure = Figure(figsize=(11, 7.5 if loads else 4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    parts: Any = figure.subfigures(2, 1) if loads else [figure]
    _draw_figures(parts[0], metrics, events)
    if loads:
        _draw_expert_load(parts[1], [loads[iteration] for iteration in sorted(loads)])
    return figure


def _draw_figures(figure: Any, metrics: Sequence[Metrics], events: Sequence[Record]) -> None:
    """Draw training and evaluation loss on the left, and learning rate and gradient norm on the right."""
    panels = figure.subplot_mosaic([["loss", "learning_rate"], ["loss", "grad_norm"]], width_ratios=(2.2, 1))
    _draw_loss(panels["loss"], metrics, events)
    for name, label, colour in SECONDARY:
        found = [each for each in metrics if name in each.values]
        panels[name].plot(
            [each.iteration for each in found], [each.values[name] for each in found], color=colour, lw=1.2
        )
        panels[name].set_ylabel(label)
        _finish(panels[name])
    panels["learning_rate"].tick_params(labelbottom=False)
    panels["learning_rate"].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    panels["grad_norm"].set_xlabel("iteration")


def _draw_loss(panel: Any, metrics: Sequence[Metrics], events: Sequence[Record]) -> None:
    iterations = [each.iteration for each in metrics]
    panel.plot(iterations, [each.values["loss"] for each in metrics], color=BLUE, lw=1.5, label="training")
    evaluations = {event.iteration: event.loss for event in events if isinstance(event, Evaluation)}
    if evaluations:
        panel.plot(list(evaluations), list(evaluations.values()), "D", color=VERMILION, ms=6, label="evaluation")
    for number, iteration in enumerate(_resumes(events)):
        panel.axvline(iteration, color=GREY, ls=":", lw=1.2, label="resumed" if number == 0 else None)
    panel.set_ylabel("loss (nats per token)")
    panel.set_xlabel("iteration")
    panel.legend(frameon=False)
    _finish(panel)


def _draw_expert_load(figure: Any, loads: Sequence[ExpertLoad]) -> None:
    """Draw heat maps of tokens per expert and iteration, for at most ``MAX_LAYERS`` layers. White is the mean load."""
    layers = list(zip(*(load.layers for load in loads), strict=True))
    numbers = loads[0].layer_numbers or tuple(range(1, len(layers) + 1))
    count = min(MAX_LAYERS, len(layers))
    chosen = [round(place * (len(layers) - 1) / max(1, count - 1)) for place in range(count)]
    num_columns = min(count, 4)
    panels = figure.subplots(-(-count // num_columns), num_columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, place in zip(panels, chosen, strict=False):
        image = _draw_layer(panel, loads, layers[place])
        panel.set_title(f"layer {numbers[place]}", fontsize=10, loc="left")
    for panel in list(panels)[count:]:
        panel.set_visible(False)
    figure.supxlabel("iteration", fontsize=10)
    figure.supylabel("expert", fontsize=10)
    bar = figure.colorbar(image, ax=figure.axes, extend="max", ticks=(0, 0.5, 1, 1.5, 2), pad=0.01, aspect=30)
    bar.set_label("tokens / even share")


def _draw_layer(panel: Any, loads: Sequence[ExpertLoad], layer: Sequence[Sequence[int]]) -> Any:
    """Draw the heat map of one layer. ``layer[i]`` has the tokens per expert at the iteration of ``loads[i]``."""
    shares = [list(column) for column in zip(*(relative_load(tokens) for tokens in layer), strict=True)]
    extent = (loads[0].iteration - 0.5, loads[-1].iteration + 0.5, -0.5, len(shares) - 0.5)
    panel.set_yticks([0, len(shares) - 1])
    return panel.imshow(
        shares, aspect="auto", origin="lower", cmap="RdBu_r", vmin=0, vmax=2, extent=extent, interpolation="nearest"
    )


def _resumes(events: Sequence[Record]) -> list[int]:
    """Return the iterations of the saved states from which the run was resumed."""
    started = [event.resumed_from_iteration for event in events if isinstance(event, RunStarted)]
    return [iteration for iteration in started if iteration is not None]


def _finish(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", lw=0.4, alpha=0.6)
    panel.margins(x=0.01)


if __name__ == "__main__":
    sys.exit(main())
