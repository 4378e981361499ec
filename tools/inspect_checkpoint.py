"""Inspect dense checkpoints and windows of this project, and Hugging Face folders.

``list`` prints name, dtype, shape and bytes of every tensor. ``verify`` reads all files and reports damage. ``diff``
compares two checkpoints, windows or folders tensor by tensor; its exit code is 1 if they differ. ``strategies`` prints
which recovery strategies can use the state, and whether a new run can start from it; exit code 5 reports damage.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ft.errors import CheckpointError, ConfigError, MegatronFtError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code of an error, 1 if ``diff`` finds a difference, or 0."""
    arguments = _parse(argv)
    from megatron_ft.mcore.device.install import ignore_missing_packages

    ignore_missing_packages()
    try:
        return int(arguments.run(arguments))
    except MegatronFtError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.inspect_checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True)
    lister = commands.add_parser("list", help="print all tensors")
    lister.add_argument("--norms", action="store_true", help="also read all values, and print the norm of each tensor")
    verifier = commands.add_parser("verify", help="read all files, and report damage")
    differ = commands.add_parser("diff", help="compare two checkpoints or folders of the same kind")
    user = commands.add_parser("strategies", help="print which recovery strategies can use it")
    user.add_argument(
        "--run",
        dest="run_dir",
        type=Path,
        help="folder of the run whose next job would load it; default: the run that contains it",
    )
    for command, run in ((lister, _list), (verifier, _verify), (differ, _diff), (user, _strategies)):
        command.add_argument("path", type=Path, help="directory of a checkpoint or window, or Hugging Face folder")
        if command is not user:
            command.add_argument("--optimizer", action="store_true", help="also include the tensors of the optimizer")
        command.add_argument(
            "--trust", action="store_true", help="read checkpoints without a manifest; their files can run code"
        )
        command.add_argument("--json", action="store_true", help="print one JSON document")
        command.set_defaults(run=run)
    differ.add_argument("other", type=Path, help="checkpoint or folder to compare with path")
    differ.add_argument(
        "--tolerance", type=float, default=0.0, help="allowed difference, relative to the largest value"
    )
    differ.add_argument("--most", type=int, default=10, help="number of tensors that are printed, worst first")
    return parser.parse_args(argv)


def _open(path: Path, arguments: argparse.Namespace) -> Any:
    from megatron_ft.mcore.convert.inspection import open_source

    return open_source(path, trust=arguments.trust, with_optimizer=arguments.optimizer)


def _list(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.inspection import to_json, with_norms

    source = _open(arguments.path, arguments)
    rows = list(with_norms(source) if arguments.norms else source.rows())
    if arguments.json:
        print(json.dumps({"title": source.title, "tensors": [to_json(row) for row in rows]}))
        return 0
    print(source.title)
    for row in rows:
        norm = "" if row.norm is None else f"  norm {row.norm:.6g}"
        of = "" if row.iteration is None else f"  iteration {row.iteration}"
        print(f"{row.name}  {row.dtype}  {list(row.shape)}  {row.num_bytes:,} bytes{norm}{of}")
    print(f"{len(rows)} tensors, {sum(row.num_bytes for row in rows):,} bytes")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    source = _open(arguments.path, arguments)  # compares files and checksums
    source.check()
    num_tensors = 0
    for row in source.rows():
        source.read(row.name)
        num_tensors += 1
    if arguments.json:
        print(json.dumps({"title": source.title, "num_tensors": num_tensors, "damage": None}))
    else:
        print(f"{source.title}; {num_tensors} tensors, no damage found")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.inspection import differences, to_json

    for name, value in (("--tolerance", arguments.tolerance), ("--most", arguments.most)):
        if not 0 <= value < float("inf"):
            raise ConfigError.of(name, value, "must be at least 0 and finite")
    sources = [_open(path, arguments) for path in (arguments.path, arguments.other)]
    found = differences(*sources, tolerance=arguments.tolerance)
    if arguments.json:
        print(json.dumps({"differences": [to_json(each) for each in found]}))
        return int(bool(found))
    for each in found[: arguments.most]:
        size = "" if each.largest is None else f", by at most {each.largest:.3g} of the largest value"
        print(f"{each.name}: {each.reason}{size}")
    shown = min(len(found), arguments.most)
    print(f"{len(found)} tensors differ" + (f" ({shown} shown)" if shown < len(found) else ""))
    return int(bool(found))


def _strategies(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.uses import find_uses

    found = find_uses(arguments.path, trust=arguments.trust, run_dir=arguments.run_dir)
    print(json.dumps(asdict(found)) if arguments.json else found.render())
    if found.damage is None:
        return 0
    print(found.damage, file=sys.stderr)
    return CheckpointError.exit_code


if __name__ == "__main__":
    sys.exit(main())
