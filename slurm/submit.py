"""Check a job on the login node and submit it: ``python slurm/submit.py --nodes 8 experiment=mixtral_slurm``.

The configuration is checked as ``dry_run=true`` does, with the nodes that the job will have; what is refused is not
submitted. What is submitted is ``pretrain.sbatch`` (``--shape array``: ``pretrain_array.sbatch``) with the options and
overrides written into it; the job keeps it in its run's folder, as ``slurm/JOBID.sbatch``.
"""

import argparse
import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("MFT_INTERFACE", "MFT_PYTHON", "MFT_RUNS", "MFT_RANKS_PER_NODE", "MFT_SPARE_NODES", "MFT_SBATCH")
_START = "set -euo pipefail\n"


class Refused(Exception):
    """The job is not submitted."""


def read_site(path: Path) -> dict[str, str]:
    """Read the values of a site's file as the batch script will.

    Raises:
        Refused: the file cannot be read, names no network interface, or has an invalid count.
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
    for name in ("MFT_RANKS_PER_NODE", "MFT_SPARE_NODES"):
        if not (site[name].isascii() and site[name].isdigit()):
            raise Refused(f"{name}={site[name]}: must be a whole number, see {path}")
    return site


@dataclass(frozen=True)
class Shape:
    """Distribution of nodes over jobs of Slurm."""

    script: str
    launch: str
    """Choice of the group ``launch``."""
    overrides: tuple[str, ...] = ()
    """Overrides that the script sets besides sizes and places."""
    log: str = "%j"
    """Name of the log in sbatch's syntax, after ``slurm-``."""

    def options(self, num_nodes: int, num_queued: int) -> list[str]:
        """Return options of sbatch for this number of nodes; queued ones are not among those that run at a time."""
        if self.launch == "slurm":
            return [f"--nodes={num_nodes}"]
        return [f"--array=0-{num_nodes - 1}%{num_nodes - num_queued}"]


SHAPES = {
    "allocation": Shape("pretrain.sbatch", "slurm"),
    "array": Shape("pretrain_array.sbatch", "slurm_array", ("run.resume=auto",), "%A_%a"),
}


def check(site: dict[str, str], shape: Shape, num_nodes: int, overrides: Sequence[str]) -> None:
    """Run the job's own dry run, with its plan on standard output.

    Raises:
        Refused: it fails.
    """
    num_spares = int(site["MFT_SPARE_NODES"])
    sizes = {"num_nodes": num_nodes - num_spares, "num_spare_nodes": num_spares}
    sizes["ranks_per_node"] = int(site["MFT_RANKS_PER_NODE"])
    launch = [f"launch={shape.launch}", *(f"launch.{name}={value}" for name, value in sizes.items()), *shape.overrides]
    words = [site["MFT_PYTHON"], "pretrain_moe.py", *launch, *overrides, "dry_run=true"]
    if subprocess.run(words, cwd=HERE.parent, check=False).returncode != 0:
        raise Refused("the dry run refuses this job: nothing was submitted")


def make_script(name: str, options: Sequence[str], overrides: Sequence[str], *, variables: Mapping[str, str]) -> str:
    """Write these options of sbatch, overrides and environment variables into a script of this folder."""
    script = (HERE / name).read_text(encoding="utf-8")
    assert script.count(_START) == 1, "its first command, behind the directives: of two the later one counts"
    directives = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in options)
    exports = "".join(f"export {variable}={shlex.quote(text)}\n" for variable, text in variables.items())
    return script.replace(_START, f'{directives}{_START}{exports}set -- {shlex.join(overrides)} "$@"\n')


def refuse(chosen: argparse.Namespace, num_spares: int) -> None:
    """Refuse options that are impossible for any shape or for this one.

    Raises:
        Refused: one of them is.
    """
    if chosen.shape != "array" and chosen.queued != 0:
        raise Refused("--queued is of --shape array")
    if not 0 <= chosen.queued <= num_spares:
        raise Refused(f"--queued={chosen.queued}: must be in 0..{num_spares}, MFT_SPARE_NODES: only spares can be late")
    if chosen.chain < 1:
        raise Refused(f"--chain={chosen.chain}: must be at least 1")


def submit(script: str) -> str:
    """Submit the script with ``sbatch``; returns the job's id.

    Raises:
        Refused: Slurm does not take it.
    """
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, cwd=HERE.parent, check=False
    )
    if done.returncode != 0:
        raise Refused(f"sbatch: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def submit_chain(script: str, length: int) -> list[str]:
    """Submit the script with ``sbatch`` several times; returns the jobs' ids.

    Raises:
        Refused: Slurm does not take one; those before it stay, and are named.
    """
    jobs: list[str] = []
    for _ in range(length):
        try:
            jobs.append(submit(script))
        except Refused as refusal:
            if not jobs:
                raise
            raise Refused(f"{refusal}\nof {length} jobs these were submitted, and stay: {', '.join(jobs)}") from None
    return jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command; its exit code."""
    default_site = Path(os.environ.get("MFT_SITE") or HERE / "site.env")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, required=True, help="of the allocation or the array, spares included")
    parser.add_argument("--shape", choices=SHAPES, default="allocation", help="one allocation, or a task per node")
    parser.add_argument("--queued", type=int, default=0, help="spares of an array that wait in Slurm's queue")
    parser.add_argument("--chain", type=int, default=1, help="jobs, one after the other until the run is done")
    parser.add_argument("--site", type=Path, default=default_site, help="file of the site's values (MFT_SITE)")
    parser.add_argument("overrides", nargs="*", help="of Hydra, e.g. experiment=mixtral_slurm")
    chosen = parser.parse_args(arguments)
    overrides = list(chosen.overrides)
    names = [word.partition("=")[2] for word in overrides if word.startswith("run.name=")]
    if not names:
        names = [f"job-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}"]
        overrides.append(f"run.name={names[0]}")
    try:
        site_file, shape = chosen.site.resolve(), SHAPES[chosen.shape]
        site = read_site(site_file)
        refuse(chosen, int(site["MFT_SPARE_NODES"]))
        check(site, shape, chosen.nodes, overrides)
        folders = [word.partition("=")[2] for word in overrides if word.startswith("run.dir=")]
        runs = HERE.parent / [site["MFT_RUNS"], *folders][-1]
        runs.mkdir(parents=True, exist_ok=True)
        is_chained = chosen.shape == "array" or chosen.chain > 1
        options = [*shlex.split(site["MFT_SBATCH"]), *shape.options(chosen.nodes, chosen.queued)]
        options += [f"--job-name={names[-1]}", "--dependency=singleton"] if is_chained else []
        options += [f"--output={runs}/slurm-{shape.log}.log"]
        variables = {"MFT_SITE": str(site_file)} | ({"MFT_CHAINED": "1"} if is_chained else {})
        jobs = submit_chain(make_script(shape.script, options, overrides, variables=variables), chosen.chain)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    job, log = jobs[0], shape.log.replace("%a", "0").replace("%A", jobs[0]).replace("%j", jobs[0])
    then = f", then {', '.join(jobs[1:])}" if jobs[1:] else ""
    print(f"job       {job}{then}\nlog       {runs}/slurm-{log}.log\nrun       {runs / names[-1]}")
    print(f"its end   {runs / names[-1]}/slurm/{job}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
