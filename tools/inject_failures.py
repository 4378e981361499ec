"""Injects failures into a running job: kills, stops, disconnects, drains or adds nodes, lets their disks fail, or
replays a recorded trace.

python -m tools.inject_failures runs/moe_tiny-001 --kill 2 --at-iteration 50
python -m tools.inject_failures runs/moe_tiny-001 --stop 1 --for 5
python -m tools.inject_failures runs/moe_tiny-001 --partition 1 --for 30
python -m tools.inject_failures runs/moe_tiny-001 --disk-error 0 1 --for 5
python -m tools.inject_failures runs/moe_tiny-001 --trace trace.csv --minutes 80 --scale 0.05 --most-nodes 10

A failure affects whole nodes from outside, at any moment of an iteration. To inject a failure into one phase of one
rank, start the job with testing.failpoints. Every failure is recorded in <run>/injected.jsonl before it happens.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.config.moved import with_present_keys
from megatron_ft.control.admin import CONTROLLER_FILE, AdminClient, JobNotRunning
from megatron_ft.errors import EXIT_OK, ConfigError, ControlError, DataError, MegatronFtError
from megatron_ft.failures.injecting import INJECTED_FILE, Injector
from megatron_ft.failures.traces import MembershipTrace

_PAUSE_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        problems = _inject(options)
    except MegatronFtError as error:
        print(f"inject_failures: {error}", file=sys.stderr)
        return error.exit_code
    for problem in problems:
        print(f"inject_failures: not injected: {problem}", file=sys.stderr)
    print(
        f"{'some failures were not' if problems else 'all failures were'} injected; see "
        f"{options.run_dir / INJECTED_FILE}"
    )
    return ControlError.exit_code if problems else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="inject_failures", description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    what = parser.add_mutually_exclusive_group(required=True)
    node = functools.partial(what.add_argument, type=int, metavar="NODE")
    node("--kill", nargs="+", help="send SIGKILL to all processes of these nodes at the same time")
    node("--stop", nargs="+", help="send SIGSTOP to all processes of these nodes")
    node(
        "--partition",
        nargs="+",
        help="cut these nodes off the network, each of which must have its own network namespace; needs root",
    )
    node("--disk-error", nargs="+", help="make every file write of these nodes' processes fail (EFBIG)")
    node("--drain", help="make the node leave between two iterations")
    node("--add", help="start the node, which joins between two iterations")
    what.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay a file with lines `milliseconds,add|remove,node`"
    )
    parser.add_argument("--at-iteration", type=int, metavar="N", help="inject after the run has reported iteration N")
    parser.add_argument(
        "--for",
        dest="seconds",
        type=float,
        metavar="SECONDS",
        help="duration of the failure: with --stop, the time until SIGCONT is sent",
    )
    parser.add_argument(
        "--minutes", type=float, help="with --trace: minutes of the trace to replay, from its beginning; default all"
    )
    parser.add_argument("--scale", type=float, help="with --trace: real seconds per second of the trace; default 1")
    parser.add_argument(
        "--most-nodes",
        type=int,
        help="with --trace: largest number of the trace's nodes to use; default nodes.max_nodes",
    )
    return parser


def _inject(options: argparse.Namespace) -> list[str]:
    """Inject the failures that the command line requests. Return a description of each failure that could not be
    injected. Raise a MegatronFtError for invalid options or if no job runs."""
    _check(options)
    with AdminClient(options.run_dir) as operator:
        operator.status()  # raises an error if no job runs in this folder
    launch = _launch(options.run_dir)
    injector = Injector(
        run_dir=options.run_dir,
        ranks_per_node=launch["ranks_per_node"],
        connect=lambda: AdminClient(options.run_dir),
    )
    if options.trace is not None:
        return _replay(injector, options, launch)
    _wait_for_iteration(options)
    if options.kill is not None:
        injector.kill(options.kill, at_iteration=options.at_iteration)
    elif options.stop is not None:
        for log in injector.stop(options.stop, options.seconds, at_iteration=options.at_iteration):
            print(f"the process that writes {log} ended while it was stopped")
    elif options.partition is not None:
        injector.partition(options.partition, options.seconds, at_iteration=options.at_iteration)
    elif options.disk_error is not None:
        injector.fail_disk(options.disk_error, options.seconds, at_iteration=options.at_iteration)
    elif options.drain is not None:
        injector.drain(options.drain, at_iteration=options.at_iteration)
    else:
        injector.add(options.add, at_iteration=options.at_iteration)
    return []


def _check(options: argparse.Namespace) -> None:
    """Check that the options of the command line are consistent. Raise a ConfigError if they are not."""
    for option in ("minutes", "scale", "most-nodes"):
        if (value := getattr(options, option.replace("-", "_"))) is not None and options.trace is None:
            raise ConfigError.of(f"--{option}", value, "can only be used with --trace")
    lasting = options.partition is not None or options.disk_error is not None
    if options.seconds is not None and options.stop is None and not lasting:
        raise ConfigError.of("--for", options.seconds, "can only be used with --stop, --partition or --disk-error")
    if lasting and options.seconds is None:
        raise ConfigError.of(
            "--for", None, "must be given with --partition and --disk-error, because these failures must end"
        )
    if options.seconds is not None and not 0 < options.seconds < float("inf"):
        raise ConfigError.of("--for", options.seconds, "must be finite and above 0")


def _launch(run_dir: Path) -> dict[str, int]:
    """Read the numbers of nodes and ranks from the run's configuration. Raise a DataError if it cannot be read."""
    path = run_dir / "config.yaml"
    try:
        config = with_present_keys(yaml.safe_load(path.read_text(encoding="utf-8")))
        launch, nodes = config["launch"], config["nodes"]
        numbers = {name: launch[name] for name in ("ranks_per_node", "num_nodes")}
        numbers |= {name: nodes[name] for name in ("num_spare_nodes", "max_nodes")}
    except (OSError, ValueError, KeyError, TypeError, ConfigError, yaml.YAMLError) as error:
        raise DataError(f"{path}: the configuration of the run cannot be read: {error!r}") from None
    if numbers["max_nodes"] is None:
        numbers["max_nodes"] = numbers["num_nodes"] + numbers["num_spare_nodes"]
    if any(type(value) is not int for value in numbers.values()):
        raise DataError(f"{path}: the numbers of nodes and ranks must be integers, but are {numbers}")
    return numbers


def _replay(injector: Injector, options: argparse.Namespace, launch: dict[str, int]) -> list[str]:
    schedule = MembershipTrace.read(options.trace).schedule(
        most_nodes=launch["max_nodes"] if options.most_nodes is None else options.most_nodes,
        minutes=options.minutes,
        scale=1.0 if options.scale is None else options.scale,
    )
    print(schedule.summary())
    _wait_for_iteration(options)
    with AdminClient(options.run_dir) as operator:
        members = sorted(operator.status()["members"])
    if members != list(range(schedule.num_initial_nodes)):
        wanted = f"the trace starts with {schedule.num_initial_nodes} nodes"
        raise ControlError(f"members={members}: must be nodes 0 to {schedule.num_initial_nodes - 1}, because {wanted}")
    return injector.replay(schedule, until=lambda: not (options.run_dir / CONTROLLER_FILE).exists())


def _wait_for_iteration(options: argparse.Namespace) -> None:
    """Wait until the run has reported iteration ``--at-iteration``.

    Raises:
        JobNotRunning: the job ended before that iteration.
    """
    if options.at_iteration is None:
        return
    metrics = options.run_dir / "metrics.jsonl"
    offset, newest = 0, 0
    while newest < options.at_iteration:
        is_over = _is_over(options.run_dir)
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(offset)
                whole, line_end, _ = file.read().rpartition(b"\n")
            offset += len(whole + line_end)
            newest = max([newest, *(json.loads(line).get("iteration", 0) for line in whole.splitlines())])
        if is_over and newest < options.at_iteration:
            raise JobNotRunning(f"the job ended after iteration {newest}, before --at-iteration={options.at_iteration}")
        time.sleep(_PAUSE_SECONDS)


def _is_over(run_dir: Path) -> bool:
    try:
        with AdminClient(run_dir) as operator:
            operator.status()
    except JobNotRunning:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
