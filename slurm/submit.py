"""Checks a job on the login node and submits it: ``python slurm/submit.py --nodes 8 experiment=mixtral_slurm``.

The script checks the configuration as ``dry_run=true`` does, with the number of nodes that the job will have. A job
that fails the check is not submitted. The submitted script is a copy of ``pretrain.sbatch`` (with ``--shape array``, of
``pretrain_array.sbatch``) that contains the options and overrides. The run's folder contains this copy as
``slurm/JOBID.sbatch``. With ``--dry-run`` (or ``--check``), the script submits and writes nothing; it prints the dry
run and the command of sbatch.
"""

import argparse
import datetime
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("MFT_INTERFACE", "MFT_PYTHON", "MFT_RUNS", "MFT_RANKS_PER_NODE", "MFT_SPARE_NODES", "MFT_SBATCH")
_START = "set -euo pipefail\n"


class Refused(Exception):
    """Raised when the script does not submit the job. The message is the reason."""


def read_site(path: Path) -> dict[str, str]:
    """Read the values of a site's file (``site.env``) in the same way as the batch script.

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
    """Way to distribute the nodes over Slurm jobs: one allocation, or an array."""

    script: str
    launch: str
    """Option of the configuration group ``launch``."""
    overrides: tuple[str, ...] = ()
    """Overrides that the script sets besides sizes and folders."""
    log: str = "%j"
    """Name of the log in sbatch's syntax, after ``slurm-``."""

    def options(self, num_nodes: int, num_queued: int) -> list[str]:
        """Return the options of sbatch for ``num_nodes`` running nodes. ``num_queued`` further nodes wait in the
        queue."""
        if self.launch == "slurm":
            return [f"--nodes={num_nodes}"]
        return [f"--array=0-{num_nodes - 1}%{num_nodes - num_queued}"]


SHAPES = {
    "allocation": Shape("pretrain.sbatch", "slurm"),
    "array": Shape("pretrain_array.sbatch", "slurm_array", ("run.resume=auto",), "%A_%a"),
}


def check(site: dict[str, str], shape: Shape, num_nodes: int, overrides: Sequence[str]) -> None:
    """Run the dry run of the job. It prints the plan to standard output.

    Raises:
        Refused: the dry run fails.
    """
    num_spares = int(site["MFT_SPARE_NODES"])
    sizes = {"launch.num_nodes": num_nodes - num_spares, "nodes.num_spare_nodes": num_spares}
    sizes["launch.ranks_per_node"] = int(site["MFT_RANKS_PER_NODE"])
    launch = [f"launch={shape.launch}", *(f"{key}={value}" for key, value in sizes.items()), *shape.overrides]
    words = [site["MFT_PYTHON"], "pretrain_moe.py", *launch, *overrides, "dry_run=true"]
    if subprocess.run(words, cwd=HERE.parent, check=False).returncode != 0:
        raise Refused("the dry run refuses this job, so it was not submitted")


def make_script(name: str, options: Sequence[str], overrides: Sequence[str], *, variables: Mapping[str, str]) -> str:
    """Return a script of this folder, with the given sbatch options, overrides and environment variables."""
    script = (HERE / name).read_text(encoding="utf-8")
    assert script.count(_START) == 1, "the script must have exactly one first command after the directives"
    directives = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in options)
    exports = "".join(f"export {variable}={shlex.quote(text)}\n" for variable, text in variables.items())
    return script.replace(_START, f'{directives}{_START}{exports}set -- {shlex.join(overrides)} "$@"\n')


def refuse(chosen: argparse.Namespace, num_spares: int) -> None:
    """Raise ``Refused`` for an option that is impossible for every shape, or for the chosen one.

    Raises:
        Refused: an option is impossible.
    """
    if chosen.shape != "array" and chosen.queued != 0:
        raise Refused("--queued: can only be used with --shape array")
    if not 0 <= chosen.queued <= num_spares:
        raise Refused(
            f"--queued={chosen.queued}: must be in 0..{num_spares} (MFT_SPARE_NODES): only spare nodes can "
            "start later than the others"
        )
    if chosen.chain < 1:
        raise Refused(f"--chain={chosen.chain}: must be at least 1")
    if not chosen.check and shutil.which("sbatch") is None:
        raise Refused(
            "sbatch: must be installed; submit on a login node of the cluster, or use --dry-run, which needs no Slurm"
        )


def submit(script: str) -> str:
    """Submit the script with ``sbatch``. Return the id of the job.

    Raises:
        Refused: Slurm does not accept the script.
    """
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, cwd=HERE.parent, check=False
    )
    if done.returncode != 0:
        raise Refused(f"sbatch: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def submit_chain(script: str, length: int) -> list[str]:
    """Submit the script with ``sbatch`` several times. Return the ids of the jobs.

    Raises:
        Refused: Slurm does not accept one of the jobs. Earlier jobs stay submitted, and the message names them.
    """
    jobs: list[str] = []
    for _ in range(length):
        try:
            jobs.append(submit(script))
        except Refused as refusal:
            if not jobs:
                raise
            raise Refused(
                f"{refusal}\nof {length} jobs, these were submitted and remain in the queue: {', '.join(jobs)}"
            ) from None
    return jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    default_site = Path(os.environ.get("MFT_SITE") or HERE / "site.env")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--nodes", type=int, required=True, help="number of nodes of the allocation or array, including spares"
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="allocation", help="one allocation, or a job array with one task per node"
    )
    parser.add_argument(
        "--queued", type=int, default=0, help="number of an array's spares that may still wait in Slurm's queue"
    )
    parser.add_argument(
        "--chain", type=int, default=1, help="number of jobs to submit; each continues the run of the previous job"
    )
    parser.add_argument(
        "--check",
        "--dry-run",
        dest="check",
        action="store_true",
        help="only check the job and print the command of sbatch; needs no Slurm",
    )
    parser.add_argument("--site", type=Path, default=default_site, help="file with the values of the site (MFT_SITE)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. experiment=mixtral_slurm")
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
        is_chained = chosen.shape == "array" or chosen.chain > 1
        options = [*shlex.split(site["MFT_SBATCH"]), *shape.options(chosen.nodes, chosen.queued)]
        options += [f"--job-name={names[-1]}", "--dependency=singleton"] if is_chained else []
        options += [f"--output={runs}/slurm-{shape.log}.log"]
        variables = {"MFT_SITE": str(site_file)} | ({"MFT_CHAINED": "1"} if is_chained else {})
        if chosen.check:
            exports = shlex.join(f"{name}={text}" for name, text in variables.items())
            line = shlex.join(["sbatch", *options, str(HERE / shape.script), *overrides])
            print(f"checked; nothing was submitted. sbatch\n  {exports} {line}")
            return 0
        runs.mkdir(parents=True, exist_ok=True)
        jobs = submit_chain(make_script(shape.script, options, overrides, variables=variables), chosen.chain)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    job, log = jobs[0], shape.log.replace("%a", "0").replace("%A", jobs[0]).replace("%j", jobs[0])
    then = f", then {', '.join(jobs[1:])}" if jobs[1:] else ""
    print(f"job       {job}{then}\nlog       {runs}/slurm-{log}.log\nrun       {runs / names[-1]}")
    print(f"result    {runs / names[-1]}/slurm/{job}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
