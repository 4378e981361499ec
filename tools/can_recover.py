"""Shows from which state a job could continue if nodes were lost, which operators would survive, and how much
time the recovery would cost.

    python -m tools.can_recover runs/moe_tiny-001 --lose 2,5
    python -m tools.can_recover --config model=moe_tiny placement=spread launch.num_nodes=4 --lose 1

The tool reads placement, windows, checkpoints and measured durations from the run's folder. It verifies every byte of
the dense checkpoint or persisted window that it uses. Exit code 0: the job could continue from some state; 9: it could
not.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.config.identity import JobIdentity
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, derive_placement
from megatron_ft.config.moved import with_present_keys
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import on_device, refused_devices
from megatron_ft.control.admin import AdminClient, JobNotRunning
from megatron_ft.control.rundir import RUN_ID_NAME, RunId
from megatron_ft.corpus.samples import check_data
from megatron_ft.errors import EXIT_OK, CheckpointError, ConfigError, DataError, MegatronFtError, RecoveryError
from megatron_ft.events import (
    MembershipChanged,
    PlacementInForce,
    RanksReady,
    RanksRestarted,
    Record,
    RunStarted,
    WindowCommitted,
)
from megatron_ft.operators import OperatorId
from megatron_ft.planning.devices import DeviceChoice, other_device
from megatron_ft.planning.job import with_slots
from megatron_ft.planning.placement.plan import PlacementPlan
from megatron_ft.planning.placement.stage import StageRequest, first_plans
from megatron_ft.planning.recovery.costs import cost_of_loss, placer
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
from megatron_ft.planning.recovery.living_state import LivingState
from megatron_ft.planning.recovery.strategy import Cost, Stored
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.planning.state.declined import Declined
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.checkpoints import iteration_of, newest_valid
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Window
from megatron_ft.telemetry.read import read_events, read_metrics

NUM_MEASURED = 50
"""Number of recent iterations. Predicted times use the median duration of these iterations."""
_VOCABULARY = 1
"""Placeholder for the vocabulary size, which only the tokenizer knows. No result of this tool depends on this size."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of the tool: the predicted recovery and its cost. ``--json`` prints this object."""

    cost: Cost
    num_operators: int
    seconds_again: float | None
    """Predicted seconds to repeat lost iterations: their number times the median of recent durations; None if
    unknown."""
    seconds_to_continue: float | None
    """Median duration of earlier changes of membership in the run, in seconds. None if there were no such changes, or
    if the recovery would not use the strategy ``living_state``."""
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    """Device for which the result is valid: ``cpu`` or ``cuda``."""

    def to_json(self) -> dict[str, Any]:
        figures = {"num_operators": self.num_operators, "notes": list(self.notes), "device": self.device}
        seconds = {"seconds_again": self.seconds_again, "seconds_to_continue": self.seconds_to_continue}
        return {**self.cost.to_json(), **figures, **seconds}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Data that the tool has read from the folder of a run."""

    path: Path
    config: JobConfig
    events: Sequence[Record]
    layout: MembershipLayout
    """Parallel layout of the nodes that train at present."""
    is_running: bool
    status: Mapping[str, Any]
    """Status of the job according to its controller; empty if the job is not running."""

    @classmethod
    def of(cls, path: Path, *, as_if_running: bool) -> "Run":
        """Read the folder of a run.

        Raises:
            DataError: the folder does not contain a run, or its files are damaged.
            ControlError: the controller of the running job refuses the request.
        """
        config = read_config(path / "config.yaml")
        try:
            events = read_events(path)
        except (OSError, ValueError) as error:
            raise DataError(f"run_dir={path}: must have events.jsonl: {error}") from None
        status: Mapping[str, Any] = {}
        try:
            with AdminClient(path) as operator:
                status = operator.status()
        except JobNotRunning:
            pass  # not an error: the result shows that strategies which need live ranks decline
        config = _on_its_device(config, events)
        layout = layout_of(config, events, status.get("members"))
        is_running = as_if_running or bool(status)
        return cls(path=path, config=config, events=events, layout=layout, is_running=is_running, status=status)

    def facts(self, plans: Sequence[PlacementPlan], snapshot: SnapshotReport | None) -> RecoveryFacts:
        """Return facts about the run from which each recovery strategy decides whether it can be used. Some of these
        facts come from the controller's status and the run's events."""
        facts, status = RecoveryFacts.of(self.config, plans, snapshot, self.layout), self.status
        num_nodes = self.config.launch.num_nodes
        has_changed = any(len(nodes) != num_nodes for nodes in nodes_since_restart(self.events))
        return dataclasses.replace(
            facts,
            is_running=self.is_running,
            iteration_seconds=iteration_seconds_of(self) or facts.iteration_seconds,
            # Controllers of earlier versions do not report these fields.
            has_changed_layout=self.config.recovery.keep_layout
            and (has_changed or not status.get("keeps_layout", True)),
            num_waiting=len(status["replacements"]) if "replacements" in status else None,
            worn_nodes=tuple(status.get("worn", ())),
        )

    def placement(self) -> tuple[list[PlacementPlan], list[Any] | None]:
        """Return the current placement of each stage, and the loads from which the placements were planned.

        For a job without expert replicas, return an empty list and None.

        Raises:
            DataError: the placement file is missing, damaged, or belongs to another membership.
        """
        if self.config.placement.algorithm is None:
            return [], None
        newest = [event for event in self.events if isinstance(event, PlacementInForce)][-1:]
        if not newest:
            raise DataError(
                f"run_dir={self.path}: the run has not reported a placement yet; try again after its first iteration"
            )
        path = self.path / "placements" / f"iter_{newest[0].iteration:07d}.json"
        try:
            content = parse_json(path.read_bytes())
            plans, loads = [PlacementPlan.from_json(plan) for plan in content["stages"]], content["loads"]
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise DataError(f"{path}: must contain the current placement: {error}") from None
        num_ranks = len(self.layout.processes)
        if (found := sum(len(plan.ranks) for plan in plans)) != num_ranks:
            raise DataError(
                f"{path}: contains a placement of {found} ranks, but the current nodes {sorted(self.layout.nodes)} "
                f"have {num_ranks} ranks; if nodes are joining or leaving now, try again later"
            )
        return plans, loads

    def stored(self) -> tuple[Stored, tuple[str, ...]]:
        """Return which windows (in memory, persisted) and which dense checkpoint of the run are the newest. Also return
        a note for each persisted window or checkpoint that is skipped because it is damaged or of another run."""
        metrics = read_metrics(self.path)
        identity = self._identity()

        def check(directory: Path) -> Manifest:
            """Verify a checkpoint. Raise a CheckpointError if it belongs to another run."""
            manifest = Manifest.verified(directory)
            if (reason := _not_own(identity, manifest)) is not None:
                raise CheckpointError(reason)
            return manifest

        path, damaged = newest_valid(self.path / "checkpoints", check)
        notes = [f"{report.path}: skipped: {report.reason}" for report in damaged]
        persisted = persisted_last = None
        if folder := WindowFolder.of_run(self.config, self.path):
            world_size = self.config.launch.num_nodes * self.config.launch.ranks_per_node
            entry, reports = folder.newest(world_size, lambda window: _not_own(identity, window))
            if entry is not None:
                persisted = entry.start_iteration
                with folder.open(entry, 0) as opened:
                    persisted_last = persisted + opened.window.num_slices - 1
            notes += [f"{report.path}: skipped: {report.reason}" for report in reports]
        committed = windows_in_memory(self.events)
        stored = Stored(
            iteration=metrics[-1].iteration if metrics else 0,
            memory_start=committed[-1].start_iteration if committed else None,
            memory_last=committed[-1].start_iteration + committed[-1].num_iterations - 1 if committed else None,
            persisted_start=persisted,
            persisted_last=persisted_last,
            checkpoint=None if path is None else iteration_of(path),
            placed_from=placed_from(self.events),
        )
        return stored, tuple(notes)

    def _identity(self) -> JobIdentity | None:
        """Return the identity of the run (id and name, no settings), to check which checkpoints and windows are of this
        run. Return None if the folder contains no run id, as in runs of older versions."""
        if not (self.path / RUN_ID_NAME).exists():
            return None
        known = RunId.read(self.path)
        older = known.is_older
        return JobIdentity(run_id=known.run_id, run_name=self.path.name, settings={}, takes_format_1=older)


def _not_own(identity: JobIdentity | None, found: Manifest | Window) -> str | None:
    """Return why the checkpoint or window ``found`` belongs to another run; None if it belongs to ``identity``."""
    if identity is None:
        return None
    name = found.run_name if isinstance(found, Manifest) else "of another name"
    return identity.not_of_run(run_id=found.run_id, run_name=name, format_version=found.format_version)


def read_config(path: Path) -> JobConfig:
    """Read the configuration with which a run was started, including derived values.

    Raises:
        DataError: there is no such file, or it does not belong to a run.
    """
    import yaml

    try:
        return derive_placement(from_dict(with_present_keys(yaml.safe_load(path.read_text()))))
    except (OSError, yaml.YAMLError, ConfigError, AttributeError) as error:
        raise DataError(f"{path}: must contain the configuration of a run: {error}") from None


def _on_its_device(config: JobConfig, events: Sequence[Record]) -> JobConfig:
    """Return ``config`` with ``training.device`` set to the device that ranks reported last. Return ``config``
    unchanged if no rank has reported a device."""
    reported = [event.device.partition(":")[0] for event in events if isinstance(event, RunStarted) and event.device]
    return on_device(config, reported[-1]) if reported else config


def since_start(events: Sequence[Record]) -> Sequence[Record]:
    """Return the events of the newest job of the run, from the first start of its ranks on."""
    first, is_restarting = len(events), False
    for index, event in enumerate(events):
        if isinstance(event, RanksRestarted):
            is_restarting = True
        elif isinstance(event, RanksReady):
            # Nodes and windows in memory outlive a restart of the ranks by the same job.
            first, is_restarting = first if is_restarting else index, False
    return events[first:]


def nodes_since_restart(events: Sequence[Record]) -> list[tuple[int, ...]]:
    """Return the nodes of each membership (set of ranks that train together) since the ranks last (re)started."""
    found: list[tuple[int, ...]] = []
    for event in since_start(events):
        if isinstance(event, RanksRestarted):
            found = [event.nodes] if event.nodes else []
        elif isinstance(event, MembershipChanged):
            found.append(event.nodes)
    return found


def windows_in_memory(events: Sequence[Record]) -> list[WindowCommitted]:
    """Return the windows committed since the number of ranks last changed. Earlier windows cannot be loaded: a window
    can be loaded only by as many ranks as captured it."""
    found: list[WindowCommitted] = []
    num_ranks = None
    for event in since_start(events):
        if isinstance(event, RanksReady | MembershipChanged):
            found = found if event.world_size == num_ranks else []
            num_ranks = event.world_size
        elif isinstance(event, WindowCommitted):
            found.append(event)
    return found


def placed_from(events: Sequence[Record]) -> int:
    """Return the first iteration after a rebalance or script last moved experts; 0 if none did so since the ranks last
    (re)started. Placements because of a change of membership do not count."""
    first = 0
    for event in since_start(events):
        if isinstance(event, RanksReady | RanksRestarted):
            first = 0
        elif isinstance(event, PlacementInForce) and event.reason not in ("first", "resumed", "membership"):
            first = event.iteration
    return first


def layout_of(config: JobConfig, events: Sequence[Record], members: Sequence[int] | None = None) -> MembershipLayout:
    """Return the parallel layout of the newest membership in ``events``. ``members`` are the current nodes of a running
    job; if ``members`` differ from the nodes in ``events``, return the layout on ``members`` instead."""
    layouts, first = JobLayouts.of(config), tuple[int, ...]()
    changes: list[Record] = []
    for event in since_start(events):
        if isinstance(event, RanksRestarted):
            first, changes = event.nodes, []
        else:
            changes.append(event)
    # Earlier versions did not record the nodes of a restart.
    layout = layouts.history(_memberships(changes), first or None)[-1]
    if members is not None and isinstance(layout, MembershipLayout) and set(members) != set(layout.nodes):
        layout = layouts.on(members, layout)
    if isinstance(layout, Declined):
        raise DataError(f"the present nodes of the run cannot form the job's layout: {layout.reason}")
    return layout


def _memberships(events: Sequence[Record]) -> list[tuple[int, ...]]:
    """Return the nodes of each membership, except memberships whose iterations a later recovery discarded."""
    found: list[MembershipChanged] = []
    for event in events:
        if not isinstance(event, MembershipChanged):
            continue
        # ``schedule`` lists this change and those earlier changes after the same ``iteration`` that are still valid.
        num_alike = sum(earlier.iteration == event.iteration for earlier in found)
        num_valid = len(found) - num_alike + max(0, len(event.schedule) - 1)
        found = [*found[:num_valid], event]
    return [event.nodes for event in found]


def ask_run(path: Path, lost: Sequence[int] | None, *, is_gone: bool, as_if_running: bool) -> Answer:
    """Predict the recovery of the run in folder ``path`` if it lost the nodes ``lost``, or all its processes if
    ``lost`` is None. Raise a MegatronFtError if the folder cannot be read or ``lost`` is invalid."""
    run = Run.of(path, as_if_running=as_if_running)
    plans, loads = run.placement()
    facts = run.facts(plans, SnapshotReport.of(run.config, _VOCABULARY))
    stored, notes = run.stored()
    place = placer(run.config, JobInputs.read(run.config), loads or None)
    nodes, ends_job = (facts.nodes, True) if lost is None else (lost, False)
    found = cost_of_loss(facts, nodes, is_gone=is_gone, ends_job=ends_job, place=place, stored=stored)
    device = run.config.training.device
    if device == "auto":
        device, notes = "cpu", (*notes, "no rank has reported its device yet; this result assumes cpu")
    return Answer(cost=found, num_operators=len(facts.operators), notes=notes, device=device, **seconds_of(run, found))


def ask_config(overrides: Sequence[str], lost: Sequence[int] | None, *, is_gone: bool) -> Answer:
    """Predict the recovery of a job that has not been started. Raise a MegatronFtError for invalid arguments."""
    from megatron_ft.config.validate import validate
    from pretrain_moe import compose

    given, _ = compose(list(overrides))
    validate(given)
    device, others = _device_of(given)
    config, _ = with_slots(on_device(given, device), device, lambda: check_data(given))
    plans = []
    if config.placement.algorithm is not None:
        plans = first_plans(config, StageRequest.of_job(config), JobInputs.read(config))
    facts = RecoveryFacts.of(config, plans, SnapshotReport.of(config, _VOCABULARY))
    nodes, ends_job = (facts.nodes, True) if lost is None else (lost, False)
    place = placer(config, JobInputs.read(config))
    found = cost_of_loss(facts, nodes, is_gone=is_gone, ends_job=ends_job, place=place)
    again = 0.0 if found.max_iterations == 0 else None
    return Answer(
        cost=found,
        num_operators=len(facts.operators),
        seconds_again=again,
        seconds_to_continue=None,
        notes=others,
        device=device,
    )


def _device_of(config: JobConfig) -> tuple[str, tuple[str, ...]]:
    """Return the device (``cpu`` or ``cuda``) that the tool's result assumes, and a note if ranks may run on another.

    Raises:
        ConfigError: the configuration cannot run on its device.
    """
    from pretrain_moe import observe_here

    refused, gpu_memory_bytes = refused_devices(config), config.limits.gpu_memory_bytes
    choice = DeviceChoice.of(
        config.training.device,
        observe_here(),
        gpu_memory_bytes=gpu_memory_bytes,
        refused=refused,
        may_be_elsewhere=True,
    )
    other = other_device(choice, refused, config.recovery)
    return choice.device, (f"{choice.reason}; {other}",) if other else ()


def iteration_seconds_of(run: Run) -> float | None:
    """Return the median duration of the newest iterations of a run. Return None if no duration is recorded."""
    pace = [each.values["iteration_seconds"] for each in read_metrics(run.path) if "iteration_seconds" in each.values]
    return statistics.median(pace[-NUM_MEASURED:]) if pace else None


def seconds_of(run: Run, cost: Cost) -> dict[str, float | None]:
    """Compute the fields ``seconds_again`` and ``seconds_to_continue`` of ``Answer`` from the run's records."""
    pace = iteration_seconds_of(run)
    changes = [event.seconds for event in run.events if isinstance(event, MembershipChanged)]
    again = None
    if cost.max_iterations is not None and (pace is not None or cost.max_iterations == 0):
        again = cost.max_iterations * pace if pace is not None else 0.0
    to_continue = statistics.median(changes) if changes and cost.strategy == LivingState.name else None
    return {"seconds_again": again, "seconds_to_continue": to_continue}


def render(answer: Answer) -> str:
    """Format the result of the tool as text."""
    cost = answer.cost
    num_lost = len(cost.lost_operators)
    moved = "" if cost.moved_bytes is None else f", {cost.moved_bytes:,} bytes of state move"
    lines = [
        f"on {answer.device}: {cost.summary()}{moved}",
        f"operators: {answer.num_operators - num_lost} of {answer.num_operators} {_held(cost)}",
    ]
    if cost.lost_operators:
        lines.append(f"  lost: {grouped(cost.lost_operators)}")
    predicted = cost.predicted if cost.seconds is not None else f"unknown: {', '.join(cost.why_no_seconds)}"
    lines.append(f"predicted time of the recovery: {predicted}")
    lines.append(f"time to repeat iterations: {_seconds(answer.seconds_again)}")
    lines.append(f"time until training continues: {_seconds(answer.seconds_to_continue)}")
    for declined in cost.declined:
        missing = f": {grouped(declined.operators)}" if declined.missing else ""
        lines.append(f"not used: {declined.strategy}: {declined.reason}{missing}")
    return "\n".join([*lines, *(f"note: {note}" for note in answer.notes)])


def _held(cost: Cost) -> str:
    """Return the text after ``operators: N of M`` (N operators are not lost): whether the recovery uses their state."""
    if cost.keeps_processes:
        return "keep their current state"
    return "have their current state on remaining nodes, but the recovery does not use this state"


def grouped(operators: Sequence[OperatorId]) -> str:
    """List operators as text, with consecutive experts of a layer as a range: ``2.gate, 2.expert.0-3``."""
    names: list[str] = []
    run: list[OperatorId] = []
    for operator in [*operators, None]:
        follows = run and operator is not None and operator.expert is not None and run[-1].expert is not None
        if follows and operator.layer == run[-1].layer and operator.expert == run[-1].expert + 1:
            run.append(operator)
            continue
        if run:
            names.append(str(run[0]) + (f"-{run[-1].expert}" if len(run) > 1 else ""))
        run = [] if operator is None else [operator]
    return ", ".join(names)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} s"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    first, *_ = (__doc__ or "").split("\n\n")
    result = argparse.ArgumentParser(prog="can_recover", description=first)
    result.add_argument("run_dir", type=Path, nargs="?", help="folder of the run")
    result.add_argument(
        "--config",
        nargs="+",
        metavar="KEY=VALUE",
        help="overrides of a job that has not been started; used instead of a run's folder",
    )
    what = result.add_mutually_exclusive_group(required=True)
    what.add_argument("--lose", metavar="2,5", help="numbers of the nodes that are lost at the same time")
    what.add_argument(
        "--all-processes",
        action="store_true",
        help="all processes of the job die, except snapshot servers that outlive it (snapshot.outlive_job_seconds)",
    )
    result.add_argument(
        "--ranks-only", action="store_true", help="only the ranks of these nodes die; the node agents continue"
    )
    result.add_argument("--as-if-running", action="store_true", help="treat a run that has ended as if it were running")
    result.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    command = parser()
    options = command.parse_args(arguments)
    if (options.run_dir is None) == (options.config is None):
        command.error("either a run's folder or --config must be given")
    try:
        lost = None if options.all_processes else [int(number) for number in options.lose.split(",")]
    except ValueError:
        command.error(f"--lose {options.lose}: must be node numbers separated by commas")
    is_gone = not options.ranks_only and not options.all_processes
    try:
        if options.config is not None:
            answer = ask_config(options.config, lost, is_gone=is_gone)
        else:
            answer = ask_run(options.run_dir, lost, is_gone=is_gone, as_if_running=options.as_if_running)
    except MegatronFtError as error:
        print(f"can_recover: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer.to_json(), indent=2) if options.json else render(answer))
    return EXIT_OK if answer.cost.is_recoverable else RecoveryError.exit_code


if __name__ == "__main__":
    sys.exit(main())
