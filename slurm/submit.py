"""Check a job on the login node and submit it: ``python slurm/submit.py --nodes 9 model=mixtral_8x7b``.

The configuration is checked as ``dry_run=true`` does, with the nodes that the job will have; what is refused is not
submitted. What is submitted is ``pretrain.sbatch`` with the options and overrides written into it; the job keeps it in
its run's folder, as ``slurm/JOBID.sbatch``.
"""

import argparse
import datetime
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("MFT_INTERFACE", "MFT_PYTHON", "MFT_RUNS", "MFT_RANKS_PER_NODE", "MFT_SPARE_NODES", "MFT_SBATCH")
_START = "set -euo pipefail\n"


class Refused(Exception):
    """The job is not submitted."""


def read_site(path: Path) -> dict[str, str]:
    """The values of a site's file, as the batch script will read them.

    Raises:
        Refused: the file cannot be read, or names no network interface.
    """
    script = 'source "$1" && shift && for name; do printf "%s\\0" "${!name}"; done'
    done = subprocess.run(
        ["bash", "-c", script, "site", str(path), *NAMES], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Refused(f"{path}: {done.stderr.strip()}")
    site = dict(zip(NAMES, done.stdout.split("\0"), strict=False))
    if not site["MFT_INTERFACE"]:
        raise Refused(f"MFT_INTERFACE: must name a network interface, see {path}")
    return site


def check(site: dict[str, str], num_nodes: int, overrides: Sequence[str]) -> None:
    """Have the job's own dry run pass, with its plan on standard output.

    Raises:
        Refused: it does not.
    """
    num_spares = int(site["MFT_SPARE_NODES"])
    sizes = {"num_nodes": num_nodes - num_spares, "num_spare_nodes": num_spares}
    sizes["ranks_per_node"] = int(site["MFT_RANKS_PER_NODE"])
    launch = ["launch=slurm", *(f"launch.{name}={value}" for name, value in sizes.items())]
    words = [site["MFT_PYTHON"], "pretrain_moe.py", *launch, *overrides, "dry_run=true"]
    if subprocess.run(words, cwd=HERE.parent, check=False).returncode != 0:
        raise Refused("the dry run refuses this job: nothing was submitted")


def make_script(options: Sequence[str], overrides: Sequence[str]) -> str:
    """``pretrain.sbatch`` with these options of sbatch and overrides written into it."""
    script = (HERE / "pretrain.sbatch").read_text(encoding="utf-8")
    assert script.count(_START) == 1, "its first command, behind the directives: of two the later one counts"
    directives = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in options)
    return script.replace(_START, f'{directives}{_START}set -- {shlex.join(overrides)} "$@"\n')


def submit(script: str) -> str:
    """Hand the script to ``sbatch``; the job's id.

    Raises:
        Refused: Slurm does not take it.
    """
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, cwd=HERE.parent, check=False
    )
    if done.returncode != 0:
        raise Refused(f"sbatch: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, required=True, help="of the allocation, spares included")
    parser.add_argument("--site", type=Path, default=HERE / "site.env", help="file of the site's values")
    parser.add_argument("overrides", nargs="*", help="of Hydra, e.g. model=mixtral_8x7b")
    chosen = parser.parse_args(arguments)
    overrides = list(chosen.overrides)
    names = [word.partition("=")[2] for word in overrides if word.startswith("run.name=")]
    if not names:
        names = [f"job-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}"]
        overrides.append(f"run.name={names[0]}")
    try:
        site = read_site(chosen.site)
        check(site, chosen.nodes, overrides)
        runs = HERE.parent / site["MFT_RUNS"]
        runs.mkdir(parents=True, exist_ok=True)
        options = [*shlex.split(site["MFT_SBATCH"]), f"--nodes={chosen.nodes}", f"--output={runs}/slurm-%j.log"]
        job = submit(make_script(options, overrides))
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    print(f"job       {job}\nlog       {runs}/slurm-{job}.log\nrun       {runs / names[-1]}")
    print(f"its end   {runs / names[-1]}/slurm/{job}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
