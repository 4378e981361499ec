"""Downloads and unpacks packages that a GPU machine without a network lacks, into a folder that is copied to the
machine (``make gpu-site``).

    python tools/gpu_site.py .gpu-site
    PYTHONPATH=.gpu-site:. python3 tools/gpu_day.py first

Versions and hashes come from requirements/train.lock. The wheels are always for Python 3.12 on Linux x86-64, even if
this machine is different. A package without a wheel is built, which is possible only if it has no compiled parts.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.lock_requirements import Pin, read_pins

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ("megatron-core", "hydra-core", "omegaconf")
SOURCES = ("antlr4-python3-runtime",)
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
LOCK = ROOT / "requirements" / "train.lock"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0 if the folder contains all packages, otherwise 1."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="gpu_site", description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to write; existing content is deleted")
    folder: Path = parser.parse_args(arguments).folder
    pins = read_pins(LOCK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="gpu-site-") as place:
        wheels = Path(place)
        try:
            _pip("download", wheels, WHEELS, pins, _foreign_wheels())
            _pip("wheel", wheels, SOURCES, pins, ["--no-build-isolation", "--use-pep517"])
        except subprocess.CalledProcessError as error:
            print(f"gpu_site: pip ended with exit code {error.returncode}", file=sys.stderr)
            return 1
        count = unpack(sorted(wheels.glob("*.whl")), folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{count} packages for Python {PYTHON} in {folder}: {size / 1e6:.1f} MB")
    return 0


def requirements(names: Sequence[str], pins: Mapping[Pin, Sequence[str]]) -> str:
    """Return lines for pip, each with a package, its version and all its hashes.

    Raises:
        ValueError: the lock contains no version of a package, several versions, or a version without hashes.
    """
    lines = []
    for name in names:
        found = {pin: hashes for pin, hashes in pins.items() if pin.name == name and pin.pythons != "<"}
        if len(found) != 1 or not all(found.values()):
            raise ValueError(
                f"{name}: {LOCK.name} must contain exactly one version of this package with "
                f"hashes, but has {list(found)}"
            )
        ((pin, hashes),) = found.items()
        lines.append(" ".join([f"{pin.name}=={pin.version}", *(f"--hash=sha256:{each}" for each in hashes)]))
    return "".join(f"{line}\n" for line in lines)


def unpack(wheels: Sequence[Path], folder: Path) -> int:
    """Replace the content of ``folder`` by the content of ``wheels``. Return the number of wheels."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return len(wheels)


def _foreign_wheels() -> list[str]:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    return ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]


def _pip(
    verb: str, folder: Path, names: Sequence[str], pins: Mapping[Pin, Sequence[str]], options: Sequence[str]
) -> None:
    listed = folder / f"{verb}.txt"
    listed.write_text(requirements(names, pins), encoding="utf-8")
    target = {"download": "--dest", "wheel": "--wheel-dir"}[verb]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", verb, "--quiet", "--quiet", "--no-deps"]
    command += ["--require-hashes", target, str(folder), *options, "-r", str(listed)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
