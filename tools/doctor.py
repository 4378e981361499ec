"""Checks a machine before a job is submitted to it. Prints each problem, and how to fix it.

    python -m tools.doctor model=moe_tiny launch.num_nodes=2 snapshot=sparse_window
    srun --nodes=1 python -m tools.doctor --nodes-here 1 <overrides of the job>

The arguments are the overrides of the job. The tool checks ports, interfaces, memory, limits, the run's file system,
clocks, devices and versions. It starts no processes of the job. Exit code 0: no problem; 1: only warnings, and --strict
is given; 2: a problem that would make the job fail.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.doctor.findings import Finding, exit_code, render
from megatron_ft.doctor.software import SoftwareFacts
from megatron_ft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_ft.doctor.needs import JobNeeds


def examine(overrides: Sequence[str], *, nodes_here: int | None) -> list[Finding]:
    """Return all findings for the job that ``overrides`` describe.

    If required packages are missing, return only findings about these packages, as the configuration cannot be read.
    """
    software = SoftwareFacts.observe()
    if lacking := software.missing():
        return lacking
    from megatron_ft.doctor.needs import JobNeeds
    from pretrain_moe import compose, resolve_plan

    found: list[Finding] = []
    needs = None
    try:
        config, _ = compose(list(overrides))
        plan = resolve_plan(config)
        needs = JobNeeds.of(config, plan, nodes_here=nodes_here)
    except ConfigError as refusal:
        subject = "data" if isinstance(refusal, DataError) else "configuration"
        fix = "correct the keys that this error names; checks that need the configuration were skipped"
        found.append(Finding.error(subject, str(refusal), fix))
    device = "cpu" if needs is None else needs.device
    required = needs is not None and needs.uses_transformer_engine
    found += software.check(device=device, needs_transformer_engine=required)
    return [*found, *_examine_machine(needs)]


def _examine_machine(needs: "JobNeeds | None") -> list[Finding]:
    from megatron_ft.doctor.clocks import ClockFacts

    if needs is None:
        return ClockFacts.observe().check()
    from megatron_ft.doctor.devices import check_devices, check_environment
    from megatron_ft.doctor.memory import MemoryFacts
    from megatron_ft.doctor.network import NetworkFacts
    from megatron_ft.doctor.software import check_compilers, name_update_backends
    from megatron_ft.doctor.storage import StorageFacts
    from pretrain_moe import observe_here

    return [
        *NetworkFacts.observe(needs).check(needs),
        *MemoryFacts.observe(run=None if needs.run_name is None else Path(needs.run_dir, needs.run_name)).check(needs),
        *StorageFacts.observe(needs).check(needs),
        *ClockFacts.observe().check(),
        *check_devices(observe_here(asks_memory=needs.device == "cuda"), needs),
        *check_environment(os.environ, needs),
        *check_compilers(needs.kernels, os.environ),
        *([name_update_backends(needs.device, os.environ)] if needs.uses_fp8 else []),
    ]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    first, *_ = (__doc__ or "").split("\n\n")
    result = argparse.ArgumentParser(prog="doctor", description=first)
    result.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the job, as for pretrain_moe.py"
    )
    result.add_argument(
        "--nodes-here", type=int, help="number of nodes on this machine (all with launch.mode=local, otherwise 1)"
    )
    result.add_argument("--strict", action="store_true", help="exit with code 1 if there are warnings but no problems")
    result.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_intermixed_args(arguments)
    found = examine(options.overrides, nodes_here=options.nodes_here)
    code = exit_code(found, strict=options.strict)
    if options.json:
        print(json.dumps({"exit_code": code, "findings": [finding.to_json() for finding in found]}, indent=2))
    else:
        print(render(found))
    return code


if __name__ == "__main__":
    sys.exit(main())
